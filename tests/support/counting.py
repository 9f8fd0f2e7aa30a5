"""Records which functions ran, what a training left, and what libraries hold.

It knows nothing of the audit, so that a training without it can be recorded in a process that never imports it.
"""

from __future__ import annotations

import importlib
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

LIBRARIES = (
    "torch.nn.functional",
    "torch.nn.init",
    "torch.nn.modules.module",
    "torch.optim.optimizer",
    "torch.utils.checkpoint",
    "transformers.activations",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.t5.modeling_t5",
)
"""Modules whose globals are part of the digest: tables, attention functions, mappings of models, functions and classes."""

DEPTH = 4
"""Levels of containers that the digest follows."""


@dataclass
class Ran:
    """The functions of some files that ran.

    Those of the main thread are in order; those of other threads are counted.
    """

    main: list[str] = field(default_factory=list)
    beside: Counter[str] = field(default_factory=Counter)


@contextmanager
def listing(files: Iterable[str]) -> Iterator[Ran]:
    """List every call of a Python function of some files.

    Threads that start meanwhile are included.

    Args:
        files: what `__file__` of their modules says.
    """
    own, ran, main = frozenset(files), Ran(), threading.main_thread()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename not in own:
            return
        if threading.current_thread() is main:
            ran.main.append(code.co_qualname)
        else:
            ran.beside[code.co_qualname] += 1

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield ran
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


@contextmanager
def optimizers_seen() -> Iterator[list[Any]]:
    """Collect the optimizers that step, whoever makes them."""
    found: list[Any] = []

    def note(optimizer: Any, args: Any, kwargs: Any) -> None:
        if all(optimizer is not one for one in found):
            found.append(optimizer)

    handle = register_optimizer_step_post_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def state_of(model: nn.Module, optimizers: Iterable[Any] = ()) -> dict[str, Any]:
    """Return copies of everything that a training leaves.

    These are weights, buffers, gradients, optimizer state and the three global random states.
    """
    found: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found[f"{name} gradient"] = None if parameter.grad is None else parameter.grad.clone()
    for number, optimizer in enumerate(optimizers):
        for key, entry in optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                found[f"optimizer {number} {key} {name}"] = torch.as_tensor(value).clone()
    found["torch"] = torch.get_rng_state()
    found["numpy"] = str(numpy.random.get_state())  # noqa: NPY002
    found["python"] = random.getstate()
    return found


def differences(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Return the names whose values are not the same to the bit."""

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)

    return [name for name in {**one, **two} if name not in one or name not in two or not same(one[name], two[name])]


def digest(*modules: ModuleType) -> dict[str, str]:
    """Return what libraries hold, by path.

    Objects are told apart by identity; containers and classes are followed. Containers are read with the methods of `dict`, `list` and `set`: a subclass may do something else at a look.

    Args:
        modules: of the user's, which are read as well.
    """
    found: dict[str, str] = {}
    for module in (*map(importlib.import_module, LIBRARIES), *modules):
        for name, value in vars(module).items():
            if not name.startswith("__") and not isinstance(value, ModuleType):
                _read(f"{module.__name__}.{name}", value, DEPTH, found)
    for kind in {kind for kind in vars(nn).values() if isinstance(kind, type)} | {torch.Tensor, torch.optim.Optimizer}:
        _read(f"torch.{kind.__name__}", kind, DEPTH, found)
    return found


def _read(path: str, value: Any, depth: int, found: dict[str, str]) -> None:
    plain = isinstance(value, str | int | float | bytes | bool | None)
    found[path] = repr(value) if plain else f"{type(value).__name__} {id(value)}"
    if plain or depth == 0:
        return
    code = getattr(value, "__code__", None)
    if code is not None:
        found[path] += f" {id(code)} {[id(default) for default in value.__defaults__ or ()]}"
    if isinstance(value, set | frozenset):
        found[path] += f" {sorted(map(id, value))}"
    inside = dict(_inside(value))
    if isinstance(value, dict):
        found[path] += f" {list(inside)}"
    for name, item in inside.items():
        _read(f"{path}{name}", item, min(1, depth - 1) if isinstance(value, type) else depth - 1, found)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and item of whatever a container, a class or a table holds."""
    if isinstance(value, dict):
        yield from ((f"[{repr(key)[:80]}]", item) for key, item in dict.items(value))
    elif isinstance(value, list):
        yield from ((f"[{number}]", item) for number, item in enumerate(list.__iter__(value)))
    elif isinstance(value, tuple):
        yield from ((f"[{number}]", item) for number, item in enumerate(tuple.__iter__(value)))
    elif isinstance(value, type) or type(value).__module__.startswith("transformers"):
        # Of torch, models and optimizers: `RemovableHandle` numbers all hooks, whoever sets them.
        home = value.__module__ if isinstance(value, type) else "transformers"
        if home.startswith(("torch.nn", "torch.optim", "transformers", "tests")) and hasattr(value, "__dict__"):
            yield from ((f".{name}", item) for name, item in vars(value).items() if not _is_note(name))


def _is_note(name: str) -> bool:
    """Return whether a library notes there what it looked up before, whoever asked."""
    return name in ("__slotnames__", "_modules") or name.endswith("_cached_value")
