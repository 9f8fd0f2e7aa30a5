"""The mark in the folder of an audit whose latest run was not audited.

Without it, a reader would take the results of an earlier run for those of the latest run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from leakaudit.errors import ResultsError
from leakaudit.files.strict_json import read_bounded

NOT_AUDITED = "not_audited.json"
"""Name of the file. While it exists, `refuse_unaudited` refuses the results in its folder. The next audited run removes it."""

MAX_BYTES = 64 * 1024
"""Largest size of the file. Our choice: our own file has less than one kilobyte, and a reader must not wait for a pipe or fill its
memory."""

LONGEST_REASON = 1000
"""Most characters of a reason that a message shows. Our choice: it fits on a terminal."""


class NotAudited(BaseModel):
    """Content of `not_audited.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, defer_build=True)

    schema_: Literal["leakaudit.not_audited/1.0"] = Field(default="leakaudit.not_audited/1.0", alias="schema")
    status: Literal["not audited"] = "not audited"
    because: str
    """Why the run was not audited, without private text."""
    when: str
    """Time at which the run wrote the file: ISO 8601, UTC."""


def refuse_unaudited(folder: Path) -> None:
    """Raise an error if the latest run of a folder was not audited.

    Args:
        folder: an audit's folder.

    Raises:
        ResultsError: it was not audited; the message says why and when.
    """
    path = folder / NOT_AUDITED
    if not path.exists() and not path.is_symlink():
        return
    try:
        found = NotAudited.model_validate_json(read_bounded(path, MAX_BYTES))
        why = f"{_one_line(found.because)} ({_one_line(found.when)})"
    except (OSError, ValueError, RecursionError):
        why = f"{NOT_AUDITED} cannot be read"
    raise ResultsError(
        f"{folder}: this run was not audited: {why}; repair the cause and run again; results of an earlier run say nothing about this one"
    )


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:LONGEST_REASON])
