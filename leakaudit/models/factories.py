"""Functions and classes that make a model in another process."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from leakaudit.errors import ModelError

MADE_BY = "_leakaudit_made_by"
"""Attribute of a model that says how it is made."""


FACTORY = "_leakaudit_model_factory"


def model_factory(function: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Mark a function as one that makes a model, so that the side process may call it.

    The side process calls what a snapshot names. A snapshot is a file, so it may only name what was marked in the code.
    """
    setattr(function, FACTORY, True)
    return function


def rebuilt_by(model: nn.Module, made_by: str, **arguments: Any) -> nn.Module:
    """Say how another process makes this model: by calling `made_by`.

    Its weights are loaded afterwards.

    Args:
        model: the live one.
        made_by: `package.module:name` of a function marked with `model_factory`, or of a class of models.
        arguments: plain data.

    Returns:
        The model.

    Raises:
        ModelError: nothing of that name can be imported, or it is neither; or the arguments are no plain data.
    """
    factory_named(made_by)
    _check_plain(made_by, arguments)
    setattr(model, MADE_BY, (made_by, arguments))
    return model


def _check_plain(what: str, arguments: Mapping[str, Any]) -> None:
    try:
        json.dumps(arguments)
    except (TypeError, ValueError):
        odd = [key for key, value in arguments.items() if not isinstance(value, str | int | float | bool | None)]
        raise ModelError(
            f"{what}: its arguments have to be plain data, because they travel as JSON; look at {', '.join(odd)}"
        ) from None


MOVED = {
    "leakaudit.classifiers:array_classifier": "leakaudit.models.array_classifier:array_classifier",
    "leakaudit.pooler:wide_pooler": "leakaudit.models.wide_pooler:wide_pooler",
}
"""Old `made_by` -> where the function is now. Snapshots from before the move name the old place."""


def factory_named(made_by: str) -> Callable[..., nn.Module]:
    """Return what makes a model; only what was written to make models.

    Raises:
        ModelError: it cannot be imported, or it is neither a marked function nor a class of models.
    """
    module, colon, name = MOVED.get(made_by, made_by).partition(":")
    try:
        found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"{made_by!r} cannot be imported ({type(error).__name__}); give `package.module:name` of something that a new "
            "Python process started in the same folder can import"
        ) from None
    if colon and (getattr(found, FACTORY, False) or (isinstance(found, type) and issubclass(found, nn.Module))):
        return found  # type: ignore[no-any-return]
    raise ModelError(f"{made_by!r} is neither a class of models nor a function marked with `model_factory`")
