"""A copy of a model that runs torch's own code and nothing of the user's.

Label attacks in the training process use it. Most of them read gradients alone; a network of torch's own layers can also be computed.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from leakaudit.errors import AnatomyError
from leakaudit.models.code_marks import ACCOUNTED

LIBRARIES = ("torch", "leakaudit")
"""Packages whose modules are computed in the training process."""

PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of attributes that are copied; no code belongs to them."""

GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
"""Names of torch's hooks that every module calls."""


PLACES = (torch, torch.Tensor, nn.functional, nn.Module)
"""Where torch's layers find the functions that they call."""


class ParametersOnly(nn.Module):
    """A module with the parameters and children of one that is not computed."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse to compute.

        Raises:
            AnatomyError: always.
        """
        raise AnatomyError(
            "it computes with the client's model, whose code does not run a second time in the training process; say how another process makes "
            "the model with `leakaudit.models.factories.rebuilt_by(model, 'package.module:function')`"
        )


def without_users_code(model: nn.Module) -> nn.Module:
    """Return a copy of a model in eval mode, on the CPU.

    Modules of torch have their class and their plain attributes. Every other module is a `ParametersOnly`, and so is every module if somebody
    set a hook on all modules or replaced a function of torch by one of another package. No hook, instance's `forward` or other object of the user's is copied.
    """
    hooked = any(getattr(modules, name, None) for name in GLOBAL_HOOKS)
    return _copied(model, {}, runs=not (hooked or _is_patched())).eval()


def _is_patched() -> bool:
    """Return whether a function in torch's own places is not of a known package."""
    functions = (value for place in PLACES for value in vars(place).values() if isinstance(value, FunctionType))
    known = ACCOUNTED | sys.stdlib_module_names | {"typing_extensions"}  # torch marks what is deprecated with it
    return any(str(function.__globals__.get("__name__")).partition(".")[0] not in known for function in functions)


def _copied(module: nn.Module, known: dict[int, nn.Module], *, runs: bool) -> nn.Module:
    if id(module) in known:
        return known[id(module)]
    kind = type(module) if runs and _is_library(type(module)) and "forward" not in vars(module) else ParametersOnly
    made: nn.Module = nn.Module.__new__(kind)
    known[id(module)] = made
    nn.Module.__init__(made)
    plain = {name: value for name, value in vars(module).items() if type(value) in PLAIN and not name.startswith("_")}
    vars(made).update(plain if kind is not ParametersOnly else {})
    for name, parameter in module._parameters.items():
        made._parameters[name] = (
            None
            if parameter is None
            else nn.Parameter(parameter.detach().to("cpu", copy=True), parameter.requires_grad)
        )
    for name, buffer in module._buffers.items():
        made._buffers[name] = None if buffer is None else buffer.detach().to("cpu", copy=True)
    made._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _copied(child, known, runs=runs)
    return made


def _is_library(kind: type[nn.Module]) -> bool:
    """Return whether a class and its `forward` are a library's."""
    forward = next((vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)), None)
    names = (kind.__module__, getattr(forward, "__module__", "") or "")
    return all(name.split(".")[0] in LIBRARIES for name in names) and kind.__module__ != "torch.nn.utils.parametrize"
