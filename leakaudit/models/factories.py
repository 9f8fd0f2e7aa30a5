"""Functions and classes that make a model in another process."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from leakaudit.errors import ModelError, ModelNotVouchedError

MADE_BY = "_leakaudit_made_by"
"""Attribute of a model with the name and the arguments of its maker."""

FACTORY = "_leakaudit_model_factory"
"""Attribute of a function that may make a model."""

OWN = "leakaudit."
"""Beginning of the names of our own makers, which need nobody's word."""

_vouched: set[str] = set()
"""Names of the makers of the user, as this process knows them: from the user's code, from a command line, or from the training process."""


def vouch_for(*names: str) -> None:
    """Let snapshots that this process reads name these makers of models.

    Args:
        names: `package.module:name`, from the user's own code or command line, never from a snapshot or a spool.
    """
    _vouched.update(name for name in names if not name.startswith(OWN))


def vouched() -> tuple[str, ...]:
    """Return the names of the makers that the user vouched for, sorted."""
    return tuple(sorted(_vouched))


def model_factory(function: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Mark a function as a maker of models, which the side process may call.

    The side process calls the function that a snapshot names. A snapshot is a file, so it may only name what the user vouched for, and of
    that only classes of models and functions that are marked in code.
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
    _imported(made_by)
    _check_plain(made_by, arguments)
    vouch_for(made_by)
    setattr(model, MADE_BY, (made_by, arguments))
    return model


def _check_plain(what: str, arguments: Mapping[str, Any]) -> None:
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError):
        odd = [key for key, value in arguments.items() if not isinstance(value, str | int | bool | None)]
        raise ModelError(
            f"{what}: its arguments have to be plain data, numbers finite, because they travel as JSON; look at {', '.join(odd)}"
        ) from None


MOVED = {
    "leakaudit.classifiers:array_classifier": "leakaudit.models.array_classifier:array_classifier",
    "leakaudit.pooler:wide_pooler": "leakaudit.models.wide_pooler:wide_pooler",
}
"""Old `made_by` -> present `made_by`. Older snapshots have the old names."""


def factory_named(made_by: str) -> Callable[..., nn.Module]:
    """Return the maker of models that a snapshot names.

    Importing a module runs its code, so a name that the user did not vouch for is refused before its module is imported.

    Raises:
        ModelNotVouchedError: the maker is neither one of ours nor one that the user vouched for.
        ModelError: the name cannot be imported, or is neither a marked function nor a class of models.
    """
    made_by = MOVED.get(made_by, made_by)
    if made_by in _vouched:
        return _imported(made_by)
    if made_by.startswith(OWN) and hasattr(found := _imported(made_by), FACTORY):
        return found
    name = ascii(made_by[:200])[1:-1]
    raise ModelNotVouchedError(
        f"the snapshot says that {name} makes its model, and nobody but the snapshot says so, so it was not called; if that is your own "
        f"code, give the command again with --allow-factory {name}"
    )


def _imported(made_by: str) -> Callable[..., nn.Module]:
    """Import a marked function or a class of models.

    Raises:
        ModelError: the name cannot be imported, or is neither of the two.
    """
    module, colon, name = made_by.partition(":")
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
