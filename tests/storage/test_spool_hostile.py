"""A forged spool is refused or worked around in one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from leakaudit.audit.audit import Audit
from leakaudit.audit.worker import run_worker
from leakaudit.cli import main
from leakaudit.config.audit import AuditConfig, load_config
from leakaudit.errors import ConfigError, ResultsError, SpoolError
from leakaudit.storage.retention import items, purge, purge_old_runs
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import HOLD, REASON, Totals
from tests.audit.test_worker import FakeAudit, make, names
from tests.support import tiny

DEEP = "[" * 100_000
LONG = '{"schema": "leakaudit.audit/1.0", "trainer_pid": ' + "9" * 5_000 + "}"


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw["config"].update(attacks=[{"name": "llg", "options": {}}] * 1_000_000),
        lambda raw: raw["config"].update(attacks=[{"name": "llg", "options": {}}] * 2_000),
        lambda raw: raw["config"].update(defenses=[{"name": "none", "options": {}}] * 2_000),
        lambda raw: raw["config"].update(retention_days=1e10),
        lambda raw: raw["config"].update(max_spool_gb=1e300),
        lambda raw: raw["config"].update(seed=-1),
        lambda raw: raw["config"].update(threads=10**9),
        lambda raw: raw["config"].update(out_dir="\ud800"),
        lambda raw: raw.update(trainer_pid="x"),
        lambda raw: raw.update(schema=["leakaudit.audit/1.0"]),
        lambda raw: raw.update(schema="\n" * 1000),
    ],
)
def test_a_configuration_that_no_trainer_wrote_is_refused(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    """Before an attack is made of it."""
    spool = make(tmp_path, 1)
    file = spool.root / "audit.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))
    with pytest.raises(SpoolError) as caught:
        run_worker(spool.root, audit_factory=FakeAudit())
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)
    assert list(purge_old_runs(spool, now=datetime.now(UTC))) == []


@pytest.mark.parametrize("text", [DEEP, LONG, "null", "7", "", "\0", '{"schema": "\\ud800"}', "[]"])
def test_a_file_of_junk_is_an_error_of_one_line(tmp_path: Path, text: str) -> None:
    """Each of those that a worker reads."""
    spool = make(tmp_path, 1)
    (spool.root / "finished.json").write_text(text)
    assert Spool(spool.root).totals() == Totals()
    (spool.root / HOLD).write_text(text)
    assert items(spool)[0].held
    (spool.root / HOLD).unlink()
    (spool.root / "000001.ready" / "snapshot.json").write_text(text)
    assert [item.step for item in items(spool)] == [1]
    assert run_worker(spool.root, audit_factory=FakeAudit()) == 0
    (tmp_path / "audit" / "state.json").write_text(text)
    assert not purge(spool, now=datetime.now(UTC), older_than=None).removed
    with pytest.raises(ResultsError, match=r"state\.json: cannot be read"):
        Audit(tmp_path / "audit", spool.config, tiny.bert_tokenizer())
    (spool.root / "audit.json").write_text(text)
    with pytest.raises(SpoolError):
        run_worker(spool.root, audit_factory=FakeAudit())


@pytest.mark.parametrize(
    "text", [DEEP, LONG, "null", '{"key": "zz"}', '{"run": "a", "started": "b", "battery": "c", "key": "zz"}']
)
def test_a_worker_says_that_its_state_cannot_be_read(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And touches no snapshot."""
    spool = make(tmp_path, 1)
    (tmp_path / "audit" / "state.json").write_text(text)
    with pytest.raises(ResultsError, match=r"state\.json: cannot be read .*remove this"):
        run_worker(spool.root)
    assert names(spool) == ["000001.ready"]


@pytest.mark.parametrize("kind", ["link", "folder", "dangling link"])
def test_a_lock_that_is_none_is_named(tmp_path: Path, kind: str) -> None:
    """Nothing is written through a link."""
    spool = make(tmp_path, 1)
    lock, other = spool.root / "worker.lock", tmp_path / "other"
    if kind == "folder":
        lock.mkdir()
    else:
        lock.symlink_to(other)
        if kind == "link":
            other.write_text("mine")
    with pytest.raises(SpoolError, match=r"worker\.lock: cannot be opened .*remove it"):
        run_worker(spool.root, audit_factory=FakeAudit())
    assert not other.exists() or other.read_text() == "mine"


def test_a_snapshot_that_is_a_link_or_a_file_is_not_touched(tmp_path: Path) -> None:
    """What it points to is nobody's business, and the others are audited."""
    spool, target = make(tmp_path, 2), tmp_path / "theirs"
    target.mkdir()
    (target / "snapshot.json").write_text("{}")
    (spool.root / "000001.ready").symlink_to(target)
    (spool.root / "000003.ready").write_text("a file")
    (spool.root / "000004.run").symlink_to(target)
    audit = FakeAudit()
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.steps == [2] and (target / "snapshot.json").exists()
    done = purge(spool, now=datetime.now(UTC), older_than=None)
    assert len(done.removed) == 3 and names(spool) == [] and (target / "snapshot.json").exists()


@pytest.mark.parametrize(
    "created",
    ["9999-12-31T23:59:59", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "x" * 10_000, 7, None, [1], ""],
)
def test_dates_that_no_calendar_has_leave_the_age_unknown_or_taken_from_the_file(tmp_path: Path, created: Any) -> None:
    """The list and the purge go on."""
    spool = make(tmp_path, 1)
    file = spool.root / "000001.ready" / "snapshot.json"
    raw = json.loads(file.read_text())
    raw["provenance"]["created"] = created
    raw["encrypted_to"] = None
    file.write_text(json.dumps(raw))
    now = datetime.now(UTC)
    (item,) = items(spool)
    assert item.encrypted_to == () and (item.age(now) or timedelta()) >= timedelta()
    purge(spool, now=now, older_than=timedelta(days=36_500))
    listed = CliRunner().invoke(main, ["snapshots", "ls", str(spool.root)])
    assert listed.exit_code == 0, listed.output


