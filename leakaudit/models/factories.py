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
"""Attribute of a model with the name and the arguments of its maker."""


FACTORY = "_leakaudit_model_factory"


def model_factory(function: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Mark a function as a maker of models, which the side process may call.

    The side process calls the function that a snapshot names. A snapshot is a file, so it may only name functions that are marked in code.
    """
    setattr(function, FACTORY, True)
    return function


def rebuilt_by(model: nn.Module, made_by: str, **arguments: Any) -> nn.Module:
    """Declare that another process makes this model by calling `made_by`.

    That process loads the weights afterwards.

    Args:
        model: the live model.
        made_by: `package.module:name` of a function marked with `model_factory`, or of a class of models.
        arguments: arguments of the call; plain data.

    Returns:
        The model.

    Raises:
        ModelError: `made_by` cannot be imported or is neither of the two, or the arguments are not plain data.
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
"""Old `made_by` -> present `made_by`. Older snapshots have the old names."""


def factory_named(made_by: str) -> Callable[..., nn.Module]:
    """Return the marked function or class of models with a name.

    Raises:
        ModelError: the name cannot be imported, or is neither a marked function nor a class of models.
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
