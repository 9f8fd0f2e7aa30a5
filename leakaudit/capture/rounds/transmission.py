"""The judgement on one round before it is transmitted.

It fails closed. Only a round that was attacked and passes its policy may leave: a time limit that runs out, a crash, a round that was not
kept or cannot be verified blocks the transmission like a leak.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from leakaudit.capture.remaining_snapshots import command_to_continue
from leakaudit.capture.rounds.audit import RoundAudit
from leakaudit.capture.rounds.registry import audit_in
from leakaudit.errors import LeakAuditError, ResultsError, type_and_place
from leakaudit.gate.evaluate import evaluate_step
from leakaudit.gate.policy import Policy, load_policy, round_policy
from leakaudit.gate.verdict import Status
from leakaudit.plugins.names import registered_names
from leakaudit.results.files import load_results
from leakaudit.results.schema import Results, StepRecord

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""Seconds between two looks at the results. Our choice: attacks on a round take seconds."""

TIMEOUT_SECONDS = 600.0
"""Seconds that a transmission waits for its judgement by default. Our choice: eight attacks with the default budget take at most 480 s."""


@dataclass(frozen=True)
class Judgement:
    """The answer on one round."""

    status: Status
    """PASS if the round may be transmitted."""
    reason: str
    """Why, in a sentence or more without private text."""
    round: int | None = None
    """Number of the round; None if there is none."""

    @property
    def passes(self) -> bool:
        """Whether the round may be transmitted; everything but a PASS blocks it."""
        return self.status is Status.PASS


def judge_round(
    out_dir: Path | str | None = None, *, policy: Policy | Path | None = None, timeout_s: float = TIMEOUT_SECONDS
) -> Judgement:
    """Judge the round that this process trained last, and wait for the attacks on it.

    Call it after `OpenRound.sent`, if what is sent differs from what was trained; this call releases the round. It never raises.

    Args:
        out_dir: folder of the audit, as its configuration names it; None for the only audit of rounds in this process.
        policy: the rules, or their file; None for `leakaudit.gate.policy.round_policy`.
        timeout_s: most seconds to wait.

    Returns:
        The judgement. It is no PASS if the audit cannot judge.
    """
    try:
        return _judge(out_dir, policy, timeout_s)
    except LeakAuditError as error:
        return Judgement(Status.ERROR, f"The round cannot be judged: {error}.")
    except Exception as error:
        logger.warning("leakaudit: a round could not be judged: %s", type_and_place(error))
        return Judgement(Status.ERROR, f"The round cannot be judged: {type_and_place(error)}.")


def _judge(out_dir: Path | str | None, policy: Policy | Path | None, timeout_s: float) -> Judgement:
    deadline = time.monotonic() + timeout_s
    rules = policy if isinstance(policy, Policy) else _rules(policy)
    audit = audit_in(out_dir)
    last = None if audit is None else audit.last
    if audit is None or last is None:
        return Judgement(
            Status.ERROR,
            "No round of this process is open: it was not due, its audit is off, or it was judged already. Set `every_n_steps: 1` to "
            "keep every round.",
        )
    if audit.config.schedule == "deferred":
        return Judgement(
            Status.ERROR,
            "With `schedule: deferred` no round is attacked before the audit ends; set `schedule: beside`.",
            last.number,
        )
    audit.release()
    if not audit.tasks.wait(max(0.0, deadline - time.monotonic())):
        return Judgement(Status.ERROR, f"The round was not on the disk after {timeout_s:g} s.", last.number)
    if not last.kept():
        return Judgement(
            Status.ERROR,
            "The round was not kept, so nothing was attacked; the log of the training says why.",
            last.number,
        )
    if last.lost:
        return Judgement(
            Status.ERROR, f"The audit does not have what is sent, so nothing judged it: {last.lost}.", last.number
        )
    step = f"st-{last.number:06d}"
    for results in _results_until(audit, deadline):
        record = next((found for found in results.steps if found.id == step), None)
        if record is not None:
            if missing := _not_declared(record):
                return Judgement(Status.INCONCLUSIVE, missing, last.number)
            status, sentence = evaluate_step(results, rules, step, now=datetime.now(UTC))
            return Judgement(status, sentence, last.number)
    why = audit.side.why_given_up or f"the attacks on it were not finished after {timeout_s:g} s"
    later = f"it stays on the disk, and {command_to_continue(audit.spool)} attacks it later"
    return Judgement(Status.ERROR, f"The round cannot be judged: {why}; {later}.", last.number)


def _not_declared(record: StepRecord) -> str:
    """Return a sentence if what was sent lacks a declared defence, or ""."""
    missing = [] if record.sent is None else [*record.sent.absent, *record.sent.noiseless]
    return f"What is sent does not have the declared {' and '.join(missing)}." if missing else ""


def _rules(policy: Path | None) -> Policy:
    return round_policy() if policy is None else load_policy(policy, registered_names())


def _results_until(audit: RoundAudit, deadline: float) -> Iterator[Results]:
    """Yield the results each time that the worker has written them.

    It ends at the deadline, or if no side process can work on them.
    """
    path, seen = audit.config.out_dir / "results.json", 0
    while True:
        works = audit.side.ensure()
        if path.is_file() and path.stat().st_mtime_ns != seen:
            seen = path.stat().st_mtime_ns
            try:
                yield load_results(audit.config.out_dir)
            except ResultsError as error:
                logger.debug("results are not readable yet: %s", error)
        if time.monotonic() > deadline or not works:
            return
        time.sleep(LOOK_SECONDS)
