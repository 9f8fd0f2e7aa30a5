"""The texts below the fields of a class, read from its source when they are shown.

Python keeps no such text. Reading the source takes a tenth of a second for the models of a policy and a verdict, so only those who print the
texts do it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar, get_args

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)


def field_texts(kind: type) -> Mapping[str, str]:
    """Return field -> the text below it.

    Fields of the classes that it is derived from are among them.

    A class whose source is not at hand adds nothing.
    """
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        found |= dict(_texts(one))
    return found


def described(model: type[Model]) -> type[Model]:
    """Give a model and those in its fields their descriptions, and return it.

    The description of a field is the text below it, unless it has one. The JSON Schema of the model then has them, too.
    """
    _describe(model)
    return model


@cache
def _describe(model: type[BaseModel]) -> None:
    for inner in dict.fromkeys(one for field in model.model_fields.values() for one in _models(field.annotation)):
        _describe(inner)
    texts = field_texts(model)
    for name, field in model.model_fields.items():
        field.description = field.description or texts.get(name)
    model.model_rebuild(force=True)  # the models in its fields come first, because it copies their schemas


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a type, such as both of `tuple[A, ...] | B`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _texts(kind: type) -> Iterator[tuple[str, str]]:
    if kind.__module__ == "builtins" or kind is BaseModel:
        return
    try:
        [node] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return
    body = node.body if isinstance(node, ast.ClassDef) else []
    for statement, below in pairwise(body):
        text = _text(below)
        if text and isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, text


def _text(statement: ast.stmt) -> str:
    """Return the text that a statement is; empty if it is none."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return " ".join(value.value.split()) if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
