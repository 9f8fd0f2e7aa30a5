"""Texts and classes of the rows of a data file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leakaudit.audit.simulation.entities import entities_of
from leakaudit.audit.simulation.tables import Table, read_table
from leakaudit.config.simulation import MAX_CLASSES
from leakaudit.errors import DataError
from leakaudit.files.json_lines import field_names, text_of
from leakaudit.models.loading import Task
from leakaudit.results.wording import counted

_WHOLE = re.compile(r"\s*(-?\d{1,18})(?:\.0+)?\s*", re.ASCII)
"""A class in a format whose cells are all text; tools write 1.0 where a column has empty cells."""

SHOWN_NAMES = 12
"""Most names of classes that are printed. Our choice: two lines."""

SHOWN_LETTERS = 40
"""Most letters of a printed name. Our choice: a longer one is rather a text in the wrong field."""


@dataclass(frozen=True)
class Example:
    """One row of the data file."""

    text: str
    label: int | None
    entities: tuple[str, ...] | None = None
    """Named entities of the text, as it spells them; None if the row names none."""


@dataclass(frozen=True)
class Fields:
    """The names of the fields of a data file."""

    text: str = "text"
    label: str = "label"


@dataclass(frozen=True)
class Examples:
    """What a data file holds."""

    rows: tuple[Example, ...]
    form: str
    """Format that was found, such as `CSV`."""
    classes: tuple[str, ...] = ()
    """Names of the classes, in the order of their numbers; empty if the labels are numbers."""
    empty: int = 0
    """Rows with an empty text, which are left out."""

    def notices(self, path: Path, *, names: bool) -> Iterator[str]:
        """Yield what a user should know of the data, one line each.

        Args:
            path: of the data, for the lines.
            names: name the classes; they are the user's data, and belong on a terminal only.
        """
        if self.form != "JSONL":
            yield f"{path}: read as {self.form}, {counted(len(self.rows), 'row')}"
        if self.empty:
            yield f"{path}: {counted(self.empty, 'row')} with an empty text left out"
        if self.classes:
            shown = ", ".join(f"{_printable(name)} = {n}" for n, name in enumerate(self.classes[:SHOWN_NAMES]))
            more = len(self.classes) - SHOWN_NAMES
            shown = f": {shown}{f' and {more} more' if more > 0 else ''}" if names else ""
            number = counted(len(self.classes), "class", "classes")
            yield f"{path}: its labels are texts, numbered in sorted order as {number}{shown}"


def _printable(name: str) -> str:
    """Return a name without control characters, which a terminal executes.

    A long name is cut.
    """
    cut = name if len(name) <= SHOWN_LETTERS else name[:SHOWN_LETTERS] + "..."
    return cut if cut.isprintable() else ascii(cut)[1:-1]


def read_data(path: Path, task: Task, where: Fields | None = None, like: Examples | None = None) -> Examples:
    """Read texts, and for classification classes, from a data file.

    Formats are those of `tables.read_table`. Labels that are whole numbers are the classes; labels that are all texts are numbered in sorted
    order. Rows with an empty text are left out. The optional field `entities` (or `spans`) holds the named entities of a text, as strings or
    as places `[start, end, type]`. Only scoring sees them.

    Args:
        path: the file, or a folder that `datasets` saved.
        task: whether labels are needed.
        where: names of the fields.
        like: data read before, whose numbers of classes hold here, too.

    Raises:
        DataError: the file is missing or empty, or a row or a field cannot be used. The message names the row, never its content.
    """
    where = where or Fields()
    table = read_table(path, (where.text, where.label))
    kept = _with_text(path, table, where)
    if not kept:
        raise DataError(f"{path}: holds no rows" + (" with a text" if table.rows else ""))
    empty = len(table.rows) - len(kept)
    rows = tuple(Example(text, None, entities_of(path, number, row, text)) for number, row, text in kept)
    if task != "classification":
        return Examples(rows, table.form, empty=empty)
    labels, classes = _labels(path, [(number, row) for number, row, _ in kept], where.label, like)
    labelled = tuple(replace(row, label=label) for row, label in zip(rows, labels, strict=True))
    return Examples(labelled, table.form, classes, empty)


def read_examples(path: Path, task: Task) -> list[Example]:
    """Return the rows of a data file with the fields `text` and `label`.

    Raises:
        DataError: as by `read_data`.
    """
    return list(read_data(path, task).rows)


def _with_text(path: Path, table: Table, where: Fields) -> list[tuple[int, dict[str, Any], str]]:
    """Return number, fields and text of each row that has a text."""
    found = []
    for number, row in table.rows:
        if where.text not in row:
            raise DataError(
                f"{path}:{number}: looked for the field {where.text!r} with a string, found {field_names(row)}"
                f"{_hint('--text-field', where.text, row, _longest_text(row))}"
            )
        text = text_of(path, number, row, where.text)
        if text.strip():
            found.append((number, row, text))
    return found


def _hint(option: str, wanted: str, row: Mapping[str, Any], otherwise: str = "") -> str:
    """Return which field to name with an option; empty if the row has none."""
    near = difflib.get_close_matches(wanted, row, n=1, cutoff=0.5) or ([otherwise] if otherwise else [])
    if near:
        name = ascii(near[0])[1:-1]
        return f"; did you mean {name!r}? Name it: {option} {name}"
    return f"; name the right one with {option}" if row else ""


def _longest_text(row: Mapping[str, Any]) -> str:
    """Return the field with the longest text; empty if there is no text."""
    texts = {name: len(value) for name, value in row.items() if isinstance(value, str)}
    return max(texts, key=lambda name: texts[name], default="")


def _labels(
    path: Path, rows: Sequence[tuple[int, dict[str, Any]]], field: str, like: Examples | None
) -> tuple[list[int], tuple[str, ...]]:
    """Return the class of each row.

    The second value is the names of the classes, if the labels are texts.
    """
    labels: list[Any] = [row.get(field) for _, row in rows]
    named = like is not None and bool(like.classes)
    if not named and all(_WHOLE.fullmatch(label) for label in labels if _is_name(label)):
        labels = [int(_WHOLE.sub(r"\1", label)) if _is_name(label) else label for label in labels]
    if all(map(_is_name, labels)):
        return _numbered(path, rows, labels, like)
    named_but_some = all(_is_name(label) or _is_missing(label) for label in labels)
    for (number, row), label in zip(rows, labels, strict=True):
        if (problem := _label_problem(label)) and not (named_but_some and _is_name(label)):
            hint = "" if field in row else f". Found the fields {field_names(row)}{_hint('--label-field', field, row)}"
            raise DataError(f"{path}:{number}: classification needs the field {field!r} with a {problem}{hint}")
    if named:
        raise DataError(f"{path}: its labels are numbers, and those of --data are texts; write both in the same way")
    return labels, ()


def _is_name(label: object) -> bool:
    return isinstance(label, str) and bool(label.strip())


def _is_missing(label: object) -> bool:
    return label is None or (isinstance(label, str) and not label.strip())


def _numbered(
    path: Path, rows: Sequence[tuple[int, dict[str, Any]]], labels: Sequence[str], like: Examples | None
) -> tuple[list[int], tuple[str, ...]]:
    """Number labels that are texts in sorted order, or as in the data read before."""
    classes = like.classes if like is not None else tuple(sorted(set(labels)))
    if like is not None and not classes:
        raise DataError(f"{path}: its labels are texts, and those of --data are numbers; write both in the same way")
    if len(classes) > MAX_CLASSES:
        raise DataError(
            f"{path}: has {len(classes):,} different labels, at most {MAX_CLASSES:,} are taken; name another field"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    for (number, _), label in zip(rows, labels, strict=True):
        if label not in numbers:
            raise DataError(
                f"{path}:{number}: has a label that no row of --data has; leave out the row, or add one there"
            )
    return [numbers[label] for label in labels], classes


def _label_problem(label: object) -> str:
    """Return the problem with a label; empty if it is a class."""
    expected = f"class from 0 to {MAX_CLASSES - 1:,}"
    if not isinstance(label, int) or isinstance(label, bool):
        kind = "nothing" if _is_missing(label) else type(label).__name__
        return f"{expected}, or a text in every row, found {kind}; use --task causal-lm for texts without classes"
    if label < 0:
        return f"{expected}, found a negative number; leave out rows without a class"
    if label >= MAX_CLASSES:
        return f"{expected}, found a larger number; renumber the classes from 0 without gaps"
    return ""
