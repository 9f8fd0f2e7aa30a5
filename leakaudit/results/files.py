"""A strict reader and a writer of `results.json`, with versions and digest."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json as as_json_text

from leakaudit.errors import ResultsError
from leakaudit.files.collector import collector_paused
from leakaudit.files.regular_files import open_regular
from leakaudit.files.strict_json import parse_json, place, read_bounded, short
from leakaudit.results.as_written import read_as_written
from leakaudit.results.former_keys import RENAMED_IN_SEQUENCES
from leakaudit.results.not_audited import refuse_unaudited
from leakaudit.results.schema import SCHEMA, Results
from leakaudit.results.usual import Usual, canonical_text, usual_results


def load_results(path: Path) -> Results:
    """Read and check `results.json`; see `read_results`."""
    return read_results(path)[0]


def read_results(path: Path) -> tuple[Results, str]:
    """Read `results.json` as strictly as a policy.

    Args:
        path: the file, or the folder that holds it.

    Returns:
        The results, and the SHA-256 of the file in hex.

    Raises:
        ResultsError: the file is missing, is not strict JSON, does not fit the schema, has another major version, holds a key that
            its version does not know, or was changed after it was written. Or the latest run in its folder was not audited.
    """
    if path.is_dir():
        path = path / "results.json"
    for folder in dict.fromkeys((path.parent, path.resolve().parent)):  # a link has two folders
        refuse_unaudited(folder)
    try:
        with collector_paused():
            if (known := _as_written(path)) is not None:
                return known
            raw = read_bounded(path)
            sha256 = hashlib.sha256(raw).hexdigest()
            if (usual := _accepted(_usual_text(raw))) is not None:
                return usual, sha256
            data = parse_json(raw)
    except FileNotFoundError:
        raise ResultsError(f"{path}: no such file; `leakaudit run` or `leakaudit simulate` writes one") from None
    except (OSError, ValueError, MemoryError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ResultsError(
            f"{path}: {why or type(error).__name__}; was the audit interrupted, or the file edited?"
        ) from None
    try:
        return general_results(data), sha256
    except ValueError as error:
        raise ResultsError(f"{path}: {error}") from None


def parse_results(raw: bytes) -> Results:
    """Return the results in the bytes of `results.json`, read as strictly as the file.

    Raises:
        ValueError: they are no results, or were changed; the message says why.
    """
    usual = usual_from(raw)
    return general_results(parse_json(raw)) if usual is None else usual


def usual_from(raw: bytes) -> Results | None:
    """Return results that are as this version writes them; None for all others."""
    found = _accepted(read_as_written(BytesIO(raw)))
    return _accepted(_usual_text(raw)) if found is None else found


def _as_written(path: Path) -> tuple[Results, str] | None:
    """Return the results in a file with the layout of this version.

    With them comes the file's SHA-256 in hex. None for all others, and if the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            found = read_as_written(file)
    except OSError:
        return None
    results = _accepted(found)
    return None if found is None or results is None else (results, found.sha256)


