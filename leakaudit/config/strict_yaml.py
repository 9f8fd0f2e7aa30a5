"""A reader of YAML files: a validated pydantic model, or every problem with its line.

A policy that is misread is worse than one that is refused: a typo must not switch a rule off. PyYAML by itself keeps the
last of two equal keys, reads `no` as false and `1e-3` as text. We therefore use only its syntax tree and decide
ourselves what a plain word means (docs/decisions/yaml_reader.md says why):

    1, -2, 0.5, 1e-3, 0x1f     numbers
    true, false                yes or no; also yes, no, on, off, but never in a place for text
    null, ~, (empty)           no value
    2026-11-02, 1:30, v1       text

Anchors may be used sparingly; tags, merge keys (`<<`) and more than one document are refused.
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, to_json

from leakaudit.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
_Path = tuple[str | int, ...]

MAX_BYTES = 256 * 1024
"""Largest file. Our choice: a policy or a configuration has a few kilobytes, so a larger file is a wrong path."""
MAX_DEPTH = 30
"""Most levels of nesting. Our choice: our own files have five."""
MAX_ALIASES = 50
"""Most aliases (`*name`). Our choice: a person writes a few."""
MAX_NODES = 10_000
"""Most nodes after aliases are followed, so that a small file cannot become a huge one. Our choice."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_HEX_OR_OCTAL = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NOTHING = {"", "~", "null", "Null", "NULL"}


Check = Callable[[Model], Iterable[tuple[_Path, str]]]
"""Finds problems that the model cannot know about; yields the place and the message of each."""


def problem_at(path: _Path, message: str) -> PydanticCustomError:
    """Return an error for a model's validator to raise about a place in the model.

    The message then names the line of that place.
    """
    return PydanticCustomError("problem_at", "{message}", {"path": path, "message": message})


def read_yaml(path: Path, model: type[Model], check: Check[Model] | None = None) -> Model:
    """Read the YAML file at `path` as a `model`.

    The model and the models within it should forbid extra keys, so that a misspelt key is found.

    Args:
        path: a file of at most `MAX_BYTES`, UTF-8.
        model: the expected content. Types are strict: text is never taken for a number.
        check: finds further problems.

    Returns:
        The validated model.

    Raises:
        ConfigError: one line for each problem: `file:line: what is wrong and what to write instead`.
    """
    return parse_yaml(_read_text(path), model, str(path), check)


def parse_yaml(text: str, model: type[Model], source: str, check: Check[Model] | None = None) -> Model:
    """Read `text` as a `model`; see `read_yaml`. Messages call the text `source`."""
    document = _Document(source)
    node = _compose(text, source)
    data = document.build(node, (), 0) if node is not None else None
    if data is None and not document.problems:
        raise ConfigError(f"{source}: is empty; expected keys: {', '.join(_keys(model))}")
    valid = _validate(data, model, document)
    for path, message in check(valid) if check else ():
        document.problem(path, message)
    if document.problems:
        raise document.fail()
    return valid


def validate_mapping(data: Mapping[str, Any], model: type[Model], source: str) -> Model:
    """Validate parsed data as strictly as a file. Messages call the data `source`.

    Raises:
        ConfigError: one line for each problem.
    """
    document = _Document(source)
    for path, value in _walk(data, ()):
        if isinstance(value, float) and not math.isfinite(value):
            document.broken.add(path)
            document.problem(path, f"{_dotted(path)}: {value} is not a finite number")
    return _validate(data, model, document)


