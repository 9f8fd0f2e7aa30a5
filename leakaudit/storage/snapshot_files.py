"""The files of a snapshot: private, hashed, and encrypted if configured.

Every file is new (O_EXCL), is never created through a link (O_NOFOLLOW), has mode 0600 with any umask, and is synced before the
snapshot gets its name. With recipients, no unencrypted byte reaches the disk, and the digest is computed over the encrypted bytes: with a
digest of the tensors, anyone who tries texts could confirm a short text.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from leakaudit.errors import SnapshotDamagedError
from leakaudit.files.private_files import create, write_all
from leakaudit.files.regular_files import open_regular
from leakaudit.files.strict_json import parse_json
from leakaudit.storage.digests import Digest
from leakaudit.storage.encryption import SUFFIX, decrypt, encrypt
from leakaudit.storage.safetensors_stream import MAX_HEADER_BYTES, MadeLater, TensorSink, TensorStream

MAX_DIMENSIONS = 64
"""Most dimensions of a tensor. PyTorch cannot index more."""


class _HashedFile:
    """A new private file that hashes its bytes while they are written."""

    def __init__(self, path: Path) -> None:
        self._descriptor = create(path)
        self._digest = Digest()

    def write(self, data: Any) -> int:
        left = memoryview(data)
        self._digest.update(left)
        write_all(self._descriptor, left)
        return len(data)

    def flush(self) -> None:
        """Do nothing: no bytes are buffered."""

    def close(self, *, sync: bool) -> str:
        try:
            if sync:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            digest = self._digest.finish()
        return digest


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | MadeLater], recipients: Sequence[str] = ()
) -> tuple[str, str]:
    """Write tensors to a new file.

    Args:
        path: path of the file; `.age` is added if there are recipients.
        tensors: dense tensors, which must not change until the file is written.
        recipients: public keys to which the file is encrypted; empty for no encryption.

    Returns:
        The file's name and the digest of its bytes.

    Raises:
        OSError: the file exists, or cannot be written.
        SnapshotError: the format does not have the dtype of a tensor.
        ConfigError: a public key is invalid.
    """
    stream = TensorStream(tensors)
    if recipients:
        path = path.with_name(path.name + SUFFIX)
    out, done = _HashedFile(path), False
    try:
        if recipients:
            encrypt(stream, out, recipients)
        else:
            for piece in stream.pieces():
                out.write(piece)
        done = True
    finally:
        digest = out.close(sync=done)
    return path.name, digest


def write_bytes(path: Path, content: bytes) -> None:
    """Write a new small file.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    out = _HashedFile(path)
    try:
        out.write(content)
    finally:
        out.close(sync=True)


def stored_name(folder: Path, name: str) -> str | None:
    """Return the name of a snapshot's file, encrypted or not; None if it is missing."""
    return next((found for found in (name, name + SUFFIX) if (folder / found).is_file()), None)


LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Error numbers of a file system without hard links, or with too many of them."""


@dataclass(frozen=True)
class Base:
    """A file of weights that several snapshots share."""

    path: Path
    digest: str
    names: frozenset[str]
    """Names of the parameters in it."""


def link_base(base: Base, folder: Path) -> str:
    """Put a shared file into a snapshot, as a hard link.

    If the file system has no links, the file is copied. The bytes of a linked file exist until the last snapshot with a link is removed,
    even if a snapshot's folder is moved on the same disk.

    Returns:
        The file's name.

    Raises:
        OSError: the shared file was removed, or the snapshot cannot be written.
    """
    target = folder / base.path.name
    try:
        os.link(base.path, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in LINKLESS:
            raise
        shutil.copyfile(base.path, target, follow_symlinks=False)
        target.chmod(0o600)
    return target.name


def read_tensors(path: Path, identities: Sequence[str] = (), recipients: Sequence[str] = ()) -> dict[str, Tensor]:
    """Read tensors; an encrypted file is decrypted into their memory in pieces.

    Args:
        path: path with the name that `stored_name` returns.
        identities: private keys.
        recipients: public keys to which it was encrypted, for messages.

    Raises:
        SnapshotSealedError: the file is encrypted and no key fits.
        SnapshotDamagedError: the file is not in the safetensors format, or was changed.
    """
    try:
        if path.suffix != SUFFIX:
            with open_regular(path) as file:
                _check_header(file, path)
            return load_file(path)
        return _decrypted(path, identities, recipients)
    except (SafetensorError, RuntimeError, OverflowError):
        raise SnapshotDamagedError(f"{path}: not readable as safetensors") from None


def _decrypted(path: Path, identities: Sequence[str], recipients: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of an encrypted file.

    Raises:
        SnapshotSealedError: no key fits.
        SnapshotDamagedError: the file was changed, or no snapshot has such a file.
    """
    sink = TensorSink(lambda head: _check_header(io.BytesIO(head), path), most=path.stat().st_size)
    try:
        with open_regular(path) as file:
            decrypt(file, sink, identities, str(path), recipients)
    except SnapshotDamagedError:
        if sink.failure is None:
            raise
    if isinstance(sink.failure, SnapshotDamagedError):
        raise sink.failure
    if sink.failure is not None or not sink.whole:
        raise SnapshotDamagedError(f"{path}: not readable as safetensors") from None
    return sink.tensors


def _check_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Return the header of a file after checking its length and dimensions.

    The check comes before tensors are created.

    Raises:
        SnapshotDamagedError: the header is too long, is not JSON, or has a tensor of too many dimensions.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise SnapshotDamagedError(
            f"{path}: its header of tensors is said to take {length} bytes; at most {MAX_HEADER_BYTES} are read"
        )
    try:
        header = parse_json(file.read(length))
        longest = max((len(entry.get("shape", ())) for entry in header.values()), default=0)
    except (ValueError, AttributeError, TypeError):
        raise SnapshotDamagedError(f"{path}: not readable as safetensors") from None
    if longest > MAX_DIMENSIONS:
        raise SnapshotDamagedError(f"{path}: holds a tensor of {longest} dimensions; at most {MAX_DIMENSIONS} are read")
    return dict(header)
