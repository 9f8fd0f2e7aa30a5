"""Snapshots encrypted to public keys, in the age format.

A snapshot is encrypted to the owner's public keys. The trainer never has their private keys. If a side process attacks the snapshot
during the run, it is also encrypted to a key of the run. The trainer holds that key in memory and sends it to the side process through
a pipe. The key is never written to a disk and is lost when both processes have ended. After that, only the owner's key opens the files,
so the training machine cannot read the snapshots of earlier runs.

The library `pyrage` (MIT, bindings of rage, one compiled file of 2 MB) does the cryptography; the extra `encrypt` installs it. We use
its `encrypt_io`, because `encrypt` and `encrypt_file` hold the interpreter's lock all the time: for 100 MiB they stopped every other thread
for 0.28 s, `encrypt_io` for 0.009 s.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from leakaudit.errors import ConfigError, SnapshotDamagedError, SnapshotError, SnapshotSealedError
from leakaudit.files.private_files import create
from leakaudit.files.regular_files import read_regular

SUFFIX = ".age"
"""Suffix of the name of an encrypted file."""

IDENTITY_VARIABLE = "LEAKAUDIT_IDENTITY"
"""Environment variable with the path of the private key, for commands without `--identity`."""


@dataclass(frozen=True)
class EncryptionKeys:
    """The keys to which one run encrypts its snapshots."""

    recipients: tuple[str, ...]
    """Public keys: the owner's, and the key of the run if a side process reads the snapshots."""
    identity: str = field(default="", repr=False)
    """Private key of the run; empty if only the owner's keys open the snapshots."""

    @classmethod
    def of(cls, owners: Sequence[str], *, run_key: bool) -> EncryptionKeys:
        """Check the owner's keys, and make a key of the run if `run_key` is true.

        Raises:
            ConfigError: a key is invalid, or the extra is not installed.
        """
        parse_recipients(owners)
        if not run_key:
            return cls(tuple(owners))
        public, private = new_identity()
        return cls((*owners, public), private)


def _pyrage() -> Any:
    """Import and return the library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyrage
    except ImportError:
        raise ConfigError("encrypted snapshots need the package pyrage: pip install 'leakaudit[encrypt]'") from None
    return pyrage


def new_identity() -> tuple[str, str]:
    """Return a fresh public and private key.

    Raises:
        ConfigError: the extra is not installed.
    """
    identity = _pyrage().x25519.Identity.generate()
    return str(identity.to_public()), str(identity)


def parse_recipients(keys: Sequence[str]) -> list[Any]:
    """Read public keys.

    Raises:
        ConfigError: one of them is invalid.
    """
    pyrage = _pyrage()
    parsed = []
    for key in keys:
        try:
            parsed.append(pyrage.x25519.Recipient.from_str(key))
        except pyrage.RecipientError:
            raise ConfigError(
                f"encrypt_to: {key!r} is not an age public key (age1 and 58 more characters); "
                "`leakaudit snapshots keygen FILE` makes a pair and prints it"
            ) from None
    return parsed


def _parse_identities(keys: Iterable[str]) -> list[Any]:
    pyrage = _pyrage()
    parsed = []
    for key in keys:
        try:
            parsed.append(pyrage.x25519.Identity.from_str(key))
        except pyrage.IdentityError:
            raise ConfigError("not an age private key: expected a line starting with AGE-SECRET-KEY-1") from None
    return parsed


def write_identity(path: Path) -> str:
    """Write a fresh private key to a new file that only its owner can read (0600).

    Returns:
        The public key.

    Raises:
        ConfigError: the file exists or cannot be written, or the extra is not installed.
    """
    public, private = new_identity()
    try:
        with os.fdopen(create(path), "w", encoding="ascii") as file:
            file.write(f"# public key: {public}\n{private}\n")
    except FileExistsError:
        raise ConfigError(f"{path}: exists, and a private key is never overwritten; give another name") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
    return public


def read_identities(path: Path) -> tuple[str, ...]:
    """Read private keys from a file with one key per line.

    The file has the format of age-keygen; `#` begins a comment.

    Raises:
        ConfigError: the file is missing, readable by others, or holds no private key. No message quotes a line of it.
    """
    try:
        mode = path.stat().st_mode
        text = read_regular(path).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a private key ({type(error).__name__})") from None
    if mode & 0o077:
        raise ConfigError(f"{path}: others can read this private key (mode {mode & 0o777:o}); chmod 600 it first")
    return identities_in(text, str(path))


def identities_in(text: str, source: str) -> tuple[str, ...]:
    """Return the private keys in a text.

    Raises:
        ConfigError: there is no key, or a line is something else.
    """
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{source}: holds no private key: expected a line starting with AGE-SECRET-KEY-1")
    try:
        _parse_identities(keys)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return keys


def encrypt(source: io.RawIOBase, target: Any, recipients: Sequence[str]) -> None:
    """Encrypt a stream to public keys, piece by piece.

    Args:
        source: stream that is read to its end.
        target: object with `write` and `flush`.
        recipients: public keys.

    Raises:
        OSError: the target cannot be written.
        ConfigError: a key is invalid.
    """
    pyrage = _pyrage()
    guarded = _GuardedTarget(target)
    try:
        pyrage.encrypt_io(source, guarded, parse_recipients(recipients))
    except (pyrage.EncryptError, OSError) as error:
        if guarded.failure is not None:
            raise guarded.failure from None  # the library turns our exception into text, without its error number
        raise SnapshotError(f"encryption failed: {type(error).__name__}") from None


class _GuardedTarget:
    """Target that forwards writes and remembers the first exception."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.failure: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return int(self._target.write(data))
        except OSError as error:
            self.failure = self.failure or error
            raise

    def flush(self) -> None:
        try:
            self._target.flush()
        except OSError as error:
            self.failure = self.failure or error
            raise


def decrypt(
    source: BinaryIO, target: Any, identities: Sequence[str], name: str, recipients: Sequence[str] = ()
) -> None:
    """Decrypt a file, piece by piece, in memory only.

    Args:
        source: the encrypted file.
        target: object in memory with `write` and `flush`.
        identities: private keys; one of them must fit.
        name: name of the file, for messages.
        recipients: public keys to which it was encrypted, for messages.

    Raises:
        SnapshotSealedError: no key was given, or none fits.
        SnapshotDamagedError: the file was changed or cut short.
    """
    wanted = f" to {' or '.join(recipients)}" if recipients else ""
    if not identities:
        raise SnapshotSealedError(
            f"{name}: is encrypted{wanted}; give the private key with --identity FILE or {IDENTITY_VARIABLE}"
        )
    pyrage = _pyrage()
    try:
        pyrage.decrypt_io(source, target, _parse_identities(identities))
    except pyrage.DecryptError as error:
        if "matching" in str(error):
            raise SnapshotSealedError(
                f"{name}: is encrypted{wanted}; the private key given is not one of these"
            ) from None
        raise SnapshotDamagedError(f"{name}: cannot be decrypted: truncated or changed") from None
    except OSError as error:
        if error.errno is not None:
            raise
        # The library raised it, not the disk: a piece does not fit its tag, or the stream ends too early.
        raise SnapshotDamagedError(f"{name}: cannot be decrypted: truncated or changed") from None