def test_a_longer_time_than_a_calendar_has_is_refused(tmp_path: Path) -> None:
    """As an option that is wrong."""
    spool = make(tmp_path, 1)
    said = CliRunner().invoke(main, ["snapshots", "purge", str(spool.root), "--older-than", "9" * 400 + "d"])
    assert said.exit_code == 2 and "is too long; the longest is 999999d" in said.output


@pytest.mark.parametrize(
    "line",
    [
        "seed: 1" + "0" * 300,
        "seed: -1",
        "retention_days: 1e10",
        "every_n_steps: 1" + "0" * 300,
        "first_step: 1" + "0" * 300,
        "max_snapshots: 1" + "0" * 300,
        "min_tokens: 1" + "0" * 300,
        "controls: 1" + "0" * 300,
        "threads: 100000",
        "budget_s: 1e300",
        "wait_at_end_s: 1e300",
        "max_spool_gb: 1e300",
        "retention_days: 9999-12-31",
        "seed: 2026-11-02",
    ],
)
def test_a_number_beyond_all_use_is_an_error_with_its_line(tmp_path: Path, line: str) -> None:
    """A typing mistake should not surface as a crash an hour later."""
    file = tmp_path / "audit.yaml"
    file.write_text(f"text: hash\n{line}\n")
    with pytest.raises(ConfigError, match=rf"audit\.yaml:2: {line.partition(':')[0]}"):
        load_config(file)


def test_the_largest_numbers_that_are_allowed_overflow_nothing(tmp_path: Path) -> None:
    """They are used somewhere."""
    config = AuditConfig(retention_days=36_500, seed=2**32 - 1, max_spool_gb=10**6, wait_at_end_s=10**9, budget_s=10**9)
    spool = make(
        tmp_path, 1, **{name: getattr(config, name) for name in ("retention_days", "seed", "max_spool_gb", "budget_s")}
    )
    assert spool.lacks(1) == ""
    assert run_worker(spool.root) == 0


# ---------------------------------------------------------------------- what stays


def test_what_is_left_over_is_said_with_its_reason(tmp_path: Path) -> None:
    """A snapshot that was set aside has a reason; the others wait."""
    spool = make(tmp_path, 1, 2, 3, finished=True, keep_snapshots=True)
    (spool.snapshot_folder(1) / "truth.safetensors").write_bytes(b"short")
    claimed = spool.queue.claim()
    assert claimed is not None
    spool.queue.set_aside(claimed, keep=True, reason="workers died over its snapshot")
    assert spool.queue.claim() is not None
    gone = Spool(spool.root)
    found = {path.name: gone.why(path) for path in gone.entries()}
    assert found == {"000001.bad": "workers died over its snapshot", "000002.run": "", "000003.ready": ""}
    listed = CliRunner().invoke(main, ["snapshots", "ls", str(spool.root)])
    assert "refused: workers died over its snapshot" in listed.output
    (item, *_) = json.loads(CliRunner().invoke(main, ["snapshots", "ls", "--json", str(spool.root)]).output)[
        "snapshots"
    ]
    assert item["why"] == "workers died over its snapshot"
    with gone.worker_lock():
        assert [path.name for path in gone.entries() if gone.why(path)] == ["000001.bad"]


def test_what_was_never_audited_goes_with_its_age_and_not_before(tmp_path: Path) -> None:
    """`snapshots purge` and the next run remove it once nobody works on the spool."""
    spool = make(tmp_path, 1, 2, finished=True)
    assert spool.queue.claim() is not None
    dead = make_trainer_dead(spool)
    assert {dead.why(path) for path in dead.entries()} == {"no worker is at work on it; `leakaudit worker` goes on"}
    for path in dead.entries():
        os.utime(path, (0, 0))
        file = path / "snapshot.json"
        raw = json.loads(file.read_text())
        raw["provenance"]["created"] = (datetime.now(UTC) - timedelta(days=6)).isoformat()
        file.write_text(json.dumps(raw))
    call = CliRunner()
    assert "0 snapshots removed" in call.invoke(main, ["snapshots", "purge", str(spool.root)]).output
    for path in dead.entries():
        file = path / "snapshot.json"
        file.write_text(file.read_text().replace(raw["provenance"]["created"], "2001-01-01T00:00:00+00:00"))
        raw = json.loads(file.read_text())
        raw["provenance"]["created"] = "2001-01-01T00:00:00+00:00"
        file.write_text(json.dumps(raw))
    assert "with the next run here" in call.invoke(main, ["snapshots", "ls", str(spool.root)]).output
    assert "2 snapshots removed" in call.invoke(main, ["snapshots", "purge", str(spool.root)]).output
    assert names(spool) == []


def make_trainer_dead(spool: Spool) -> Spool:
    """Return the spool as it is after its trainer has ended."""
    import subprocess
    import sys

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    file = spool.root / "audit.json"
    file.write_text(file.read_text().replace(f'"trainer_pid": {os.getpid()}', f'"trainer_pid": {ended.pid}'))
    return Spool(spool.root)


def test_a_reason_that_cannot_be_read_hides_nothing(tmp_path: Path) -> None:
    """The snapshot is listed all the same."""
    spool = make(tmp_path, 1, keep_snapshots=True)
    claimed = spool.queue.claim()
    assert claimed is not None
    spool.queue.set_aside(claimed, keep=True, reason="x")
    (spool.root / "000001.bad" / REASON).write_text(DEEP)
    assert [spool.why(path) for path in spool.entries()] == ["it could not be audited"]
