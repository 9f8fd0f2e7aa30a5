"""Takes the policy and the state of the code when a run begins."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from leakaudit.files.git import head_of
from leakaudit.gate.policy import Policy
from leakaudit.results.origin import Origin
from leakaudit.results.schema import TakenPolicy


def origin_of(
    policy: Policy,
    out: Path,
    *,
    data: str = "",
    data_invented: bool = False,
    base_model: str = "",
    now: datetime | None = None,
) -> Origin:
    """Return what is known now, at the beginning of a run.

    Args:
        policy: the policy that will judge the run, the built-in one too.
        out: folder of the audit. What it holds is no change of the code.
        data: name of the data set; empty without one.
        data_invented: whether its owner says that all texts were invented.
        base_model: the weights that training begins with; empty if unknown.
        now: the time; None for the clock's.
    """
    head = head_of(Path.cwd(), out)
    moment = (now or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds")
    return Origin(
        policy=TakenPolicy(name=policy.name, digest=policy.digest, taken_at=moment),
        code_commit=None if head is None else head.commit,
        code_dirty=None if head is None else head.dirty,
        base_model=base_model,
        data=data,
        data_invented=data_invented,
    )
