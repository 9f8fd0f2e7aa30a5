"""Rounds of federated training: several trainings that are one audit.

This package may import what `capture` may.

    from leakaudit.capture.rounds.registry import finish_rounds, open_round
    from leakaudit.capture.rounds.transmission import judge_round

    kept = open_round("leakaudit-audit")     # after a training, in the process that trained
    if kept is not None:
        kept.sent(state_dict)                # what leaves the machine, after clipping, noise, compression
"""

__all__ = ["audit", "before_round", "elsewhere", "registry", "run", "sent", "transmission"]
