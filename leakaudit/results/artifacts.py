"""Artefacts of a release: files by their names and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from leakaudit.results.schema import Artifact

MOST_FILES = 1000
"""Most files of one artefact. Our choice: a sharded model of a trillion parameters has a few hundred."""


@dataclass(frozen=True)
class Found:
    """What was found where artefacts were looked for."""

    artifacts: tuple[Artifact, ...] = ()
    not_named: tuple[tuple[str, str], ...] = ()
    """Pairs of an artefact's name and why its digest is not known."""


def find_artifacts(paths: Iterable[Path], *, without: Path | None = None, since: float | None = None) -> Found:
    """Read files, and all files in folders, and return their names and digests.

    Args:
        paths: files or folders.
        without: a folder within them that is none of the artefacts, such as the audit's own.
        since: time in seconds since 1970; a file that was last written before it is named and not taken. None takes every file.
    """
    found: dict[Artifact, None] = {}
    lacking: list[tuple[str, str]] = []
    for path in paths:
        name = artifact_name(path)
        try:
            taken = [_taken(file, label, since) for file, label in files_of(path, without)]
        except ValueError as error:
            lacking.append((name, str(error)))
            continue
        except OSError as error:
            lacking.append((name, f"it cannot be read ({error.strerror or type(error).__name__})"))
            continue
        found |= dict.fromkeys(one for one in taken if isinstance(one, Artifact))
        lacking += [one for one in taken if isinstance(one, tuple)]
    return Found(tuple(found), tuple(lacking))


def artifact_of(path: Path, name: str = "") -> Artifact:
    """Read a file in pieces and return its name and digest.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # a name that is no UTF-8 cannot stand in a document
    shown = (name or artifact_name(path)).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return Artifact(name=shown, sha256=digest)


def artifact_name(path: Path) -> str:
    """Return the name under which outputs show an artefact.

    It is the path as the caller gave it. Of a path to another folder only the last part is named: the rest says who works on which machine.

    >>> artifact_name(Path("out/model.safetensors")), artifact_name(Path("/home/ann/out/model.safetensors"))
    ('out/model.safetensors', 'model.safetensors')
    """
    return path.name if path.is_absolute() or ".." in path.parts else path.as_posix()


def files_of(path: Path, without: Path | None = None) -> Iterator[tuple[Path, str]]:
    """Yield the files of an artefact, each with its name.

    That is the file itself, or every file in a folder, in the order of their names.

    Raises:
        ValueError: there is no such file, or too many; the message is a clause without a path.
    """
    name = artifact_name(path)
    if path.is_file():
        yield path, name
        return
    if not path.is_dir():
        raise ValueError("it is not there")
    skipped = None if without is None else without.resolve()
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and not _within(file, skipped)]
    if not files:
        raise ValueError("its folder has no file")
    if len(files) > MOST_FILES:
        raise ValueError(f"its folder has {len(files)} files, and at most {MOST_FILES} are read")
    for file in files:
        yield file, f"{name}/{file.relative_to(path).as_posix()}".removeprefix("./")


def _within(file: Path, folder: Path | None) -> bool:
    return folder is not None and file.resolve().is_relative_to(folder)


def _taken(file: Path, name: str, since: float | None) -> Artifact | tuple[str, str]:
    if since is not None and file.stat().st_mtime < since:
        return name, "it is older than the run, so the run did not make it"
    return artifact_of(file, name)
