"""The spool: private, bounded, and safe to kill at any moment on either side."""

from __future__ import annotations

import gc
import grp
import json
import os
import pwd
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leakaudit.config.audit import AuditConfig
from leakaudit.errors import SpoolError
from leakaudit.results.binding import SUBJECT
from leakaudit.results.not_audited import NOT_AUDITED
from leakaudit.results.schema import Overhead
from leakaudit.storage.parent_watch import ORPHANED
from leakaudit.storage.run_folders import RunFolder, allocate_run_folder, archive_previous
from leakaudit.storage.snapshot_queue import MAX_CRASHES
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import HOLD, LEFT_BY_AUDIT, Totals
from tests.support import tiny

ROOT = Path(__file__).parents[2]


def make(folder: Path, **more: Any) -> Spool:
    """Return a fresh spool."""
    config = AuditConfig(out_dir=folder / "audit", **more)
    return Spool.create(folder / "audit" / "spool", config, tiny.bert_tokenizer(), "python train.py")


def put(spool: Spool, step: int, suffix: str = ".ready") -> Path:
    """Put something that looks like a snapshot into it."""
    folder = spool.snapshot_folder(step).with_suffix(suffix)
    folder.mkdir()
    (folder / "snapshot.json").write_text("{}")
    return folder


def names(spool: Spool) -> list[str]:
    """Return the snapshots in it."""
    return sorted(path.name for path in spool.root.iterdir() if path.name[0].isdigit())


def test_a_spool_is_private_and_holds_what_a_worker_needs(tmp_path: Path) -> None:
    """Folders are 0700, files 0600, and version control ignores them."""
    before = os.umask(0)
    try:
        spool = make(tmp_path, every_n_steps=7)
    finally:
        os.umask(before)
    assert (tmp_path / "audit").stat().st_mode & 0o777 == 0o700
    assert spool.root.stat().st_mode & 0o777 == 0o700
    assert (spool.root / "audit.json").stat().st_mode & 0o777 == 0o600
    assert (spool.root / ".gitignore").read_text() == "*\n"
    again, audit = Spool.open(spool.root)
    assert again.root == spool.root
    assert (audit.config.every_n_steps, audit.command, audit.trainer_pid) == (7, "python train.py", os.getpid())
    assert (spool.root / "tokenizer" / "tokenizer.json").is_file()


def test_a_spool_with_something_in_it_is_refused(tmp_path: Path) -> None:
    """Two runs never share one."""
    make(tmp_path)
    with pytest.raises(SpoolError, match="is not empty; give another `out_dir`"):
        make(tmp_path)


def test_a_spool_is_not_made_through_a_link(tmp_path: Path) -> None:
    """Somebody else may have put it there."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "spool").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpoolError, match="is a link; snapshots hold private text"):
        make(tmp_path)


def test_a_spool_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the owner of its folder."""
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(SpoolError, match="not to you; give a folder of your own"):
        make(tmp_path)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_others_can_write_to_is_refused_before_anything_is_made_in_it(tmp_path: Path, mode: int) -> None:
    """The message has the command that repairs it, and it does."""
    folder = tmp_path / "audit"
    folder.mkdir()
    (folder / "journal.jsonl").touch()
    folder.chmod(mode)
    config = AuditConfig(out_dir=folder)
    with pytest.raises(
        SpoolError, match=rf"others can write to it \(mode {mode:o}\).* run `(chmod go-w .*/audit)`"
    ) as refused:
        allocate_run_folder(folder, config, tiny.bert_tokenizer())
    assert [path.name for path in tmp_path.rglob("*")] == ["audit", "journal.jsonl"]
    subprocess.run(re.findall("`(chmod.*?)`", str(refused.value))[0], shell=True, check=True)
    assert allocate_run_folder(folder, config, tiny.bert_tokenizer())[0].root == folder / "spool"


