"""The state of the training around a repeated step, and how it is restored.

Training must not notice a repetition. Everything that a repetition changes is restored by single calls that cannot fail half-way,
registered before the first change: gradients (the same tensors), buffers, attributes of modules, generators, modes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.capture.in_place.users_state import HOOKS, UsersState, keep_only
from leakaudit.capture.observing.forward_hooks import MOST_BYTES, ForwardPass
from leakaudit.errors import SnapshotError
from leakaudit.models.tensors import version_of

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, submodules, hooks."""

REGISTERS = ("_parameters", "_buffers", "_modules", *HOOKS)
"""Attributes in which a module keeps what was registered with it."""

STATE_TYPES = (bool, int, float, str, type(None), Tensor)
"""Types of attributes that a forward pass may depend on and change."""


class NotInPlaceError(SnapshotError):
    """The error of a step that cannot be repeated where it was made.

    The message says why; the side process checks the step on a rebuilt model.
    """


@dataclass
class StateBefore:
    """The called object before the first forward pass of a step."""

    called: nn.Module
    """What the training loop calls."""
    attributes: list[tuple[nn.Module, dict[str, Any]]]
    """Each module with its own plain attributes, tensors and buffers; references."""
    copies: dict[int, tuple[Tensor, Tensor, int]]
    """Identity of a buffer or tensor attribute -> it, its copy, its version."""
    users: UsersState
    """What else the user's own code may change in a forward pass."""
    prints: Tensor | None = None
    """Fingerprints of the parameters before the first pass, (P,); None before `note_pass`."""
    held: int = 0
    """Bytes of weights that were copied because they changed between passes."""

    @classmethod
    def of(cls, called: nn.Module) -> StateBefore:
        """Note the state as it is now; small tensors are copied."""
        attributes, copies = [], {}
        for module in called.modules():
            own = {key: value for key, value in vars(module).items() if key not in INTERNAL or key == "training"}
            plain = {key: value for key, value in own.items() if isinstance(value, STATE_TYPES)}
            attributes.append((module, {**plain, "_buffers": dict(module._buffers)}))
            for tensor in (*module._buffers.values(), *own.values()):
                if isinstance(tensor, Tensor) and id(tensor) not in copies:
                    copies[id(tensor)] = (tensor, tensor.detach().clone(), version_of(tensor))
        return cls(called, attributes, copies, UsersState.of(called, iterators=True))

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return the copy of a buffer; a new copy if the buffer was not there then."""
        known = self.copies.get(id(tensor))
        return tensor.detach().clone() if known is None else known[1]

    def note_pass(self, seen: ForwardPass) -> None:
        """Note the modes of a pass, and its weights if they differ from the first pass's.

        Adversarial training changes weights within a step.
        """
        seen.modes = [(m, m.training) for m, then in self.attributes if m.training != then.get("training", m.training)]
        prints = fingerprints(self.called)
        if self.prints is None:
            self.prints = prints
        if torch.equal(prints, self.prints):
            return
        changed = (prints != self.prints).tolist()
        moved = [p for p, other in zip(self.called.parameters(), changed, strict=True) if other]
        self.held += sum(p.numel() * p.element_size() for p in moved)
        seen.on_other_weights = True
        if self.held <= MOST_BYTES:
            seen.weights = {id(p): p.detach().to("cpu", copy=True) for p in moved}

    def weights_moved(self) -> bool:
        """Return whether the weights changed since the first pass."""
        return self.prints is not None and not torch.equal(self.prints, fingerprints(self.called))

    def reset(self) -> None:
        """Restore attributes, buffers and the user's state before the first pass."""
        fresh: dict[int, Tensor] = {}
        for key, (tensor, copy, version) in self.copies.items():
            if version_of(tensor) != version or not _equal(tensor, copy):
                fresh[key] = copy.clone()
        for module, then in self.attributes:
            now = module._buffers
            now.update({k: t if t is None else fresh.get(id(t), t) for k, t in then["_buffers"].items()})
            plain = {k: v for k, v in then.items() if k != "_buffers"}
            vars(module).update({k: fresh.get(id(v), v) if isinstance(v, Tensor) else v for k, v in plain.items()})
        self.users.put_back()


def restore_on_exit(stack: ExitStack, called: nn.Module, leaves: Iterable[Tensor]) -> None:
    """Register the calls that restore the present state when a stack is closed.

    Args:
        stack: what the calls are registered with.
        called: what the training loop calls.
        leaves: tensors whose gradients are restored, beside those that the user's code holds.

    Raises:
        NotInPlaceError: the user's code now holds an object that cannot be restored; nothing was changed.
    """
    stack.callback(random.setstate, random.getstate())
    if (arrays := sys.modules.get("numpy")) is not None:
        stack.callback(arrays.random.set_state, arrays.random.get_state())
    stack.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    for module in called.modules():
        registers = (vars(module).get(name) for name in REGISTERS)
        for values in (vars(module), *(one for one in registers if isinstance(one, dict))):
            stack.callback(values.update, dict(values))
            stack.callback(keep_only, values, frozenset(values))
    users = UsersState.of(called, iterators=False)
    if users.opaque:
        raise NotInPlaceError(
            f"the model's own code uses an object that cannot be put back afterwards ({users.opaque})"
        )
    for leaf in (*leaves, *users.leaves):
        stack.callback(setattr, leaf, "grad", leaf.grad)
    for function, *arguments in reversed(users.undo):
        stack.callback(function, *arguments)


def fingerprints(model: nn.Module) -> Tensor:
    """Return one number for each parameter, which shows that it changed.

    The result is (P,) int64, on the device of the first parameter.
    """
    with torch.no_grad():
        found = [_fingerprint(p.detach()) for p in model.parameters()]
    together: Tensor = torch.stack([one.to(found[0].device) for one in found])
    return together


def _fingerprint(tensor: Tensor) -> Tensor:
    digest = getattr(torch, "hash_tensor", None)  # exact, from torch 2.9 on
    if digest is None or not tensor.numel():
        norm: Tensor = torch.linalg.vector_norm(tensor.float())
        return norm.double().view(torch.int64)
    found: Tensor = digest(tensor)
    return found.view(torch.int64)


def _equal(tensor: Tensor, copy: Tensor) -> bool:
    return tensor.shape == copy.shape and torch.equal(tensor.detach(), copy)
