"""Measures the kept snapshots of a run again, and judges the run by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from leakaudit.audit.conformance.measure import Measurement
from leakaudit.audit.conformance.record import conformance_of, measured
from leakaudit.audit.privacy import SHIPPED
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import PluginSpec
from leakaudit.errors import ConfigError, ModelError, SnapshotError
from leakaudit.registry import defenses
from leakaudit.results.conformance import Conformance
from leakaudit.results.schema import Results
from leakaudit.storage.snapshots import read_snapshot


def measured_again(
    folder: Path,
    results: Results,
    level: float,
    *,
    mechanism: PluginSpec | None = None,
    identities: Sequence[str] = (),
    build: Callable[[Any, Any], Any] | None = None,
) -> Conformance | None:
    """Measure every kept snapshot of an audit again, and judge the run.

    Args:
        folder: of the audit.
        results: of the audit; they say what is stated on epsilon, and how many steps were taken.
        level: of all statistical tests together.
        mechanism: the defence that is taken for the declared one; None for what the snapshots declare.
        identities: private keys for encrypted snapshots.
        build: function that makes the model from recipe and weights instead of its recipe.

    Returns:
        The conformance; None if no snapshot declares noise.

    Raises:
        ConfigError: no snapshot is kept, or the mechanism does not exist.
        SnapshotError: a snapshot cannot be read.
    """
    declared = None if mechanism is None else defenses.create(mechanism.name, mechanism.options).declared()
    kept = sorted((folder / "spool").glob("*.kept"))
    if not kept:
        raise ConfigError(
            f"{folder}: holds no kept snapshots (spool/*.kept); `keep_snapshots: true` in the audit's configuration keeps them"
        )
    found: list[Measurement] = []
    left_out: list[str] = []
    for snapshot in _snapshots(kept, identities, build):
        step = ClientStep.of(snapshot)
        if declared is not None:
            step, snapshot = _declaring(step, snapshot, declared)
        try:
            one = measured(f"st-{snapshot.provenance.step:06d}", snapshot, step)
        except (ModelError, SnapshotError) as error:
            left_out.append(str(error))
        else:
            found += [] if one is None else [one]
    stated = [one for one in results.privacy if one.defense == SHIPPED]
    return conformance_of(found, left_out, stated, results.coverage.total_steps, level)


def _snapshots(
    kept: Sequence[Path], identities: Sequence[str], build: Callable[[Any, Any], Any] | None
) -> Iterator[Snapshot]:
    for path in kept:
        yield read_snapshot(path, identities, build)


def _declaring(step: ClientStep, snapshot: Snapshot, declared: DeclaredDefense) -> tuple[ClientStep, Snapshot]:
    """Return a step that declares one defence only."""
    facts = step.facts.model_copy(update={"defenses": (declared,)})
    if snapshot.sent is None:
        return replace(step, facts=facts), snapshot
    sent = replace(snapshot.sent, facts=snapshot.sent.facts.model_copy(update={"defenses": (declared,)}))
    return step, replace(snapshot, sent=sent)
