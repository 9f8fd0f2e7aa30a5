"""The history: one small JSON file for each night, written once.

    <folder>/2026-11-25T0000Z.json        the record of a night (`leakaudit.night/1.x`)
    <folder>/2026-11-25T0000Z.gap1.json   a start of it that gave no results; a later start may still give some
    <folder>/key                          key of the marks (0600); without it a later night cannot find repeated steps

Any program can read the records: each file is one JSON object on one line, so that `cat *.json` gives JSON lines.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from leakaudit.errors import ResultsError
from leakaudit.files.private_files import create, write_all, write_atomic
from leakaudit.files.regular_files import read_regular
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.history.record import NIGHT_PATTERN, SCHEMA, NightRecord

HISTORY, NIGHTS = "history", "nights"
"""Folders within that of the nights: one record for each night, and the results and reports."""

KEY = "key"
"""File with the key of the marks, in hex."""

MOST_BYTES = 1_000_000
"""Largest file that is read as a record. Our choice: a night of a thousand steps takes 30 kB."""

_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,40}")
_FORM = re.compile(NIGHT_PATTERN.removesuffix("$") + r"(\.gap[1-9]\d{0,3})?$")


@dataclass(frozen=True)
class Unreadable:
    """A file of the history that cannot be used."""

    night: str
    """The night that the file's name gives."""
    problem: str
    """What is wrong with it, and what to do."""


@dataclass(frozen=True)
class History:
    """The records of all nights in a folder."""

    folder: Path
    records: tuple[NightRecord, ...] = ()
    """The record of every night, earliest first; that of the last start where no start gave results."""
    unreadable: tuple[Unreadable, ...] = ()
    """Files that cannot be read. They are never removed or overwritten."""

    @classmethod
    def load(cls, folder: Path) -> History:
        """Read the history in a folder.

        A folder that does not exist is an empty history. A file that cannot be read, or that a newer version wrote, is listed and stays.

        Raises:
            ResultsError: the folder cannot be read.
        """
        found: dict[str, NightRecord] = {}
        problems = []
        try:
            names = sorted(path for path in folder.iterdir() if path.suffix == ".json" and _FORM.match(path.stem))
        except FileNotFoundError:
            return cls(folder)
        except OSError as error:
            raise ResultsError(f"{folder}: the history cannot be read ({error.strerror})") from None
        for path in names:
            try:
                record = _read(path)
            except ResultsError as error:
                problems.append(Unreadable(_night_of(path), str(error)))
                continue
            if record.status == "audited" or record.night not in found or found[record.night].status == "gap":
                found[record.night] = record
        return cls(folder, tuple(found[night] for night in sorted(found)), tuple(problems))

    def of(self, night: str) -> NightRecord | None:
        """Return the record of a night; None if it has none."""
        return next((record for record in self.records if record.night == night), None)

    def unreadable_of(self, night: str) -> str:
        """Return what is wrong with the file of a night; empty if nothing is."""
        return next((bad.problem for bad in self.unreadable if bad.night == night), "")

    @property
    def last(self) -> NightRecord | None:
        """The latest night; None if there is none."""
        return self.records[-1] if self.records else None

    @cached_property
    def units(self) -> frozenset[str]:
        """The marks of all audited steps so far."""
        return frozenset(mark for record in self.records for mark in record.units)

    def append(self, record: NightRecord) -> History:
        """Write the record of a night and return the history with it.

        The file appears as a whole or not at all. The caller holds the lock of the nights, so that no other process writes the same one.

        Raises:
            ResultsError: the night has a file, or the file cannot be written.
        """
        path = self.folder / f"{record.night}.json"
        gap, number = record.status == "gap", 1
        while gap and path.with_suffix(f".gap{number}.json").exists():
            number += 1
        path = path.with_suffix(f".gap{number}.json") if gap else path
        if path.exists():
            raise ResultsError(f"{path}: exists; a night is recorded once, and its record is never changed")
        line = json.dumps(record.model_dump(mode="json", by_alias=True)) + "\n"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, line)
        except OSError as error:
            raise ResultsError(
                f"{path}: the record of the night cannot be written ({error.strerror}); its results stay, and the same command "
                "records them when there is room"
            ) from None
        return History.load(self.folder)

    def key(self) -> bytes:
        """Return the key of the marks; the first call creates it.

        Raises:
            ResultsError: it cannot be read or written.
        """
        path = self.folder / KEY
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                descriptor = create(path)
            except FileExistsError:
                return bytes.fromhex(read_regular(path).decode("ascii"))
            try:
                key = secrets.token_bytes(32)
                write_all(descriptor, key.hex().encode())
                return key
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise ResultsError(
                f"{path}: the key of the history cannot be used ({type(error).__name__}); remove the file, and the next night makes "
                "another key: it then cannot find steps that earlier nights had"
            ) from None


def _read(path: Path) -> NightRecord:
    """Read one record.

    Raises:
        ResultsError: the message says what is wrong and what to do.
    """
    remedy = "the file stays; move it aside if the night does not matter"
    try:
        data = parse_json(read_bounded(path, MOST_BYTES))
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except ValueError as error:
        raise ResultsError(f"{path}: {error}; {remedy}") from None
    schema = data.get("schema", "") if isinstance(data, dict) else ""
    known = SCHEMA.rpartition(".")[0]
    if isinstance(schema, str) and schema.startswith("leakaudit.night/") and not schema.startswith(f"{known}."):
        raise ResultsError(
            f"{path}: a newer leakaudit wrote it ({schema[:40]}{_writer(data)}); update this one to read it: "
            "`python -m pip install --upgrade leakaudit`"
        )
    try:
        record = NightRecord.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ResultsError(f"{path}: does not fit {SCHEMA}: {where}: {first['msg']}; {remedy}") from None
    if record.night != _night_of(path):
        raise ResultsError(f"{path}: is the record of {record.night}; {remedy}")
    return record


def _writer(data: dict[str, Any]) -> str:
    """Return which version of leakaudit wrote a record; empty if it does not say it."""
    tool = data.get("tool")
    return f", leakaudit {tool}" if isinstance(tool, str) and _VERSION.fullmatch(tool) else ""


def _night_of(path: Path) -> str:
    return path.name.partition(".")[0]
