"""Reads a policy from a commit of git.

So a change in the working folder cannot loosen it.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from leakaudit.config.yaml_document import MAX_BYTES, read_text
from leakaudit.errors import ConfigError
from leakaudit.files.git import GitError, git
from leakaudit.gate.policy import Policy, default_policy, parse_policy
from leakaudit.gate.waivers import Waivers, parse_waivers, waivers_file
from leakaudit.plugins.names import Names

POLICY = "leakaudit.policy.yaml"
"""File that is read from git if the caller names none. Our choice: what `leakaudit policy init` writes."""


@dataclass(frozen=True)
class PolicySource:
    """A commit of the repository around the working folder."""

    ref: str
    """Name that the caller gave, such as `origin/main`."""
    commit: str
    """Its id in hex."""

    @classmethod
    def at(cls, ref: str) -> PolicySource:
        """Find the commit that a ref names.

        Raises:
            ConfigError: the working folder is in no repository, or there is no such ref.
        """
        try:
            git(Path.cwd(), "rev-parse", "--git-dir")
        except GitError:
            raise ConfigError(
                f"--policy-ref {ref}: the working folder is in no git repository, or git is not installed"
            ) from None
        try:
            found = git(Path.cwd(), "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
        except GitError:
            raise ConfigError(
                f"--policy-ref {ref}: no such branch, tag or commit{_near(ref, _refs())}; in a shallow clone fetch it first"
            ) from None
        return cls(ref, found.decode("ascii").splitlines()[-1])

    def read(self, path: Path) -> str:
        """Return the text of a file in this commit.

        Args:
            path: as in the working folder.

        Raises:
            ConfigError: the path is outside the repository, or the commit has no such file, or it is no text of a usual size.
        """
        label, name = self.label(path), _in_repository(path)
        if name is None:
            raise ConfigError(f"{label}: is outside the repository of the working folder")
        try:
            if git(Path.cwd(), "cat-file", "-t", f"{self.commit}:{name}").strip() != b"blob":
                raise ConfigError(f"{label}: is a folder")
            if int(git(Path.cwd(), "cat-file", "-s", f"{self.commit}:{name}")) > MAX_BYTES:
                raise ConfigError(f"{label}: is larger than {MAX_BYTES} bytes")
            return git(Path.cwd(), "cat-file", "blob", f"{self.commit}:{name}").decode("utf-8-sig")
        except GitError:
            raise ConfigError(f"{label}: no such file in that commit{_near(name, self._files())}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{label}: is not UTF-8 text") from None

    def holds(self, path: Path) -> bool:
        """Return whether this commit has a file or a folder of that path."""
        name = _in_repository(path)
        if name is None:
            return False
        try:
            git(Path.cwd(), "cat-file", "-e", f"{self.commit}:{name}")
        except GitError:
            return False
        return True

    def label(self, path: Path) -> str:
        """Return how messages name a file of this commit."""
        return f"{self.ref}:{path}"

    def _files(self) -> list[str]:
        try:
            listed = git(Path.cwd(), "ls-tree", "-r", "-z", "--name-only", "--full-tree", self.commit)
        except GitError:
            return []
        return [name for name in os.fsdecode(listed).split("\0") if name.endswith((".yaml", ".yml"))]


@dataclass(frozen=True)
class PolicyFiles:
    """The files by which a run is judged, in the working folder or in a commit."""

    policy: Path | None = None
    """None for the built-in policy."""
    waivers: Path | None = None
    """None for no exceptions."""
    source: PolicySource | None = None
    """The commit that they are read from; None for the working folder."""

    @classmethod
    def of(cls, policy: Path | None, waivers: Path | None, ref: str | None) -> PolicyFiles:
        """Return the files that a caller names.

        Raises:
            ConfigError: the ref names no commit.
        """
        if ref is None:
            return cls(policy, waivers)
        return cls(policy or Path(POLICY), waivers, PolicySource.at(ref))

    def load_policy(self, names: Names | None = None) -> Policy:
        """Read the policy; see `gate.policy.load_policy`."""
        return default_policy() if self.policy is None else parse_policy(*self._text(self.policy), names)

    def load_waivers(self, policy: Policy) -> Waivers | None:
        """Read the waivers that hold for a policy; None if there are none.

        Raises:
            ConfigError: a file that is named cannot be read, or is wrong.
        """
        file = waivers_file(policy, self.policy, self.waivers)
        return None if file is None else parse_waivers(*self._text(file), policy)

    def waivers_text(self, policy: Policy) -> str | None:
        """Return the text of the waivers that hold for a policy; None if there are none.

        Raises:
            ConfigError: it cannot be read.
        """
        file = waivers_file(policy, self.policy, self.waivers)
        return None if file is None else self._text(file)[0]

    def policy_text(self) -> str | None:
        """Return the text of the policy; None for the built-in one.

        Raises:
            ConfigError: it cannot be read.
        """
        return None if self.policy is None else self._text(self.policy)[0]

    def _text(self, path: Path) -> tuple[str, str]:
        """Return the text of a file, and how messages name it."""
        if self.source is None:
            return read_text(path), str(path)
        return self.source.read(path), self.source.label(path)


def _in_repository(path: Path) -> str | None:
    """Return the path from the top of the repository; None if it is outside."""
    top = Path(os.fsdecode(git(Path.cwd(), "rev-parse", "--show-toplevel")).rstrip("\n"))
    # a link would lead out of the commit, so names are compared and not what they point to
    here = Path(os.path.normpath(Path.cwd() / path))
    for root in (top, top.resolve()):
        if here.is_relative_to(root):
            return here.relative_to(root).as_posix()
    return None


def _refs() -> list[str]:
    try:
        return os.fsdecode(git(Path.cwd(), "for-each-ref", "--format=%(refname:short)")).split()
    except GitError:
        return []


def _near(word: str, known: list[str]) -> str:
    """Return the nearest names, as the end of a sentence; empty if none is near."""
    close = difflib.get_close_matches(word, known, n=3)
    last = [name for name in known if name.rsplit("/", 1)[-1] == word.rsplit("/", 1)[-1]]
    near = list(dict.fromkeys([*last, *close]))[:3]
    return f"; did you mean {' or '.join(near)}?" if near else ""
