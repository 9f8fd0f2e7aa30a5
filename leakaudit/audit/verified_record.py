"""The record of a step that was verified, as produced and as sent.

Its declared noise is measured at the same time.
"""

from __future__ import annotations

from leakaudit.audit.applied_defenses import defenses_left
from leakaudit.audit.as_sent import SentUpdate
from leakaudit.audit.conformance.record import measure_into
from leakaudit.audit.pairing import Pairing
from leakaudit.audit.stamp import stamp_of
from leakaudit.audit.state import AuditState, step_id_of
from leakaudit.audit.step_record import record_as_sent, record_of
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import AuditConfig
from leakaudit.results.schema import StepRecord


def verified_record(
    snapshot: Snapshot,
    client: ClientStep,
    sent: SentUpdate | None,
    config: AuditConfig,
    state: AuditState,
    pairing: Pairing | None = None,
) -> StepRecord:
    """Verify a step and return its record.

    Args:
        snapshot: the step.
        client: the step on the model that attacks get.
        sent: what was sent, if it differs from what was produced.
        config: of the audit.
        state: has the key for the hash of the update, and the log of measured noise.
        pairing: key of the marks of the step; None for no marks.
    """
    verification = stamp_of(snapshot, client)
    measure_into(config, state.conformance, step_id_of(snapshot.provenance.step), snapshot, client)
    # as declared: numbers that differ from step to step would give every step another name
    shipped = defenses_left(client, verification)
    digest = state.keyed_hash(snapshot.observation.digest().encode(), digits=64)
    record = record_of(snapshot, verification, shipped, digest=digest, min_tokens=config.min_tokens)
    if pairing is not None:
        record = record.model_copy(update=vars(pairing.marks_of(snapshot)))
    return record if sent is None else record_as_sent(record, sent.stamp, sent.shipped)
