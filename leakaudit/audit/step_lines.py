"""A private file with one line of JSON for each step of an audit."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from leakaudit.errors import ResultsError
from leakaudit.files.json_lines import split_lines
from leakaudit.files.private_files import append_line
from leakaudit.files.regular_files import read_regular

Line = TypeVar("Line", bound=BaseModel)


class StepLines(Generic[Line]):
    """The lines of one file; only its owner may read it."""

    def __init__(self, path: Path, kind: type[Line]) -> None:
        """Name the file, which need not exist, and the model of its lines."""
        self._path, self._kind = path, kind

    def append(self, line: Line) -> None:
        """Append a line."""
        append_line(self._path, line.model_dump_json())

    def read(self) -> list[Line]:
        """Return every line, in order; one that was cut off is left out.

        Raises:
            ResultsError: the file cannot be read.
        """
        try:
            content = read_regular(self._path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ResultsError(f"{self._path}: cannot be read ({type(error).__name__})") from None
        found = []
        for text in split_lines(content):
            try:
                found.append(self._kind.model_validate_json(text))
            except ValidationError:
                continue
        return found
