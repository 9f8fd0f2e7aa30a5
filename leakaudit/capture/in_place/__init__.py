"""Verification in place: the repetition of a step in the training process.

`check` compares the repetition with the update; `repetition` runs the recorded passes again; `state_before` and `users_state` hold the
state that is restored afterwards. This package may import what `capture` may.
"""

__all__ = ["check", "loss_origin", "penalty_terms", "repetition", "state_before", "users_state"]
