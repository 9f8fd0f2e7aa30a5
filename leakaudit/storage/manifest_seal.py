"""The digest of a manifest, in its last line.

The digests of the tensor files stand in `snapshot.json`; this one shows whether that file itself was changed by accident. It covers every
byte before the line, and the line has one form only, so no changed bit in the file is accepted.
"""

from __future__ import annotations

import hashlib

UNSEALED = tuple(f"leakaudit.snapshot/1.{minor}" for minor in range(4))
"""Schemas whose manifests have no digest. They are read, and a change in them is not noticed."""

_MARK, _END = b',\n "digest": "', b"\n}"


def sealed(manifest: bytes) -> bytes:
    """Return a manifest with its digest in the last line.

    Args:
        manifest: a JSON object as pydantic writes it with `indent=1`.
    """
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    return manifest.removesuffix(_END) + _MARK + digest.encode() + b'"' + _END + b"\n"


def unsealed(content: bytes) -> bytes | None:
    """Return the manifest in a file, or None if the file has no digest.

    Raises:
        ValueError: the file was changed after it was written.
    """
    manifest, mark, _ = content.rpartition(_MARK)
    if not mark:
        return None
    manifest += _END
    if sealed(manifest) != content:
        raise ValueError("its digest does not fit: it was changed after it was written")
    return manifest
