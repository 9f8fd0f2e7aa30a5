"""Verification in place: a step is repeated where it was made.

`check` compares the repetition with the update; `repetition` runs the recorded passes again; `state_before` and `users_state` hold what
is restored afterwards. It may import what `capture` may.
"""

__all__ = ["check", "loss_origin", "penalty_terms", "repetition", "state_before", "users_state"]
