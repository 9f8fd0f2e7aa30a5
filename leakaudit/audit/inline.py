"""The audit in the training process; training waits while the audit runs.

Use it only for models that no other process can rebuild. The user's code does not run: attacks read the recorded gradients, and compute
with torch's own layers alone (`leakaudit.models.library_modules`). What training depends on is restored: random generators, threads,
autocast, gradient mode, attention kernels and the default dtype.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from leakaudit.audit.spool_audit import WorkerOptions, audit_one, claim, note_red_line, open_audit, write_results
from leakaudit.errors import ModelError
from leakaudit.files.private_files import append_line
from leakaudit.models.library_modules import without_users_code
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.unstored_state import with_dense_gradients
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
            build=_builder(live),
        )
        self._audit: Any = None
        self._refused = 0

    def catch_up(self) -> None:
        """Audit every waiting step.

        Raises:
            SpoolError: a worker runs on the spool.
            OSError: the disk is full.
        """
        if not self._spool.waiting():
            return
        with undisturbed(), self._spool.worker_lock():
            if self._audit is None:
                self._audit = open_audit(self._spool, Spool.open(self._spool.root)[1], self._options)
            while (claimed := claim(self._spool, self._audit)) is not None:
                try:
                    keep = self._spool.config.keep_snapshots
                    self._refused += audit_one(self._spool, self._audit, claimed, self._options, keep=keep)
                    note_red_line(self._spool, self._audit, self._options)
                except BaseException:  # after Ctrl-C or on a full disk, the step stays in the spool
                    self._spool.queue.give_back(claimed)
                    raise

    def finish(self) -> None:
        """Write results, verdict and report of the audited steps."""
        if self._audit is not None:
            with undisturbed():
                write_results(self._spool, self._audit, self._refused, False, self._options)

    def _note(self, line: str) -> None:
        append_line(self._spool.root.parent / "worker.log", line, sync=False)


def _builder(live: nn.Module) -> Callable[[ModelRecipe, Mapping[str, Tensor]], nn.Module]:
    """Return a function that makes a model of weights, without the user's code."""

    def build(_recipe: ModelRecipe, weights: Mapping[str, Tensor]) -> nn.Module:
        model = without_users_code(live)
        with_dense_gradients(model)
        outcome = model.load_state_dict(dict(weights), strict=False)
        if outcome.unexpected_keys:
            raise ModelError(
                f"{len(outcome.unexpected_keys)} weights do not fit {type(live).__name__}, first {outcome.unexpected_keys[0]!r}"
            )
        return model

    return build


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore everything that training depends on after the block.

    Within the block, torch has the settings of the side process.
    """
    threads, plain, dtype = torch.get_num_threads(), random.getstate(), torch.get_default_dtype()
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with ExitStack() as stack:
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