@dataclass
class _Document:
    """One file while it is read: the line of each value, and the problems found."""

    source: str
    lines: dict[_Path, int] = field(default_factory=dict)
    """Path of a value -> its line, counted from 1; for a value of a mapping the line of its key."""
    words: dict[_Path, str] = field(default_factory=dict)
    """Path of an unquoted value that is not text -> the word as it was written."""
    problems: list[tuple[int, str]] = field(default_factory=list)
    broken: set[_Path] = field(default_factory=set)
    """Paths of values that could not be read; they are not reported as missing as well."""
    nodes: int = 0

    def problem(self, path: _Path, message: str, line: int | None = None) -> None:
        """Record a problem at `path`, or at the nearest enclosing value that has a line."""
        while line is None and path and path not in self.lines:
            path = path[:-1]
        self.problems.append((line if line is not None else self.lines.get(path, 0), message))

    def fail(self) -> ConfigError:
        """Return all problems as one error, in the order of the file."""
        texts = [
            f"{self.source}:{line}: {message}" if line else f"{self.source}: {message}"
            for line, message in sorted(set(self.problems))
        ]
        return ConfigError("\n".join(texts))

    def build(self, node: yaml.Node, path: _Path, depth: int) -> Any:
        """Convert a syntax node to plain data; record lines and problems."""
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH:
            self.problem(path, "too large once its aliases (`*name`) are followed", _line(node))
            raise self.fail()
        self.lines.setdefault(path, _line(node))
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rpartition(":")[2] not in ("str", "seq", "map"):
            self.broken.add(path)
            self.problem(path, f"tags such as {node.tag.replace('tag:yaml.org,2002:', '!!')!r} are not read")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: _Path, depth: int) -> dict[str, Any]:
        data: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(path, "a key must be one word", line)
            elif key_node.style is None and key == "<<":
                self.problem(path, "merge keys (`<<`) are not read; write the keys out", line)
            elif key_node.style is None and (key.lower() in _TRUTH or key in _NOTHING):
                self.problem(path, f"the key {key!r} means yes, no or nothing in YAML; write it in quotes", line)
            elif key in data:
                self.problem(path, f"duplicate key {_short(key)}; it stands in line {first[key]} already", line)
            else:
                first[key] = self.lines[(*path, key)] = line
                data[key] = self.build(value_node, (*path, key), depth + 1)
        return data

    def _scalar(self, node: yaml.Node, path: _Path) -> Any:
        word: str = node.value
        if getattr(node, "style", None) is not None:
            return word  # quoted: text, whatever it says
        value = self._plain(word, path)
        if value is None or isinstance(value, bool | int | float):
            self.words[path] = word
        return value

    def _plain(self, word: str, path: _Path) -> str | int | float | bool | None:
        if word in _NOTHING:
            return None
        if word.lower() in _TRUTH and word in (word.lower(), word.upper(), word.capitalize()):
            return _TRUTH[word.lower()]
        if _INT.fullmatch(word) and len(word) < 400:  # Python refuses to read longer ones
            return int(word)
        if _HEX_OR_OCTAL.fullmatch(word) and len(word) < 400:
            return int(word, 0)
        if _LEADING_ZERO.fullmatch(word):
            self.broken.add(path)
            self.problem(path, f"{_named(path)}{word} starts with 0; write it in quotes if it is text, without if not")
            return None
        if _NOT_FINITE.fullmatch(word) or (_FLOAT.fullmatch(word) and not math.isfinite(float(word))):
            self.broken.add(path)
            self.problem(path, f"{_named(path)}{_short(word)[1:-1]} is not a finite number")
            return None
        return float(word) if _FLOAT.fullmatch(word) else word


class _SyntaxOnly(yaml.SafeLoader):
    """PyYAML's parser without its conversions: every scalar stays text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own attribute


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or type(error).__name__})") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} KiB; is it the right file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 text") from None


def _compose(text: str, source: str) -> yaml.Node | None:
    """Return the syntax tree of the one document in `text`; None if it is empty."""
    try:
        _check_shape(text, source)
        return yaml.compose(text, Loader=_SyntaxOnly)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = error.problem or "not readable as YAML"
        hint = "; indent with spaces" if "\\t" in problem else ""
        raise ConfigError(f"{source}{line}: {problem}{hint}") from None
    except yaml.reader.ReaderError as error:
        line = f":{text[: error.position].count(chr(10)) + 1}"
        raise ConfigError(f"{source}{line}: a character that YAML does not allow ({error.reason})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not readable as YAML ({type(error).__name__})") from None


def _check_shape(text: str, source: str) -> None:
    """Refuse a file that would exhaust the reader, before anything recursive reads it."""
    depth = aliases = documents = 0
    for event in yaml.parse(text, Loader=_SyntaxOnly):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{source}:{line}: nested more than {MAX_DEPTH} levels deep")
        if aliases > MAX_ALIASES:
            raise ConfigError(f"{source}:{line}: more than {MAX_ALIASES} aliases (`*name`)")
        if documents > 1:
            raise ConfigError(f"{source}:{line}: a second document (`---`); one file holds one")


def _validate(data: Any, model: type[Model], document: _Document) -> Model:
    """Validate `data`; earlier problems are reported together with the new ones."""
    if not isinstance(data, Mapping) and not document.problems:
        document.problem((), f"expected keys and values, found {_kind(data)}; keys: {', '.join(_keys(model))}")
    if not isinstance(data, Mapping):
        raise document.fail()
    try:
        # in strict mode only JSON input allows a list for a tuple and a word for an enum, but no text for a number
        valid = model.model_validate_json(to_json(data, inf_nan_mode="null"), strict=True)
    except ValidationError as error:
        for path, details in _deepest(error.errors(include_url=False), data):
            if path not in document.broken:
                document.problem(path, _message(path, details, model, document))
        raise document.fail() from None
    if document.problems:
        raise document.fail()
    return valid


def _deepest(errors: list[ErrorDetails], data: Any) -> Iterator[tuple[_Path, ErrorDetails]]:
    """Yield one error for each path in the data.

    Of the alternatives of a union it is the error of the one that matched deepest.
    """
    found = [(_resolve(error, data), error) for error in errors]
    paths = {path for path, _ in found}
    seen: set[_Path] = set()
    for path, error in found:
        deeper = any(p != path and p[: len(path)] == path for p in paths)
        # a list whose items are wrong is "too short" as well, because pydantic counts the right ones
        outdone = deeper and (len(error["loc"]) > len(path) or error["type"] == "too_short")
        if path not in seen and not outdone:
            seen.add(path)
            yield path, error


def _resolve(error: ErrorDetails, data: Any) -> _Path:
    """Return pydantic's location as a path in the data.

    Names that pydantic gives to the alternatives of a union are left out.
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


