"""Small modules, such as activations, with which a user replaced others.

They have no children, and the model's class makes modules of other classes there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType

from torch import nn

from leakaudit.errors import ModelError

PLACES = {
    "torch.nn.modules.activation": "torch.nn",
    "torch.nn.modules.dropout": "torch.nn",
    "torch.nn.modules.linear": "torch.nn",
    "transformers.activations": "transformers.activations",
}
"""Module that defines classes which need no arguments -> module from which they are imported. In `linear` only `Identity` needs no
arguments."""


def replaced_modules(live: Mapping[str, nn.Module], made: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the small modules of the live model that its class does not make.

    The result is name -> `package:class`.

    Args:
        live: modules of the model that is trained, by plain name.
        made: modules of the model that its recipe makes.

    Raises:
        ModelError: such a module cannot be rebuilt, or a plain function was replaced.
    """
    found: dict[str, str] = {}
    for name, module in made.items():
        here = live.get(name)
        if here is None or next(module.children(), None) is not None:
            continue
        _check_functions(name, here, module)
        if not isinstance(here, type(module)):
            found[name] = _named(name, here, module)
    return found


def put_modules(model: nn.Module, parts: Mapping[str, str]) -> None:
    """Put the small modules of a recipe into the model that it makes.

    Raises:
        ModelError: a class is not allowed, or the model has no module of that name.
    """
    for name, what in parts.items():
        owner, _, leaf = name.rpartition(".")
        if not isinstance(getattr(model.get_submodule(owner), leaf, None), nn.Module):
            raise ModelError(f"the recipe replaces {name!r}, and the model that it makes has no such part")
        setattr(model.get_submodule(owner), leaf, _made(what))


def _made(what: str) -> nn.Module:
    """Return a new module of a class that `PLACES` allows."""
    package, _, name = what.partition(":")
    kind = getattr(importlib.import_module(package), name, None) if package in PLACES.values() else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module) and PLACES.get(kind.__module__) == package):
        raise ModelError(f"the recipe asks for a part {what!r}, which is no activation, dropout or identity")
    part: nn.Module = kind()
    return part


def _named(name: str, here: nn.Module, module: nn.Module) -> str:
    """Return the `package:class` of a module that replaced another one.

    Raises:
        ModelError: the module cannot be rebuilt.
    """
    kind = type(here)
    what = f"{PLACES.get(kind.__module__, '')}:{kind.__qualname__}"
    try:
        words = _words(_made(what))
    except (ModelError, TypeError):
        words = None
    if words is None or words != _words(here):
        raise _refused(name, f"is a {kind.__name__}", f"a {type(module).__name__}")
    return what


def _words(module: nn.Module) -> dict[str, str]:
    return {key: value for key, value in vars(module).items() if isinstance(value, str)}


def _check_functions(name: str, here: nn.Module, module: nn.Module) -> None:
    """Refuse a plain function that was replaced, such as an activation."""
    kinds = (FunctionType, BuiltinFunctionType)
    for key, function in vars(module).items():
        if isinstance(function, kinds) and vars(here).get(key, function) is not function:
            raise _refused(f"{name}.{key}", "is another function", "its own")


def _refused(name: str, found: str, made: str) -> ModelError:
    return ModelError(
        f"{name!r} {found} where the model's class makes {made}, and the side process cannot make it again, so it would attack another "
        "model. Say how the model is made with `rebuilt_by`, or set `schedule: inline`"
    )
