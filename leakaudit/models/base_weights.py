"""The weights that a training began with, by a digest or their name on a hub."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

MOST_BYTES = 4 * 10**9
"""Most bytes of weights that are read for their digest. Our choice: reading and hashing them takes a few seconds."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_REVISION = re.compile(r"[0-9a-f]{40}")


def base_of_config(config: Any) -> str:
    """Return the base model that a model's configuration names.

    It is `hub:NAME@REVISION` for a model of a hub, and the digest of the weights for a folder on this machine, whose name is private.

    Args:
        config: the configuration of a model of transformers; None for other models.

    Returns:
        The name; empty if the configuration names none, or one that is too large to be read.
    """
    name, revision = str(getattr(config, "_name_or_path", "") or ""), getattr(config, "_commit_hash", None)
    if not name:
        return ""
    if Path(name).is_dir():
        return base_of_folder(Path(name))
    if isinstance(revision, str) and _REVISION.fullmatch(revision) and _HUB_NAME.fullmatch(name):
        return f"hub:{name}@{revision}"
    return ""


def base_of_folder(folder: Path) -> str:
    """Return `sha256:` and the digest of the weights in a folder.

    It is empty without weights, or if they are too large.

    Of one file it is the file's SHA-256, of several the SHA-256 of the lines `DIGEST  NAME` that `sha256sum` prints of them in the order
    of their names.
    """
    try:
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        if not files or sum(file.stat().st_size for file in files) > MOST_BYTES:
            return ""
        lines = [(_digest(file), file.name) for file in files]
    except OSError:
        return ""
    if len(lines) == 1:
        return f"sha256:{lines[0][0]}"
    listing = "".join(f"{digest}  {name}\n" for digest, name in lines)
    return f"sha256:{hashlib.sha256(listing.encode()).hexdigest()}"


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
