"""One YAML file as plain data, with the line of every value and all problems.

PyYAML keeps the last of two equal keys, and reads `no` as false and `1e-3` as text. We therefore use only its syntax tree and decide
ourselves what an unquoted word means (docs/decisions/yaml_reader.md says why):

    1, -2, 0.5, 1e-3, 0x1f     numbers
    true, false                yes or no; also yes, no, on, off; refused where text is expected
    null, ~, (empty)           no value
    2026-11-02, 1:30, v1       text

A few aliases are allowed. Tags, merge keys (`<<`) and a second document are refused.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakaudit.errors import ConfigError, Problem, WrongFileError
from leakaudit.files.strict_json import read_bounded

if TYPE_CHECKING:
    import yaml

Place = tuple[str | int, ...]
"""Keys and indices from the top of a file to a value."""

MAX_BYTES = 256 * 1024
"""Largest file. Our choice: a policy or a configuration has a few kilobytes, so a larger file is probably the wrong one."""
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


@dataclass
class Document:
    """One file while it is read: the line of each value, and the problems found."""

    source: str
    lines: dict[Place, int] = field(default_factory=dict)
    """Path of a value -> its line, counted from 1. The line of a value in a mapping is the line of its key."""
    words: dict[Place, str] = field(default_factory=dict)
    """Path of an unquoted value that is not text -> the word as it was written."""
    problems: list[Problem] = field(default_factory=list)
    broken: set[Place] = field(default_factory=set)
    """Paths of values that could not be read, so that no second problem is reported for them."""
    nodes: int = 0

    def problem(self, path: Place, message: str, line: int | None = None) -> None:
        """Record a problem at `path`, or at the nearest enclosing value that has a line."""
        self.problems.append(Problem(self.line_of(path) if line is None else line, message, path))

    def line_of(self, path: Place) -> int:
        """Return the line of a value, or of the nearest enclosing one with a line.

        It is 0 if there is none.
        """
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)

    def fail(self) -> ConfigError:
        """Return all problems as one error, in the order of the file."""
        first = {(found.line, found.message): found for found in reversed(self.problems)}
        problems = tuple(first[key] for key in sorted(first))
        texts = [
            f"{self.source}:{found.line}: {found.message}" if found.line else f"{self.source}: {found.message}"
            for found in problems
        ]
        return WrongFileError("\n".join(texts), problems)

    def build(self, node: yaml.Node, path: Place, depth: int) -> Any:
        """Convert a syntax node to plain data; record lines and problems."""
        import yaml

        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH:
            self.problem(path, "too large once its aliases (`*name`) are followed", _line(node))
            raise self.fail()
        self.lines.setdefault(path, _line(node))
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rpartition(":")[2] not in ("str", "seq", "map"):
            self.broken.add(path)
            self.problem(path, f"tags such as {node.tag.replace('tag:yaml.org,2002:', '!!')!r} are not allowed")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Place, depth: int) -> dict[str, Any]:
        import yaml

        data: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(path, "a key must be one word", line)
            elif key_node.style is None and key == "<<":
                self.problem(path, "merge keys (`<<`) are not allowed; write the keys out", line)
            elif key_node.style is None and (key.lower() in _TRUTH or key in _NOTHING):
                self.problem(path, f"the key {key!r} means yes, no or nothing in YAML; write it in quotes", line)
            elif key in data:
                self.problem(path, f"duplicate key {short(key)}; line {first[key]} has it already", line)
            else:
                first[key] = self.lines[(*path, key)] = line
                data[key] = self.build(value_node, (*path, key), depth + 1)
        return data

    def _scalar(self, node: yaml.Node, path: Place) -> Any:
        word: str = node.value
        if getattr(node, "style", None) is not None:
            return word  # a quoted word is always text
        value = self._plain(word, path)
        if value is None or isinstance(value, bool | int | float):
            self.words[path] = word
        return value

    def _plain(self, word: str, path: Place) -> str | int | float | bool | None:
        if word in _NOTHING:
            return None
        if word.lower() in _TRUTH and word in (word.lower(), word.upper(), word.capitalize()):
            return _TRUTH[word.lower()]
        if _INT.fullmatch(word) and len(word) < 400:  # Python refuses to convert much longer ones
            return int(word)
        if _HEX_OR_OCTAL.fullmatch(word) and len(word) < 400:
            return int(word, 0)
        if _LEADING_ZERO.fullmatch(word):
            self.broken.add(path)
            self.problem(
                path, f"{named(path)}{word} starts with 0; write it in quotes for text, or without the 0 for a number"
            )
            return None
        if _NOT_FINITE.fullmatch(word) or (_FLOAT.fullmatch(word) and not math.isfinite(float(word))):
            self.broken.add(path)
            self.problem(path, f"{named(path)}{short(word)[1:-1]} is not a finite number")
            return None
        return float(word) if _FLOAT.fullmatch(word) else word


@cache
def _syntax_only() -> type[yaml.SafeLoader]:
    """Return PyYAML's parser without its conversions, so that every scalar stays text.

    PyYAML is imported where a file is read: the gate with its built-in policy reads none.
    """
    import yaml

    class SyntaxOnly(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own attribute

    return SyntaxOnly


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: the file cannot be read, is no regular file, is larger than `MAX_BYTES` or is not UTF-8.
    """
    try:
        raw = read_bounded(path, MAX_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or type(error).__name__})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 text") from None


def compose(text: str, source: str) -> yaml.Node | None:
    """Return the syntax tree of the one document in `text`; None if it is empty."""
    import yaml

    try:
        _check_shape(text, source)
        return yaml.compose(text, Loader=_syntax_only())
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
    """Refuse a file that is too deep or has too many parts for the recursive reader."""
    import yaml

    depth = aliases = documents = 0
    for event in yaml.parse(text, Loader=_syntax_only()):
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


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1 if node.start_mark else 1


def dotted(path: Place) -> str:
    """Return a path as `rules[0].scope.attack`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def named(path: Place) -> str:
    """Return a path as the start of a message; empty for the top of the file."""
    return f"{dotted(path)}: " if path else ""


def short(value: Any) -> str:
    """Return `repr(value)`, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
