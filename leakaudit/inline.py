"""Attacks in the training process, which waits for them: the last resort, for models that no other process can rebuild.

Training goes on afterwards as if nothing had been: random generators, threads, autocast and gradient mode are put back, and the
live model is copied, not used.
"""

from __future__ import annotations

import copy
import os
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from leakaudit.errors import ModelError
from leakaudit.models import ModelRecipe
from leakaudit.spool import Spool
from leakaudit.worker import Means, audit_one, make_audit, write_results

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Where a module keeps its hooks. Ours hold the recorder, and others' whatever they like: none of it belongs into a copy."""


class InlineAudit:
    """The audit of one spool, a step at a time, between two steps of training."""

    def __init__(self, spool: Spool, live: nn.Module) -> None:
        """Prepare; nothing is attacked.

        Args:
            spool: as the trainer made it.
            live: the model that is trained.
        """
        self._spool = spool
        seal = spool.seal
        device = spool.config.device
        self._means = Means(
            device=str(next(live.parameters()).device) if device == "auto" else device,
            identities=(seal.identity,) if seal and seal.identity else (),
            say=self._note,
            build=copier(live),
        )
        self._audit: Any = None
        self._refused = 0

    def catch_up(self) -> None:
        """Attack every step that waits.

        Raises:
            SpoolError: a worker was started on the spool.
            OSError: the disk is full.
        """
        if not self._spool.waiting():
            return
        with undisturbed(), self._spool.worker_lock():
            if self._audit is None:
                self._audit = make_audit(self._spool, Spool.open(self._spool.root)[1], self._means)
            while (claimed := self._spool.claim()) is not None:
                try:
                    keep = self._spool.config.keep_snapshots
                    self._refused += audit_one(self._spool, self._audit, claimed, self._means, keep=keep)
                except BaseException:  # Ctrl-C, or a full disk: the step is not lost
                    self._spool.give_back(claimed)
                    raise

    def finish(self) -> None:
        """Write results, verdict and report of what was attacked."""
        if self._audit is not None:
            with undisturbed():
                write_results(self._spool, self._audit, self._refused, False, self._means)

    def _note(self, line: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(self._spool.root.parent / "worker.log", flags, 0o600)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)


def copier(live: nn.Module) -> Callable[[ModelRecipe, Mapping[str, Tensor]], nn.Module]:
    """Return what makes a model of weights by copying the live one: without its hooks and gradients, in eval mode."""

    def build(recipe: ModelRecipe, weights: Mapping[str, Tensor]) -> nn.Module:
        known: dict[int, Any] = {}
        for module in live.modules():
            for name in HOOKS:
                if hasattr(module, name):
                    known[id(getattr(module, name))] = OrderedDict()
        known |= {id(p.grad): None for p in live.parameters() if p.grad is not None}
        try:
            model = copy.deepcopy(live, known)
            outcome = model.load_state_dict(dict(weights), strict=False)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ModelError(f"a {type(live).__name__} cannot be copied: {type(error).__name__}") from None
        if outcome.unexpected_keys:
            raise ModelError(
                f"{len(outcome.unexpected_keys)} weights do not fit a copy of {type(live).__name__}, "
                f"first {outcome.unexpected_keys[0]!r}"
            )
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("eager")  # type: ignore[operator]
        for parameter in model.parameters():
            parameter.grad = None
        return model.to("cpu").eval()

    return build


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave everything that training depends on as it was, and compute as the side process would."""
    threads, plain = torch.get_num_threads(), random.getstate()
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", *(("cuda",) if devices else ())):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the others have no second derivative
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            random.setstate(plain)
            if numpy is not None:
                numpy.random.set_state(arrays)
