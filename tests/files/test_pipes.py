"""A pipe or a device in place of a file holds nobody up."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leakaudit.audit.state import is_finished, unfinished
from leakaudit.errors import LeakAuditError
from leakaudit.files.json_lines import numbered_lines
from leakaudit.files.private_files import append_line, create, open_to_append, open_to_lock
from leakaudit.files.regular_files import open_regular, read_regular
from leakaudit.files.strict_json import read_bounded
from leakaudit.results.files import load_results
from leakaudit.results.journal import load_journal
from leakaudit.storage.digests import digest_of
from leakaudit.storage.encryption import read_identities
from leakaudit.storage.snapshot_files import read_tensors

pytestmark = [
    pytest.mark.timeout(20),
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names"),
]

FILES: dict[str, Callable[[Path], Any]] = {
    "read_regular": read_regular,
    "open_regular": open_regular,
    "read_bounded": read_bounded,
    "open_to_append": open_to_append,
    "open_to_lock": open_to_lock,
    "create": create,
    "append_line": lambda path: append_line(path, "one"),
    "digest_of": digest_of,
    "load_results": load_results,
    "load_journal": load_journal,
    "numbered_lines": lambda path: list(numbered_lines(path)),
    "read_identities": read_identities,
    "read_tensors": read_tensors,
}
"""Name -> a function that opens the file of a path."""


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """Nobody is at its other end."""
    os.mkfifo(tmp_path / "file")
    with pytest.raises((OSError, ValueError, LeakAuditError)):
        FILES[name](tmp_path / "file")


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"create"}))
def test_a_device_without_an_end_is_refused_at_once(name: str) -> None:
    """It is neither read nor written."""
    with pytest.raises((OSError, ValueError, LeakAuditError)):
        FILES[name](Path("/dev/zero"))


def test_a_folder_whose_state_is_a_pipe_has_no_audit(tmp_path: Path) -> None:
    """The answer is the same as for a file that cannot be read."""
    os.mkfifo(tmp_path / "state.json")
    assert unfinished(tmp_path) is None
    assert not is_finished(tmp_path)
