"""Artefacts of a release: files that a verdict is attached to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Artifact:
    """A file that is released, such as the weights of a model."""

    name: str
    """Path as the caller gave it; the file's name alone where that path leaves the working folder."""
    sha256: str
    """SHA-256 of the content, in hex."""


def artifact_of(path: Path) -> Artifact:
    """Read a file and return its name and digest.

    A path to another folder is not named: it says who works on which machine.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Artifact(artifact_name(path), digest)


def artifact_name(path: Path) -> str:
    """Return the name under which outputs show an artefact.

    >>> artifact_name(Path("out/model.safetensors")), artifact_name(Path("/home/ann/out/model.safetensors"))
    ('out/model.safetensors', 'model.safetensors')
    """
    return path.name if path.is_absolute() or ".." in path.parts else path.as_posix()
