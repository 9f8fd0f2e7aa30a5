"""Measures the conformance of the steps of an audit.

Every step is measured when it is verified, and the run is judged at its end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from leakaudit.audit.conformance.assumptions import composition, sampling
from leakaudit.audit.conformance.judge import DEFAULT_LEVEL, TEST_FAMILIES, judge
from leakaudit.audit.conformance.log import ConformanceLog
from leakaudit.audit.conformance.measure import Measurement, measure
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import AuditConfig
from leakaudit.errors import ModelError, SnapshotError
from leakaudit.results.conformance import Conformance
from leakaudit.results.schema import Privacy
from leakaudit.results.wording import counted

logger = logging.getLogger(__name__)


def measure_into(config: AuditConfig, log: ConformanceLog, step_id: str, snapshot: Snapshot, step: ClientStep) -> None:
    """Measure a step with declared noise, and write the result into a log.

    Args:
        config: of the audit; nothing happens if it switches conformance off.
        log: of the audit.
        step_id: id of the step.
        snapshot: the step with what was sent.
        step: the same step on the model that attacks get, with the defences that the protocol declares.
    """
    if not config.conformance:
        return
    try:
        found = measured(step_id, snapshot, step)
    except torch.OutOfMemoryError:
        log.leave_out(step_id, "the GPU has no room to compute it again")
    except (ModelError, SnapshotError) as error:
        log.leave_out(step_id, str(error))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        log.leave_out(step_id, f"computing it again raised {type(error).__name__}")  # the message may quote inputs
    else:
        if found is not None:
            log.add(found)


def measured(step_id: str, snapshot: Snapshot, step: ClientStep) -> Measurement | None:
    """Measure the noise of the update that was sent or produced.

    None if neither declares noise.

    Raises:
        SnapshotError: the noise cannot be judged, or the step cannot be computed again.
        ModelError: as for `ClientStep.update`.
    """
    if snapshot.parts is not None:
        raise SnapshotError("only parts of its update were kept; keep whole steps (`keep: all`)")
    produced = snapshot.observation.update
    if snapshot.sent is not None:
        sent = replace(step, facts=snapshot.sent.facts)
        own = {name: produced[name] for name in snapshot.sent.update}
        if (found := measure(step_id, sent, snapshot.sent.update, repeated=own)) is not None:
            return found
    return measure(step_id, step, produced)


def conformance_of(
    found: Sequence[Measurement],
    left_out: Sequence[str],
    stated: Sequence[Privacy],
    taken: int | None,
    level: float = DEFAULT_LEVEL,
) -> Conformance | None:
    """Return the conformance of a run; None if no step declares noise.

    Args:
        found: the measured steps.
        left_out: why other steps with noise were not measured.
        stated: what is stated on the epsilon of what the run ships.
        taken: optimizer steps of the run; None if they are not known.
        level: of all statistical tests together.
    """
    if not found and not left_out:
        return None
    steps = [one.step for one in found]
    multiplier = steps[0].noise_multiplier if steps else None
    of_message = steps[0].message_multiplier if steps else None
    checks = [*(judge(found, level) if found else ())]
    if steps:
        checks.append(sampling(steps, stated, level / TEST_FAMILIES))
    checks += composition(stated, taken, multiplier, of_message)
    return Conformance(
        mechanism=" or ".join(dict.fromkeys(step.mechanism for step in steps)) or "not measured",
        steps=tuple(step.step for step in steps),
        level=level,
        checks=tuple(checks),
        left_out=tuple(f"{counted(n, 'step')}: {why}" for why, n in Counter(left_out).items()),
    )
