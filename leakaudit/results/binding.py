"""`subject.json`: the files that a run made, named after its results were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError

from leakaudit.errors import ResultsError
from leakaudit.files.private_files import write_atomic
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.results.files import digest_of
from leakaudit.results.schema import Artifact, Results, ResultsModel

SUBJECT = "subject.json"
"""File beside `results.json`."""


class Binding(ResultsModel):
    """The content of `subject.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: Literal["leakaudit.subject/1"] = Field(default="leakaudit.subject/1", alias="schema")
    """Format of the file."""
    results_digest: str
    """Digest that the results name."""
    bound_at: str
    """Time in UTC, in ISO 8601."""
    artifacts: tuple[Artifact, ...] = Field(min_length=1)
    """The named files with their digests."""
    digest: str = ""
    """`sha256:` over everything else in the file."""


def write_binding(folder: Path, binding: Binding) -> None:
    """Write `subject.json` with its digest.

    Raises:
        OSError: it cannot be written.
    """
    content = binding.model_dump(mode="json", by_alias=True)
    write_atomic(folder / SUBJECT, json.dumps(content | {"digest": digest_of(content)}, indent=1))


def read_binding(folder: Path, results: Results) -> Binding | None:
    """Read `subject.json` in the folder of results; None if there is none.

    Raises:
        ResultsError: it cannot be read, was changed after it was written, or is about other results.
    """
    path = folder / SUBJECT
    try:
        raw = read_bounded(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ResultsError(f"{path}: {why or type(error).__name__}; run `leakaudit bind` again") from None
    binding = parse_binding(raw, str(path))
    if binding.results_digest != results.digest:
        raise ResultsError(f"{path}: is about other results than these; run `leakaudit bind` again")
    return binding


def parse_binding(raw: bytes, source: str) -> Binding:
    """Return the content of `subject.json`; `source` is its name in messages.

    Raises:
        ResultsError: it does not fit, or was changed after it was written.
    """
    try:
        data = parse_json(raw)
        binding = Binding.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ResultsError(f"{source}: does not fit leakaudit.subject/1: {where}: {first['msg']}") from None
    except ValueError as error:
        raise ResultsError(f"{source}: {error}; run `leakaudit bind` again") from None
    if binding.digest != digest_of(data):
        raise ResultsError(f"{source}: was changed after it was written; run `leakaudit bind` again")
    return binding
