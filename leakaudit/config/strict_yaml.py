"""A strict reader of YAML files, which reports every problem with its line.

It returns a valid pydantic model. A misread policy is worse than a refused one: a typo must not switch a rule off. `yaml_document`
decides what an unquoted word means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, to_json

from leakaudit.config.problem_words import keys_of, kind_of, message_of
from leakaudit.config.yaml_document import Document, Place, compose, dotted, named, read_text
from leakaudit.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


Check = Callable[[Model], Iterable[tuple[Place, str]]]
"""A function that finds problems which the model cannot see. It yields the place and the message of each."""


def problem_at(path: Place, message: str) -> PydanticCustomError:
    """Return an error that a model's validator raises about a place in the model.

    `read_yaml` adds the line of that place to the message.
    """
    return PydanticCustomError("problem_at", "{message}", {"path": path, "message": message})


def read_yaml(path: Path, model: type[Model], check: Check[Model] | None = None) -> Model:
    """Read the YAML file at `path` as a `model`.

    The model and the models within it should forbid extra keys, so that a misspelt key is found.

    Args:
        path: a file of at most `MAX_BYTES`, UTF-8.
        model: the expected content. Types are strict: text is never read as a number.
        check: finds further problems.

    Returns:
        The validated model.

    Raises:
        ConfigError: the message has one line for each problem: `file:line: what is wrong and what to write instead`.
    """
    return parse_yaml(read_text(path), model, str(path), check)


def parse_yaml(text: str, model: type[Model], source: str, check: Check[Model] | None = None) -> Model:
    """Read `text` as a `model`; see `read_yaml`. Messages call the text `source`."""
    return parse_document(text, model, source, check)[0]


def parse_document(
    text: str, model: type[Model], source: str, check: Check[Model] | None = None
) -> tuple[Model, Document]:
    """Read `text` as a `model`; return it with the document, which knows the lines.

    See `read_yaml`.
    """
    document = Document(source)
    node = compose(text, source)
    data = document.build(node, (), 0) if node is not None else None
    if data is None and not document.problems:
        raise ConfigError(f"{source}: is empty; expected keys: {', '.join(keys_of(model))}")
    valid = _validate(data, model, document)
    for path, message in check(valid) if check else ():
        document.problem(path, f"{named(path)}{message}")
    if document.problems:
        raise document.fail()
    return valid, document


def validate_mapping(data: Mapping[str, Any], model: type[Model], source: str) -> Model:
    """Validate parsed data as strictly as a file. Messages call the data `source`.

    Raises:
        ConfigError: the message has one line for each problem.
    """
    document = Document(source)
    for path, value in _walk(data, ()):
        if isinstance(value, float) and not math.isfinite(value):
            document.broken.add(path)
            document.problem(path, f"{dotted(path)}: {value} is not a finite number")
    return _validate(data, model, document)


def _validate(data: Any, model: type[Model], document: Document) -> Model:
    """Validate `data`; earlier problems are reported together with the new ones."""
    if not isinstance(data, Mapping) and not document.problems:
        document.problem((), f"expected keys and values, found {kind_of(data)}; keys: {', '.join(keys_of(model))}")
    if not isinstance(data, Mapping):
        raise document.fail()
    try:
        # in strict mode only JSON input allows a list for a tuple and a word for an enum, but no text for a number
        valid = model.model_validate_json(to_json(data, inf_nan_mode="null"), strict=True)
    except ValidationError as error:
        for path, details in _deepest(error.errors(include_url=False), data):
            if not any(broken[: len(path)] == path for broken in document.broken):
                document.problem(path, message_of(path, details, model, document))
        raise document.fail() from None
    if document.problems:
        raise document.fail()
    return valid


def _deepest(errors: list[ErrorDetails], data: Any) -> Iterator[tuple[Place, ErrorDetails]]:
    """Yield one error for each wrong path in the data.

    For a union it is the error of the alternative that matched deepest.
    """
    found = [(_resolve(error, data), error) for error in errors]
    paths = {path for path, _ in found}
    seen: set[Place] = set()
    for path, error in found:
        deeper = any(p != path and p[: len(path)] == path for p in paths)
        # pydantic also calls a list with wrong items "too short", because it counts only the right ones
        outdone = deeper and (len(error["loc"]) > len(path) or error["type"] == "too_short")
        if path not in seen and not outdone:
            seen.add(path)
            yield path, error


def _resolve(error: ErrorDetails, data: Any) -> Place:
    """Return pydantic's location as a path in the data.

    The names of union alternatives, which pydantic adds, are left out.
    """
    if error["type"] == "problem_at":
        return tuple(error["ctx"]["path"])
    path: list[str | int] = []
    here = data
    for part in error["loc"]:
        in_list = isinstance(here, list | tuple) and isinstance(part, int) and part < len(here)
        if in_list or (isinstance(here, Mapping) and part in here):
            here = here[part]
            path.append(part)
    if error["type"] == "missing":
        path.append(error["loc"][-1])
    return tuple(path)


def _walk(data: Any, path: Place) -> Iterator[tuple[Place, Any]]:
    yield path, data
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _walk(value, (*path, key))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _walk(value, (*path, index))
