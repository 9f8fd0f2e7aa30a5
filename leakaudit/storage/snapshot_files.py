"""The files of a snapshot on the disk: created for their owner only, hashed on the way, encrypted where that is asked for.

Every file is created anew (O_EXCL), never through a link (O_NOFOLLOW), with mode 0600 whatever the umask, and synced before the
snapshot gets its name. With recipients nothing in clear touches the disk; the digest is that of the encrypted bytes, because that of
a short text's tensors could be guessed by trying texts.
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
from leakaudit.files.strict_json import parse_json
from leakaudit.storage import encryption as sealing
from leakaudit.storage.digests import TreeDigest
from leakaudit.storage.safetensors_stream import MAX_HEADER_BYTES, TensorSink, TensorStream

MAX_DIMENSIONS = 64
"""Of one tensor: what PyTorch itself can index."""


class _Hashing:
    """Writes to a file that was created here, and hashes what it writes."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        self._descriptor = os.open(path, flags, 0o600)
        os.fchmod(self._descriptor, 0o600)  # a umask may have taken more away than it should
        self._digest = TreeDigest()

    def write(self, data: Any) -> int:
        left = memoryview(data)
        self._digest.update(left)
        while len(left):
            left = left[os.write(self._descriptor, left) :]
        return len(data)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def close(self, *, sync: bool) -> str:
        try:
            if sync:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            digest = self._digest.finish()
        return digest


def write_tensors(path: Path, tensors: Mapping[str, Tensor], recipients: Sequence[str] = ()) -> tuple[str, str]:
    """Write tensors to a new file.

    Args:
        path: where; `.age` is added to it if there are recipients.
        tensors: dense; they must not change meanwhile.
        recipients: public keys to encrypt to; none to leave it in clear.

    Returns:
        The file's name and the digest of its bytes.

    Raises:
        OSError: it exists, or cannot be written.
        SnapshotError: a tensor is of a type that the format does not know.
        ConfigError: a public key is none.
    """
    stream = TensorStream(tensors)
    if recipients:
        path = path.with_name(path.name + sealing.SUFFIX)
    out, done = _Hashing(path), False
    try:
        if recipients:
            sealing.encrypt(stream, out, recipients)
        else:
            for piece in stream.pieces():
                out.write(piece)
        done = True
    finally:
        digest = out.close(sync=done)
    return path.name, digest


def write_text(path: Path, text: str) -> None:
    """Write a new small file.

    Raises:
        OSError: it exists, or cannot be written.
    """
    out = _Hashing(path)
    try:
        out.write(text.encode())
    finally:
        out.close(sync=True)


def stored_name(folder: Path, name: str) -> str | None:
    """Return the name under which a file of a snapshot is there, encrypted or not; None if it is missing."""
    return next((found for found in (name, name + sealing.SUFFIX) if (folder / found).is_file()), None)


LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""What a file system answers that has no hard links, or no more of them."""


@dataclass(frozen=True)
class Base:
    """A file of weights that several snapshots have in common."""

    path: Path
    digest: str
    names: frozenset[str]
    """Of the parameters in it."""


def link_base(base: Base, folder: Path) -> str:
    """Put a common file into a snapshot.

    It is a hard link, or a copy if the file system has none.

    A link keeps the bytes for as long as one snapshot has them, wherever its folder is moved on the same disk.

    Returns:
        The file's name.

    Raises:
        OSError: it is gone, or cannot be written.
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
    """Read tensors, a piece at a time.

    An encrypted file is decrypted into their memory.

    Args:
        path: as `stored_name` found it.
        identities: private keys.
        recipients: whom it was encrypted to, for messages.

    Raises:
        SnapshotSealedError: it is encrypted and no key fits.
        SnapshotDamagedError: it is no such file, or was changed.
    """
    try:
        if path.suffix != sealing.SUFFIX:
            with path.open("rb") as file:
                _check_header(file, path)
            return load_file(path)
        return _opened(path, identities, recipients)
    except (SafetensorError, RuntimeError, OverflowError):
        raise SnapshotDamagedError(f"{path}: not readable as safetensors") from None


def _opened(path: Path, identities: Sequence[str], recipients: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of an encrypted file.

    Raises:
        SnapshotSealedError: no key fits.
        SnapshotDamagedError: it was changed, or is none of ours.
    """
    sink = TensorSink(lambda head: _check_header(io.BytesIO(head), path), most=path.stat().st_size)
    try:
        with path.open("rb") as file:
            sealing.decrypt(file, sink, identities, str(path), recipients)
    except SnapshotDamagedError:
        if sink.failure is None:
            raise
    if isinstance(sink.failure, SnapshotDamagedError):
        raise sink.failure
    if sink.failure is not None or not sink.whole:
        raise SnapshotDamagedError(f"{path}: not readable as safetensors") from None
    return sink.tensors


def _check_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Return a header, unless it describes more than a file can hold.

    This is checked before tensors are made of it.

    Raises:
        SnapshotDamagedError: too long, no JSON, or a tensor of too many dimensions.
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
