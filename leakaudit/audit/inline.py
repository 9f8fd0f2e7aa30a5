"""The audit in the training process; training waits while the audit runs.

Use it only for models that no other process can rebuild. It does not change training: attacks compute on a copy that was proven to be
separate from the live model (`leakaudit.audit.live_copy`). Everything else that training depends on is restored: gradients, modes, random
generators, threads, autocast, gradient mode, attention kernels and the default dtype.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from leakaudit.audit.live_copy import copier, prove_separate, unchanged
from leakaudit.audit.spool_audit import WorkerOptions, audit_one, open_audit, write_results
from leakaudit.client.snapshot import Snapshot
from leakaudit.errors import LiveModelReachedError
from leakaudit.files.private_files import append_line
from leakaudit.storage.spool import Spool


class InlineAudit:
    """The audit of one spool, run between two steps of training."""

    def __init__(self, spool: Spool, live: nn.Module) -> None:
        """Prepare the audit; nothing is attacked yet.

        Args:
            spool: the spool that the trainer created.
            live: the model that is trained.
        """
        self._spool = spool
        keys = spool.keys
        device = spool.config.device
        self._options = WorkerOptions(
            device=str(next(live.parameters()).device) if device == "auto" else device,
            identities=(keys.identity,) if keys and keys.identity else (),
            notify=self._note,
            build=copier(live),
        )
        self._live = live
        self._audit: _Proven | None = None
        self._refused = 0

    def catch_up(self) -> None:
        """Audit every waiting step.

        Raises:
            LiveModelReachedError: a copy of the live model cannot be proven separate and no attack ran on it, or attacks changed the live
                model.
            SpoolError: a worker runs on the spool.
            OSError: the disk is full.
        """
        if not self._spool.waiting():
            return
        with undisturbed(self._live), self._spool.worker_lock():
            if self._audit is None:
                made = open_audit(self._spool, Spool.open(self._spool.root)[1], self._options)
                self._audit = _Proven(made, self._live)
            while (claimed := self._spool.queue.claim()) is not None:
                try:
                    keep = self._spool.config.keep_snapshots
                    self._refused += audit_one(self._spool, self._audit, claimed, self._options, keep=keep)
                except BaseException:  # after Ctrl-C or on a full disk, the step stays in the spool
                    self._spool.queue.give_back(claimed)
                    raise
                if self._audit.unproven is not None:
                    raise self._audit.unproven

    def finish(self) -> None:
        """Write results, verdict and report of the audited steps."""
        if self._audit is not None:
            with undisturbed(self._live):
                write_results(self._spool, self._audit, self._refused, False, self._options)

    def _note(self, line: str) -> None:
        append_line(self._spool.root.parent / "worker.log", line, sync=False)


class _Proven:
    """An audit that attacks only copies with a proof of separateness.

    Each snapshot's model is a copy of the live model.
    """

    def __init__(self, audit: Any, live: nn.Module) -> None:
        self._audit = audit
        self._live = live
        self.unproven: LiveModelReachedError | None = None
        """Why the last proof failed; None if every proof succeeded."""

    def step(self, snapshot: Snapshot) -> None:
        """Audit a step on a proven copy.

        Raises:
            LiveModelReachedError: the proof failed, or attacks changed the live model.
        """
        try:
            first = snapshot.truth.micro_batches[0]
            prove_separate(snapshot.observation.model, self._live, first, training=snapshot.recipe.training)
            with unchanged(self._live):
                self._audit.step(snapshot)
        except LiveModelReachedError as error:
            self.unproven = error
            raise

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the wrapped audit."""
        return getattr(self._audit, name)


@contextmanager
def undisturbed(live: nn.Module | None = None) -> Iterator[None]:
    """Restore everything that training depends on after the block.

    Within the block, torch has the settings of the side process.

    Args:
        live: the model that is trained. Within the block its parameters have no gradients; afterwards they have the same gradients as
            before.
    """
    threads, plain, dtype = torch.get_num_threads(), random.getstate(), torch.get_default_dtype()
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with ExitStack() as stack:
        stack.enter_context(_set_aside(live))
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", *(("cuda",) if devices else ())):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the other kernels have no second derivative
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
            random.setstate(plain)
            if numpy is not None:
                numpy.random.set_state(arrays)


@contextmanager
def _set_aside(live: nn.Module | None) -> Iterator[None]:
    """Remove a model's gradients within the block and restore them afterwards.

    Modes and `requires_grad` are restored as well.
    """
    if live is None:
        yield
        return
    modes = [(module, module.training) for module in live.modules()]
    kept: list[tuple[nn.Parameter, Tensor | None, bool]] = [(p, p.grad, p.requires_grad) for p in live.parameters()]
    try:
        for parameter, _, _ in kept:
            parameter.grad = None
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, gradient, required in kept:
            parameter.grad = gradient
            if parameter.requires_grad != required:
                parameter.requires_grad_(required)
