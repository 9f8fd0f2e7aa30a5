"""Files as git keeps them: `origin/main:policy.yaml`."""

from __future__ import annotations

import subprocess

from leakaudit.config.yaml_document import MAX_BYTES
from leakaudit.errors import ConfigError


def is_object(name: str) -> bool:
    """Return whether a name has the form REVISION:PATH.

    >>> is_object("origin/main:policy.yaml"), is_object("policy.yaml"), is_object("--x:y")
    (True, False, False)
    """
    revision, colon, path = name.partition(":")
    return bool(revision and colon and path) and not name.startswith("-")


def text_of(name: str) -> str:
    """Return the text of an object of git, such as `origin/main:policy.yaml`.

    The repository is that of the working folder. A path counts from its top; from the working folder if it starts with `./`.

    Raises:
        ConfigError: git is missing, or has no such object, or the object is no text of at most `MAX_BYTES`.
    """
    try:
        done = subprocess.run(["git", "cat-file", "blob", name], capture_output=True, check=False)
    except OSError:
        raise ConfigError(f"{name}: no such file, and git, which could know it as an object, cannot be run") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = said[-1].removeprefix("fatal: ") if said else f"exit {done.returncode}"
        raise ConfigError(f"{name}: no such file, and git has no such object ({reason})")
    if len(done.stdout) > MAX_BYTES:
        raise ConfigError(f"{name}: has more than {MAX_BYTES} bytes")
    try:
        return done.stdout.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: is not UTF-8 text") from None