@pytest.mark.parametrize("members", [[], ["colleague"]])
def test_a_group_may_write_if_nobody_else_is_in_it(
    tmp_path: Path, members: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many systems give each user a group with the user's name."""
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit").chmod(0o775)
    name = pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(grp, "getgrgid", lambda number: SimpleNamespace(gr_name=name, gr_mem=members))
    with pytest.raises(SpoolError, match="others can write to it") if members else nullcontext():
        make(tmp_path)


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_folder_that_others_can_read_is_used(tmp_path: Path, mode: int) -> None:
    """Such as the current one: our own files in it are private."""
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit").chmod(mode)
    assert make(tmp_path).root.is_dir()


def test_a_folder_of_somebody_else_is_refused_before_anything_is_made_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could replace every file in it."""
    (tmp_path / "audit").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(SpoolError, match=r"audit: belongs to user .* not to you; give a folder of your own"):
        make(tmp_path)
    assert not list((tmp_path / "audit").iterdir())


def test_a_folder_that_cannot_be_made_is_said_to_be_one(tmp_path: Path) -> None:
    """Here a file is in the way."""
    (tmp_path / "audit").write_text("in the way")
    with pytest.raises(SpoolError, match=r"cannot be written \(.+\); set `out_dir`"):
        make(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is no spool"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"schema": "leakaudit.audit/2.0"}', "Upgrade leakaudit"),
        ('{"schema": "leakaudit.audit/1.0"}', "cannot be read"),
    ],
)
def test_what_is_no_spool_is_not_opened(tmp_path: Path, text: str | None, message: str) -> None:
    """The message says what was looked for."""
    if text is not None:
        (tmp_path / "audit.json").write_text(text)
    with pytest.raises(SpoolError, match=message):
        Spool.open(tmp_path)


def test_snapshots_wait_in_a_queue(tmp_path: Path) -> None:
    """The oldest is attacked first; those behind it wait."""
    spool = make(tmp_path)
    put(spool, 3), put(spool, 20), put(spool, 100)
    claimed = spool.queue.claim()
    assert claimed is not None and claimed.name == "000003.run"
    assert names(spool) == ["000003.run", "000020.ready", "000100.ready"] and spool.waiting() == 3
    spool.queue.discard_or_keep(claimed, keep=False)
    assert spool.waiting() == 2


def test_a_file_that_a_killed_process_was_writing_is_no_snapshot(tmp_path: Path) -> None:
    """It would be listed, counted, and keep an empty spool."""
    spool = make(tmp_path)
    put(spool, 3)
    (spool.root / ".settled.json.4139.tmp").write_text("{")
    assert [path.name for path in spool.entries()] == ["000003.ready"]


@pytest.mark.parametrize("schedule", ["beside", "deferred"])
def test_snapshots_queue_up_to_a_limit_of_bytes(tmp_path: Path, schedule: str) -> None:
    """The message says how much is taken and what to change."""
    spool = make(tmp_path, schedule=schedule, max_spool_gb=2e-6)
    put(spool, 3)
    (put(spool, 4, ".kept") / "truth.safetensors").write_bytes(b"x" * 1500)
    assert spool.used_bytes() == 1504
    assert spool.lacks(400) == ""
    assert spool.lacks(600).endswith("MB are taken (`max_spool_gb`)")
    assert "MB of free disk" in spool.lacks(spool.free_bytes() + 10**9)


def test_a_held_snapshot_is_not_removed_by_the_worker(tmp_path: Path) -> None:
    """Neither after its audit nor when it cannot be audited."""
    spool = make(tmp_path)
    for step in (1, 2, 3):
        put(spool, step)
    for step in (1, 2):
        (spool.snapshot_folder(step) / HOLD).write_text("{}")
    spool.queue.discard_or_keep(spool.queue.claim() or tmp_path, keep=False)
    spool.queue.set_aside(spool.queue.claim() or tmp_path, keep=False)
    spool.queue.discard_or_keep(spool.queue.claim() or tmp_path, keep=False)
    assert names(spool) == ["000001.kept", "000002.bad"]


def test_the_oldest_snapshot_is_taken_first(tmp_path: Path) -> None:
    """Also beyond a million steps."""
    spool = make(tmp_path)
    for step in (1_000_000, 999_999, 20, 3):
        put(spool, step)
    found = [spool.queue.claim() for _ in range(5)]
    assert [path.stem for path in found if path] == ["000003", "000020", "999999", "1000000"]
    assert found[-1] is None


def test_snapshots_are_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    """Audited ones and refused ones, under other names; neither is in flight."""
    spool = make(tmp_path)
    put(spool, 1), put(spool, 2)
    spool.queue.discard_or_keep(spool.queue.claim() or tmp_path, keep=True)
    spool.queue.set_aside(spool.queue.claim() or tmp_path, keep=True)
    assert names(spool) == ["000001.kept", "000002.bad"]
    assert spool.waiting() == 0


def test_refused_snapshots_are_removed_otherwise(tmp_path: Path) -> None:
    """They hold the private batch."""
    spool = make(tmp_path)
    put(spool, 1)
    spool.queue.set_aside(spool.queue.claim() or tmp_path, keep=False)
    assert names(spool) == []


def test_a_snapshot_can_be_given_back(tmp_path: Path) -> None:
    """By a worker that stops; one that is gone already is not missed."""
    spool = make(tmp_path)
    put(spool, 1)
    claimed = spool.queue.claim()
    assert claimed is not None
    spool.queue.give_back(claimed)
    assert names(spool) == ["000001.ready"]
    spool.queue.give_back(claimed)
    spool.queue.discard_or_keep(claimed, keep=True)
    assert names(spool) == ["000001.ready"]


def test_what_a_dead_worker_had_claimed_is_put_back(tmp_path: Path) -> None:
    """Until it has cost too many workers: then the others get their turn."""
    spool = make(tmp_path)
    put(spool, 1)
    for _ in range(MAX_CRASHES - 1):
        assert spool.queue.claim() is not None
        with spool.worker_lock():
            assert names(spool) == ["000001.ready"]
    assert spool.queue.claim() is not None
    with spool.worker_lock():
        assert [path.name for path in spool.queue.poisonous()] == ["000001.bad"]
        assert spool.waiting() == 0


def test_a_snapshot_over_which_a_worker_died_comes_after_all_others(tmp_path: Path) -> None:
    """A second death costs it, and the cause may go away meanwhile."""
    spool = make(tmp_path)
    put(spool, 1)
    assert spool.queue.claim() is not None
    with spool.worker_lock():
        put(spool, 2), put(spool, 3)
        found = [spool.queue.claim(last=lambda path: path.stem == "000002") for _ in range(4)]
    assert [path and path.stem for path in found] == ["000003", "000002", "000001", None]


def test_a_worker_that_went_with_its_trainer_is_not_held_against_the_snapshot(tmp_path: Path) -> None:
    """However often that happens."""
    spool = make(tmp_path)
    put(spool, 1)
    for _ in range(2 * MAX_CRASHES):
        assert spool.queue.claim() is not None
        (spool.root / ORPHANED).touch()
        with spool.worker_lock():
            assert names(spool) == ["000001.ready"]
    assert spool.queue.poisonous() == []


def test_there_is_one_worker_at_a_time(tmp_path: Path) -> None:
    """A second one is refused, and can be asked for."""
    spool = make(tmp_path)
    assert not spool.attended()
    with spool.worker_lock():
        assert spool.attended()
        with pytest.raises(SpoolError, match="another worker is at work on it"), spool.worker_lock():
            pass
    assert not spool.attended()


def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    """Even with SIGKILL."""
    spool = make(tmp_path)
    code = (
        "import sys, pathlib, os, signal\nfrom leakaudit.storage.spool import Spool\n"
        "with Spool(pathlib.Path(sys.argv[1])).worker_lock():\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(spool.root)], timeout=60, check=False)
    assert ended.returncode == -9
    with spool.worker_lock():
        pass


def test_totals_reach_the_worker(tmp_path: Path) -> None:
    """None until the trainer has finished; empty where the file is broken."""
    spool = make(tmp_path)
    assert spool.totals() is None
    totals = Totals(total_steps=9, kept=2, skipped=1, overhead=Overhead(blocked_s=0.5, training_s=8.0))
    spool.finish(totals)
    assert spool.totals() == totals
    assert (spool.root / "finished.json").stat().st_mode & 0o777 == 0o600
    (spool.root / "finished.json").write_text("{")
    assert spool.totals() == Totals()


def test_a_removed_spool_is_noticed(tmp_path: Path) -> None:
    """And asking it anything raises nothing."""
    spool = make(tmp_path)
    assert not spool.gone()
    spool.discard()
    assert spool.gone() and spool.waiting() == 0 and not spool.attended()
    assert spool.queue.claim() is None
    assert not (tmp_path / "audit").exists()


def test_discarding_a_spool_leaves_other_files_alone(tmp_path: Path) -> None:
    """The audit's folder may hold more than ours."""
    spool = make(tmp_path)
    (tmp_path / "audit" / "mine.txt").write_text("x")
    spool.discard()
    assert [path.name for path in (tmp_path / "audit").iterdir()] == ["mine.txt"]


def test_what_a_killed_worker_was_writing_is_gone_with_the_next(tmp_path: Path) -> None:
    """Only files that a worker writes: others may lie in the folders, too."""
    spool = make(tmp_path)
    half, other = tmp_path / "audit" / ".state.json.4711.tmp", tmp_path / "audit" / ".notes.txt.4711.tmp"
    started, trainers = spool.root / ".started.json.4711.tmp", spool.root / ".audit.json.4711.tmp"
    for path in (half, other, started, trainers):
        path.write_text("{")
    with spool.worker_lock():
        assert not half.exists() and other.exists()
        assert not started.exists() and trainers.exists()


def finished_run(folder: Path) -> Spool:
    """Leave what an audit that is through leaves, by a trainer that is gone."""
    spool = make(folder)
    spool.finish(Totals(total_steps=3))
    edit_audit(spool, trainer_pid=gone_pid())
    for name in ("journal.jsonl", "state.json", "results.json", "verdict.json", "report.html", "worker.log"):
        (folder / "audit" / name).write_text("earlier")
    return spool


def edit_audit(spool: Spool, **fields: object) -> None:
    path = spool.root / "audit.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def gone_pid() -> int:
    """Return the id of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_a_new_run_finds_its_folder_free_and_the_earlier_one_aside(tmp_path: Path) -> None:
    """So a gate on the folder never judges the run before, which is in `.1`."""
    wanted = tmp_path / "audit"
    assert archive_previous(wanted) == RunFolder(wanted)
    for turn in (1, 2):
        finished_run(tmp_path)
        (wanted / "checkpoint").mkdir(exist_ok=True)
        assert archive_previous(wanted) == RunFolder(wanted, f"the earlier audit there is now in audit.{turn}")
        assert [path.name for path in wanted.iterdir()] == ["checkpoint"]
        aside = tmp_path / f"audit.{turn}"
        assert {path.name for path in aside.iterdir()} == set(LEFT_BY_AUDIT) - {NOT_AUDITED, SUBJECT}
        assert aside.stat().st_mode & 0o777 == 0o700
    assert archive_previous(wanted) == RunFolder(wanted)


def test_what_a_killed_trainer_was_writing_goes_when_its_run_is_moved(tmp_path: Path) -> None:
    """It is private text that nobody would ever audit; complete snapshots stay."""
    spool = finished_run(tmp_path)
    put(spool, 3, ".tmp")
    put(spool, 2, ".ready")
    archive_previous(tmp_path / "audit")
    assert names(Spool(tmp_path / "audit.1" / "spool")) == ["000002.ready"]


def test_an_audit_that_is_under_way_is_not_moved(tmp_path: Path) -> None:
    """Neither while its trainer lives nor while a worker holds it."""
    wanted = tmp_path / "audit"
    beside = RunFolder(tmp_path / "audit-2", "the audit there is still under way: gate audit-2, not audit")
    spool = make(tmp_path)
    assert archive_previous(wanted) == beside  # this process is its trainer
    put(spool, 2, ".ready")
    spool.finish(Totals())
    assert archive_previous(wanted) == beside
    edit_audit(spool, trainer_pid=gone_pid())
    with spool.worker_lock():
        assert archive_previous(wanted) == beside
    assert archive_previous(wanted).folder == wanted


def test_an_audit_that_cannot_be_moved_is_not_mixed_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one goes beside it, and the user is told which folder to gate."""
    finished_run(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    found = archive_previous(tmp_path / "audit")
    assert found.folder == tmp_path / "audit-2"
    assert found.note == "the audit there cannot be moved (Permission denied): gate audit-2, not audit"


def test_a_link_is_no_audits_folder(tmp_path: Path) -> None:
    """Whoever made the link would decide where private text goes."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "audit").symlink_to(tmp_path / "elsewhere")
    for attempt in (lambda: archive_previous(tmp_path / "audit"), lambda: make(tmp_path)):
        with pytest.raises(SpoolError, match="audit: is a link; snapshots hold private text"):
            attempt()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_trainer_whose_id_another_process_has_by_now_is_gone_all_the_same(tmp_path: Path) -> None:
    """The lock went with it; ids are used again."""
    spool = make(tmp_path)
    _, audit = Spool.open(spool.root)
    assert audit.trainer_pid == os.getpid() and not spool.trainer_gone(audit)
    root = spool.root
    del spool
    gc.collect()
    assert Spool(root).trainer_gone(audit)
    assert not Spool(root).trainer_gone(audit.model_copy(update={"trainer_host": "elsewhere"}))
    (root / "trainer.lock").unlink()  # a file system without locks: the id alone has to do
    assert not Spool(root).trainer_gone(audit)


BEGIN = """
import pathlib, sys, time
from leakaudit.config.audit import AuditConfig
from leakaudit.storage.run_folders import allocate_run_folder
class Tokenizer:
    def save_pretrained(self, folder):
        time.sleep(0.2)
        folder.mkdir()
tokenizer = Tokenizer()
wanted, start = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
print("ready", flush=True)
while not start.exists():
    time.sleep(0.001)
spool, place = allocate_run_folder(wanted, AuditConfig(out_dir=wanted), tokenizer, sys.argv[3])
print(spool.config.out_dir.name, flush=True)
sys.stdin.read()
"""
"""Begins an audit at the same moment as others and holds on to it."""


def test_trainers_that_begin_in_one_folder_at_the_same_moment_get_a_folder_each(tmp_path: Path) -> None:
    """Also over an earlier audit, which exactly one of them moves aside."""
    finished_run(tmp_path)
    command = [sys.executable, "-c", BEGIN, str(tmp_path / "audit"), str(tmp_path / "start")]
    trainers = [
        subprocess.Popen([*command, f"trainer-{i}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for i in range(3)
    ]
    try:
        for trainer in trainers:
            assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
        (tmp_path / "start").touch()
        found = [trainer.stdout.readline().strip() for trainer in trainers if trainer.stdout]
        assert sorted(found) == ["audit", "audit-2", "audit-3"]
        for index, name in enumerate(found):
            assert Spool.open(tmp_path / name / "spool")[1].command == f"trainer-{index}"
        assert (tmp_path / "audit.1" / "results.json").read_text() == "earlier"
        assert not (tmp_path / "audit.2").exists()
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.communicate(timeout=60)


def test_the_audits_file_holds_no_more_than_it_must(tmp_path: Path) -> None:
    """Configuration, process, host, command and what was known at the beginning."""
    spool = make(tmp_path)
    found = json.loads((spool.root / "audit.json").read_text())
    assert set(found) == {"schema", "config", "trainer_pid", "trainer_host", "command", "origin", "secrets", "salt"}
    assert found["secrets"] is None  # hashes of invented records, where the configuration asks for some
