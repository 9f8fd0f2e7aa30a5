"""The audits of rounds that are open in this process, by their folder.

A client of federated learning makes a new trainer, model, optimizer and callback for each round. They find their audit here.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from leakaudit.capture.array_batches import for_labels
from leakaudit.capture.context import TrainerContext
from leakaudit.capture.describe import audited_model, recipe_of
from leakaudit.capture.refusals import check_run
from leakaudit.capture.rounds.audit import RoundAudit
from leakaudit.capture.rounds.elsewhere import Moment, joined, open_held
from leakaudit.capture.rounds.run import RoundRun
from leakaudit.capture.rounds.sent import OpenRound
from leakaudit.config.audit import AuditConfig
from leakaudit.errors import ConfigError, LeakAuditError, SnapshotError, SpoolError, type_and_place
from leakaudit.models.array_classifier import ArrayClassifier

logger = logging.getLogger(__name__)

_open: dict[str, RoundAudit] = {}
"""Resolved folder, as a configuration names it -> its audit."""


def begin_round(config: AuditConfig, trainer: TrainerContext) -> tuple[RoundAudit, RoundRun | None]:
    """Begin a round of the audit that its configuration names.

    Args:
        config: the audit's configuration, with `unit: round`.
        trainer: what the adapter knows.

    Returns:
        The audit, and the round; None if it is not due.

    Raises:
        LeakAuditError: the round cannot be audited, or does not belong to the audit in its folder.
    """
    start = time.perf_counter()
    if trainer.peers is not None:
        raise SnapshotError(
            "`unit: round` is for a client in one process; several share this training. Use `unit: step`"
        )
    trainer = replace(trainer, observe="delta", local_steps=None, total_steps=None, kept_before=0)
    trainer, model = audited_model(trainer)
    if isinstance(model, ArrayClassifier):
        config = for_labels(config)
    check_run(config, trainer, model)
    recipe, adapted = recipe_of(model, config)
    if adapted.schedule == "inline":
        raise ConfigError(
            "the side process cannot make this model, and `unit: round` needs it there; say how it is made "
            "(`leakaudit.models.factories.rebuilt_by`)"
        )
    audit = _audit_of(config, trainer, model)
    try:
        run = audit.begin(trainer, model, recipe)
    except SpoolError:
        if audit.spool.gone():
            _forget(audit)
        raise
    if run is not None:
        elapsed = time.perf_counter() - start
        run.blocked_s, run.started = run.blocked_s + elapsed, run.started - elapsed
    return audit, run


def _audit_of(config: AuditConfig, trainer: TrainerContext, model: object) -> RoundAudit:
    """Return the open audit of a folder; begin it or take part in it before."""
    from torch import nn

    assert isinstance(model, nn.Module)
    key = _key(config.out_dir)
    found = _open.get(key)
    if found is not None and found.owner == os.getpid():
        found.check(config, model)
        return found
    if not _open:
        atexit.register(_finish_at_exit)
    _open[key] = RoundAudit.open(config, trainer, model)
    return _open[key]


def open_round(out_dir: Path | str | None = None) -> OpenRound | None:
    """Return the round that this process trained last, to say what is sent of it.

    Args:
        out_dir: folder of the audit, as its configuration names it; None for the only audit of rounds in this process.

    Returns:
        The round; None if none is open: it was not due, it is not over, the audit is off, or something was said already.
    """
    audit = audit_in(out_dir)
    return None if audit is None else audit.last


def open_round_elsewhere(out_dir: Path, since: Moment, timeout_s: float) -> OpenRound | None:
    """Return the round that another process trained, to say what is sent of it.

    This process then takes part in the audit, until `finish_rounds` or its end.

    Args:
        out_dir: folder of the audit.
        since: moment before the training; older rounds are not sent.
        timeout_s: most seconds to wait until the round is on the disk.

    Returns:
        The round; None if no process keeps rounds there.

    Raises:
        RoundError: the audit or the round is not open to this process.
        SnapshotError: the round is damaged.
    """
    key = _key(out_dir)
    audit = audit_in(out_dir)
    if audit is not None and not audit.spool.lock.is_file():  # another audit has its place
        _forget(audit)
        audit = None
    if audit is None:
        if not (out_dir / "spool").is_dir():
            return None
        if not _open:
            atexit.register(_finish_at_exit)
        audit = _open[key] = joined(out_dir)
    audit.last = None
    audit.last = open_held(audit, since, timeout_s)
    return audit.last


def audit_in(out_dir: Path | str | None = None) -> RoundAudit | None:
    """Return the open audit of rounds in a folder.

    Args:
        out_dir: as its configuration names it; None for the only one in this process.
    """
    mine = {key: audit for key, audit in _open.items() if audit.owner == os.getpid()}
    if out_dir is not None:
        return mine.get(_key(Path(out_dir)))
    return next(iter(mine.values())) if len(mine) == 1 else None


def finish_rounds(out_dir: Path | str | None = None) -> None:
    """End the audit of rounds in a folder: report, results and verdict on all rounds.

    It waits for the attacks as `at_end` and `wait_at_end_s` say. A problem is logged, never raised.

    Args:
        out_dir: as the configuration names it; None for all audits of rounds of this process.
    """
    wanted = None if out_dir is None else _key(Path(out_dir))
    for key, audit in list(_open.items()):
        if audit.owner == os.getpid() and wanted in (None, key):
            _finish(audit, at_exit=False, wait=True)


def leave_rounds(out_dir: Path) -> None:
    """Leave the audit of a folder; end it if no other process continues it.

    A problem is logged, never raised.
    """
    if (audit := audit_in(out_dir)) is not None:
        _finish(audit, at_exit=True, wait=True)


def _finish_at_exit() -> None:
    """End what this process ends with itself; do not wait after an exception."""
    crashed = getattr(sys, "last_value", None) is not None
    for audit in list(_open.values()):
        if audit.owner == os.getpid():
            _finish(audit, at_exit=True, wait=not crashed)


def _finish(audit: RoundAudit, *, at_exit: bool, wait: bool) -> None:
    _forget(audit)
    try:
        audit.finish(at_exit=at_exit, wait=wait)
    except LeakAuditError as error:
        logger.warning("leakaudit cannot finish the audit in %s: %s", audit.config.out_dir, error)
    except Exception as error:
        logger.warning("leakaudit cannot finish the audit in %s: %s", audit.config.out_dir, type_and_place(error))


def _forget(audit: RoundAudit) -> None:
    for key in [key for key, one in _open.items() if one is audit]:
        del _open[key]
    if not _open:
        with contextlib.suppress(Exception):
            atexit.unregister(_finish_at_exit)


def _key(folder: Path) -> str:
    return os.path.realpath(folder)
