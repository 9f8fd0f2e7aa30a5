"""One call of a model, recorded so that it can be repeated.

A record holds the arguments, and the context that the call depends on beside them and the model.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size, type)
"""Types of arguments that no call can change."""

ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
"""Kernels of `scaled_dot_product_attention` that a loop may switch on and off (`torch.backends.cuda.enable_flash_sdp`...)."""


@dataclass(frozen=True)
class HeldTensor:
    """A tensor among the arguments."""

    tensor: Tensor
    """A copy on the CPU, because user code may change the original in place."""
    device: torch.device
    requires_grad: bool

    def restored(self) -> Tensor:
        """Return the tensor as it was, on its device, without the graph that it came from."""
        return self.tensor.to(self.device, copy=True).requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class ModelCall:
    """The arguments of one call, with each tensor as a `HeldTensor`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    unrepeatable: str = ""
    """Type of the first argument that the call may have changed, so that it cannot be repeated; empty if there is none."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: Mapping[int, Tensor]) -> ModelCall:
        """Record a call that is about to be made.

        Args:
            args: as they are given.
            kwargs: as they are given.
            known: identity of a tensor among them -> its copy on the CPU, where one was made already.
        """
        changeable: list[str] = []

        def keep(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                own = known.get(id(leaf))
                held = leaf.detach().to("cpu", copy=True) if own is None else own
                return HeldTensor(held, leaf.device, leaf.requires_grad)
            if not isinstance(leaf, PLAIN):
                changeable.append(type(leaf).__name__)
            return leaf

        mine, named = mapped((tuple(args), dict(kwargs)), keep)
        return cls(mine, named, unrepeatable=changeable[0] if changeable else "")

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as they were, in new containers."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = mapped(
            (self.args, self.kwargs), lambda leaf: leaf.restored() if isinstance(leaf, HeldTensor) else leaf
        )
        return found


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested containers with a function applied to each element.

    Dicts, lists and tuples are copied.
    """
    if isinstance(value, dict | UserDict):
        new = copy.copy(value)
        for key, part in value.items():
            new[key] = mapped(part, change)
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(part, change) for part in value))
    if type(value) in (list, tuple):
        return type(value)(mapped(part, change) for part in value)
    return change(value)


@dataclass(frozen=True)
class CallContext:
    """The context that a forward pass depends on beside its arguments and the model.

    `ForwardPass.rng` has the states of torch's generators.
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """For each type of device: its name, whether autocast is on, and to which type it casts."""
    cache: bool
    """Whether autocast caches the weights that it casts."""
    attention: tuple[tuple[str, bool], ...]
    """For each attention kernel: its name, and whether it may be used."""
    python: Any
    """State of `random`."""
    numpy: Any
    """State of `numpy.random`; None where numpy is not imported."""

    @classmethod
    def now(cls) -> CallContext:
        """Read the context as it is now; this changes nothing."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        arrays = sys.modules.get("numpy")
        return cls(
            autocast=tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            cache=torch.is_autocast_cache_enabled(),
            attention=tuple((kernel, _attention(kernel, "{}_sdp_enabled")()) for kernel in ATTENTION),
            python=random.getstate(),
            numpy=None if arrays is None else arrays.random.get_state(),
        )

    def enter(self, stack: ExitStack) -> None:
        """Set the context of the pass until a stack is closed.

        The generators of Python and numpy are not reset when the stack is closed.
        """
        for kind, on, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=self.cache))
        for (kernel, on), (_, now) in zip(self.attention, CallContext.now().attention, strict=True):
            if on != now:
                stack.callback(_attention(kernel, "enable_{}_sdp"), now)
                _attention(kernel, "enable_{}_sdp")(on)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def _attention(kernel: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(torch.backends.cuda, name.format(kernel))
    return function


def copied(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among some values, copied to the CPU.

    They are copied because user code may change the originals in place later.
    """
    return {k: v.detach().to("cpu", copy=True) for k, v in values.items() if isinstance(v, Tensor)}


def random_states(parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the states of torch's default generators, without drawing from them.

    Args:
        parameters: the device of the first parameter says which generator is read beside that of the CPU.

    Returns:
        Device type -> state: `cpu`, and also `cuda` if the first parameter is on a GPU.
    """
    states = {"cpu": torch.get_rng_state()}
    device = next((p.device for p in parameters), torch.device("cpu"))
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states
