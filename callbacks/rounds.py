"""What a federated client says about its rounds (`unit: round`).

    finish("leakaudit-audit")                       # ends the audit: one report and one verdict on all rounds

An integration that sees what leaves the machine calls, after each training and in the process that trained:

    kept = open_round("leakaudit-audit")            # None if the round is not kept
    if kept is not None:
        kept.sent(state_dict)                       # after clipping, noise and compression; names as in the model
    if not judge_round("leakaudit-audit").passes:   # waits for the attacks on this round
        raise ...                                   # block the transmission
"""

from __future__ import annotations

from pathlib import Path

from leakaudit.capture.rounds.registry import finish_rounds, open_round
from leakaudit.capture.rounds.sent import OpenRound
from leakaudit.capture.rounds.transmission import Judgement, judge_round

__all__ = ["Judgement", "OpenRound", "finish", "judge_round", "open_round"]


def finish(out_dir: Path | str | None = None) -> None:
    """End an audit of rounds: one report and one verdict on all of them.

    Without this call the audit ends with the last of the planned `rounds`, or with the program. It waits for the attacks as `at_end` and
    `wait_at_end_s` of the configuration say, and never raises.

    Args:
        out_dir: folder of the audit, as its configuration names it; None for every audit of rounds in this process.
    """
    finish_rounds(out_dir)