def _usual_text(raw: bytes) -> Usual | None:
    try:
        return usual_results(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return None


def _accepted(found: Usual | None) -> Results | None:
    """Return the results if they were not changed, and have all keys of their version.

    The keys that results hold decide whether a reader would take a default for one, and the digest whether they were changed.
    """
    if found is None:
        return None
    results = found.results
    version = _version(results.schema_)
    whole = _same_keys(found.data, results.model_dump(mode="json", by_alias=True, exclude={"attempts"}))
    known = version is not None and _DIGEST_SINCE <= version <= OWN_VERSION
    return results if known and whole and results.digest == found.digest else None


def general_results(data: Any) -> Results:
    """Turn strict JSON data into results.

    Raises:
        ValueError: the data are not results; the message says why.
    """
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(schema, str) or not schema.startswith("leakaudit.results/"):
        raise ValueError("is not a leakaudit results file (no `schema: leakaudit.results/1.x`)")
    version = _version(schema)
    if version is None or version[0] != 1:
        raise ValueError(f"schema {short(schema)[1:-1]}; this version reads leakaudit.results/1.x. Upgrade leakaudit.")
    try:
        # in strict mode only JSON input allows a list for a tuple and a word for an enum, but no text for a number
        results = Results.model_validate_json(as_json_text(data), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = short(".".join(str(part) for part in first["loc"]))[1:-1]
        raise ValueError(f"does not fit {SCHEMA}: {where}: {first['msg']} ({error.error_count()} problems)") from None
    read = results.model_dump(mode="json", by_alias=True)
    same = _same_keys(data, read)  # nearly always true; only a difference needs the slower walks, which find its place
    if version <= OWN_VERSION and not same:
        for problem in _unknown_keys(data, read, ()):
            raise ValueError(problem)
    if results.digest is None and version >= _DIGEST_SINCE:
        raise ValueError(f"has no digest, which {schema} requires: it was changed after it was written")
    if results.digest is not None and results.digest != digest_of(data):
        raise ValueError("was changed after it was written: its content does not have the digest that it names")
    if version >= OWN_VERSION and not same:
        for key, path in _missing_keys(data, read, ()):
            raise ValueError(f"lacks the key {short(key)} {place(path)}, which {SCHEMA} always has")
    return results


def _version(schema: str) -> tuple[int, int] | None:
    major, dot, minor = schema.removeprefix("leakaudit.results/").partition(".")
    known = all(re.fullmatch(r"0|[1-9][0-9]{0,3}", part) for part in (major, minor))
    return (int(major), int(minor)) if dot and known else None


OWN_VERSION = _version(SCHEMA) or (1, 0)
"""Version that this package writes."""


_DIGEST_SINCE = (1, 2)
"""First version that requires a digest."""


def minor_version(results: Results) -> int:
    """Return the x of `leakaudit.results/1.x`."""
    version = _version(results.schema_)
    return version[1] if version else OWN_VERSION[1]


def _same_keys(data: Any, read: Any) -> bool:
    """Return whether objects in the same place have the same keys."""
    if isinstance(data, dict):
        if not isinstance(read, dict) or data.keys() != read.keys():
            return False
        return all(_same_keys(value, read[key]) for key, value in data.items() if isinstance(value, dict | list))
    if not isinstance(read, list) or len(data) != len(read):
        return False
    return all(_same_keys(value, read[i]) for i, value in enumerate(data) if isinstance(value, dict | list))


def _unknown_keys(data: Any, read: Any, path: tuple[str | int, ...]) -> Iterator[str]:
    """Yield a sentence for each key of `data` that the models do not know.

    `read` is the same data as the models hold it.
    """
    if isinstance(data, dict) and isinstance(read, dict):
        for key, value in data.items():
            if key in read:
                yield from _unknown_keys(value, read[key], (*path, key))
                continue
            if (since := RENAMED_IN_SEQUENCES.get(key)) in read and since not in data:
                continue
            near = difflib.get_close_matches(key, read, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield f"unknown key {short(key)} {place(path)}{hint}"
    elif isinstance(data, list) and isinstance(read, list):
        for index, (value, understood) in enumerate(zip(data, read, strict=True)):
            yield from _unknown_keys(value, understood, (*path, index))


def _missing_keys(data: Any, read: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yield each key that the models write and `data` lacks, with its place.

    A reader would take the default for it, and a default may say that nothing is wrong.
    """
    if isinstance(data, dict) and isinstance(read, dict):
        for key, value in read.items():
            if key not in data:
                yield key, path
            else:
                yield from _missing_keys(data[key], value, (*path, key))
    elif isinstance(data, list) and isinstance(read, list):
        for index, (value, understood) in enumerate(zip(data, read, strict=True)):
            yield from _missing_keys(value, understood, (*path, index))


def digest_of(data: Mapping[str, Any]) -> str:
    """Return the digest of results in plain JSON data; their own digest is ignored.

    It is the SHA-256 of the JSON text with sorted keys, without spaces, in ASCII. A number without a fraction is written as a whole
    number, so that a tool that prints 1.0 as 1 does not change the digest.
    """
    content = {key: _canonical(value) for key, value in data.items() if key != "digest"}
    return f"sha256:{hashlib.sha256(canonical_text(content)).hexdigest()}"


def _canonical(value: Any) -> Any:
    kind = type(value)
    if kind is str or kind is int:  # most values; this spares them the tests below
        return value
    if isinstance(value, dict):
        return {key: _canonical(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_canonical(below) for below in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def with_digest(results: Results) -> Results:
    """Return `results` with their digest."""
    return results.model_copy(update={"digest": digest_of(results.model_dump(mode="json", by_alias=True))})


def to_json(results: Results) -> dict[str, Any]:
    """Return `results` as plain JSON data, with their digest.

    The digest is computed again from their content.
    """
    return with_digest(results).model_dump(mode="json", by_alias=True)
