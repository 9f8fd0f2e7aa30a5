"""Private files: owner only, no link followed, written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from leakaudit.files.private_files import append_line, create, open_to_append, open_to_lock, write_atomic


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_every_new_file_is_for_its_owner_only(tmp_path: Path, umask: int) -> None:
    """A umask that allows everything opens no file to others."""
    before = os.umask(umask)
    try:
        os.close(create(tmp_path / "created"))
        os.close(open_to_lock(tmp_path / "locked"))
        append_line(tmp_path / "appended", "one")
        write_atomic(tmp_path / "written", "text")
    finally:
        os.umask(before)
    assert {path.name: _mode(path) for path in tmp_path.iterdir()} == dict.fromkeys(
        ["created", "locked", "appended", "written"], 0o600
    )


@pytest.mark.parametrize("opens", [create, open_to_append, open_to_lock])
def test_a_link_is_not_followed(tmp_path: Path, opens: Callable[[Path], int]) -> None:
    """Somebody who may write to the folder cannot point our file at another one."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("as it was")
    link.symlink_to(target)
    with pytest.raises(OSError, match=r"link|exists"):
        opens(link)
    assert target.read_text() == "as it was"


def _others_read(path: Path) -> None:
    path.chmod(0o640)


def _second_name(path: Path) -> None:
    path.with_name("second").hardlink_to(path)


@pytest.mark.parametrize("harm", [_others_read, _second_name])
def test_nothing_is_appended_to_a_file_that_others_can_read(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """Somebody may have made it before us, to get what we write."""
    append_line(tmp_path / "journal.jsonl", "one")
    harm(tmp_path / "journal.jsonl")
    with pytest.raises(PermissionError, match=r"others own journal.jsonl, or can read or write it: remove it"):
        append_line(tmp_path / "journal.jsonl", "private")
    assert (tmp_path / "journal.jsonl").read_text() == "one\n"


def test_nothing_is_appended_to_a_file_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its mode lets us."""
    append_line(tmp_path / "log", "one")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="others own log"):
        open_to_append(tmp_path / "log")


def test_write_atomic_replaces_a_link_and_leaves_its_target(tmp_path: Path) -> None:
    """The name holds the new text, and the file that it pointed to is as it was."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("as it was")
    link.symlink_to(target)
    write_atomic(link, "new")
    assert (target.read_text(), link.read_text(), link.is_symlink()) == ("as it was", "new", False)


def test_create_refuses_a_file_that_exists(tmp_path: Path) -> None:
    """A new file is new."""
    os.close(create(tmp_path / "key"))
    with pytest.raises(FileExistsError):
        create(tmp_path / "key")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary file is removed."""
    write_atomic(tmp_path / "results.json", "old")
    monkeypatch.setattr(os, "fsync", _full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "results.json", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("results.json", "old")]


def test_lines_are_appended_in_order(tmp_path: Path) -> None:
    """Each line ends with one line feed."""
    append_line(tmp_path / "log", "one")
    append_line(tmp_path / "log", "two", sync=False)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_disk_that_takes_less_than_it_is_given_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`os.write` may write a part of the line."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data[:3])))
    append_line(tmp_path / "log", "a line of some length")
    assert (tmp_path / "log").read_text() == "a line of some length\n"


def test_a_line_for_which_the_disk_has_no_room_is_not_written_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file ends with the line before."""
    append_line(tmp_path / "log", "one")
    monkeypatch.setattr(os, "fsync", _full_disk)
    with pytest.raises(OSError, match="No space left"):
        append_line(tmp_path / "log", "two")
    assert (tmp_path / "log").read_text() == "one\n"


def _full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