def _message(path: _Path, error: ErrorDetails, model: type[BaseModel], document: _Document) -> str:
    """Return an error of pydantic in our words."""
    kind = error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path, model)
    if kind == "missing":
        where = f" in {_dotted(path[:-1])}" if len(path) > 1 else ""
        return f"key {path[-1]!r} is missing{where}"
    word = document.words.get(path)
    if kind == "string_type" and word is not None:
        return f"{_named(path)}expected text, but YAML reads {word or 'nothing'} as {_kind(error['input'])}; " + (
            f'write "{word}" in quotes' if word else "write a word"
        )
    if kind in ("literal_error", "enum") and isinstance(error["input"], str):
        known = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
        near = difflib.get_close_matches(error["input"], known, n=1)
        return f"{_named(path)}{_plain_words(error)}" + (f"; did you mean {near[0]!r}?" if near else "")
    if kind.endswith("_type") and not isinstance(error["input"], Mapping | list):
        found = f", found {_short(error['input'])}" if error["input"] is not None else ", found nothing"
        return f"{_named(path)}{_plain_words(error)}{found}"
    return f"{_named(path)}{_plain_words(error)}"


def _plain_words(error: ErrorDetails) -> str:
    text = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return text[0].lower() + text[1:] if text.startswith("Input ") else text


def _unknown_key(path: _Path, model: type[BaseModel]) -> str:
    known = sorted({key for found in _models_at(model, path[:-1]) for key in _keys(found)})
    near = difflib.get_close_matches(str(path[-1]), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known) or 'none'}"
    return f"unknown key {_short(path[-1])}; {hint}"


def _keys(model: type[BaseModel]) -> list[str]:
    """Return the keys of `model` as a file spells them."""
    return [info.alias or name for name, info in model.model_fields.items()]


def _models_at(model: type[BaseModel], path: _Path) -> list[type[BaseModel]]:
    """Return the models that may stand at `path` below `model`."""
    here: list[Any] = [model]
    for part in path:
        below: list[Any] = []
        for kind in here:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                below += [f.annotation for name, f in kind.model_fields.items() if part in (f.alias, name)]
            else:
                below += [argument for argument in typing.get_args(kind) if argument is not Ellipsis]
        here = [alternative for kind in below for alternative in _alternatives(kind)]
    return [kind for kind in here if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _alternatives(kind: Any) -> Iterator[Any]:
    """Yield the members of a union, and of unions within it."""
    if typing.get_origin(kind) is Annotated:
        yield from _alternatives(typing.get_args(kind)[0])
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for argument in typing.get_args(kind):
            yield from _alternatives(argument)
    else:
        yield kind


def _walk(data: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    yield path, data
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _walk(value, (*path, key))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _walk(value, (*path, index))


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1 if node.start_mark else 1


def _dotted(path: _Path) -> str:
    """Return a path as `rules[0].scope.attack`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _named(path: _Path) -> str:
    return f"{_dotted(path)}: " if path else ""


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return {int: "a number", float: "a number", str: "text", list: "a list"}.get(type(value), "something else")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
