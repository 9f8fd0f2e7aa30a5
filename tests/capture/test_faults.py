"""No fault loses a result, leaves a file or process, or affects training."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from leakaudit.audit.worker import run_worker
from leakaudit.callbacks.torch_loop import Watch
from leakaudit.capture.worker.process import SideProcess
from leakaudit.results.files import load_results
from leakaudit.results.journal import load_journal
from leakaudit.results.schema import AttemptStatus
from leakaudit.storage.encryption import new_identity
from leakaudit.storage.spool import Spool
from tests.audit import test_worker
from tests.support import mini_trainer
from tests.support.endless import ENDLESS
from tests.support.processes import alive, until
from tests.support.spools import AFTER_AN_AUDIT

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def spool_files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "audit" / "spool").iterdir())


def steps_of(folder: Path) -> list[int]:
    """Return the steps that have results, every attempt of which ran."""
    results = load_results(folder)
    assert {a.status for a in results.attempts} == {AttemptStatus.RAN}
    assert (
        len(load_journal(folder / "journal.jsonl"))
        == len(results.attempts)
        == len({(a.step, a.attack) for a in results.attempts})
    )
    assert {a.step for a in results.attempts} == {record.id for record in results.steps}
    return [record.step for record in results.steps]


@contextmanager
def running(command: list[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a process and leave nothing of it behind."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more.pop("env", {})}
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **more
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


# ---------------------------------------------------------------------- many in a row, on a clock that goes backwards


BACKWARDS = """
import datetime, sys, time
_start, _real = time.monotonic(), time.time

def _back():
    "Return a clock that loses an hour every second."
    return _real() - 3600 * (time.monotonic() - _start)

class _Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(_back(), tz)

time.time = _back
datetime.datetime = _Datetime
sys.modules["pandas"] = None  # its compiled code wants the real datetime, and nothing of ours needs it
"""
"""A `sitecustomize` that turns the clock back in the worker, which inherits `PYTHONPATH`."""


def test_two_hundred_snapshots_in_a_row_although_a_worker_is_killed_and_the_clock_goes_backwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step has its result once, and nothing is left over.

    That holds for files, descriptors and threads; the worker's memory does not grow with the steps.
    """
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "sitecustomize.py").write_text(BACKWARDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "back"))
    hours = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 1.7e9 - 3600.0 * next(hours))
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    killed: list[int] = []
    memory: dict[int, int] = {}
    open_files: dict[int, int] = {}

    def each(audit: Watch, step: int) -> None:
        pid = audit._run.side.pid if audit._run is not None else None
        if step == 101 and pid is not None:
            os.kill(pid, signal.SIGKILL)  # whatever it is about
            killed.append(pid)
        if step in (201, 397) and pid is not None:
            status = Path(f"/proc/{pid}/status").read_text()
            memory[step] = int(status.split("VmRSS:")[1].split()[0])  # kB
            files = Path(f"/proc/{pid}/fd")  # a worker is not dumpable: only root may look there
            open_files[step] = len(list(files.iterdir())) if os.access(files, os.R_OK) else 0

    mine, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    mini_trainer.train(tmp_path, 400, each)
    assert steps_of(tmp_path / "audit") == list(range(0, 400, 2))
    assert len(killed) == 1 and "starting it again" in caplog.text
    assert spool_files(tmp_path) == AFTER_AN_AUDIT
    assert list(scratch.iterdir()) == []
    left = {path.name for path in (tmp_path / "audit").iterdir()}
    assert left == {"journal.jsonl", "report.html", "results.json", "spool", "state.json", "verdict.json", "worker.log"}
    assert len(list(Path("/proc/self/fd").iterdir())) <= mine + 2 and threading.active_count() <= threads
    assert open_files[397] <= open_files[201] + 2
    assert memory[397] < memory[201] + 50_000, memory
    run = load_results(tmp_path / "audit").run
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    assert datetime.fromisoformat(run.finished) < an_hour_ago, "the worker's clock did go backwards"


# ---------------------------------------------------------------------- the trainer dies


STARTER = """
import os, sys, threading, time
from pathlib import Path
from leakaudit.capture.worker.process import SideProcess
from leakaudit.storage.spool import Spool
side = SideProcess(Spool.open(Path(sys.argv[1]))[0])
if sys.argv[2] == "detach":
    starter = threading.Thread(target=side.ensure)
    starter.start(), starter.join()
else:
    side.ensure()
child = 0
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        time.sleep(280)
        os._exit(0)
if sys.argv[2] == "detach":
    side.wait_or_detach()
print(side.pid or 0, child, flush=True)
time.sleep(280)
"""
"""Starts a worker as a trainer does, in a thread or not, and may leave a forked child that holds the worker's pipe open."""


def claimed(spool: Spool) -> bool:
    return bool(list(spool.root.glob("*.run")))


@pytest.mark.parametrize(("moment", "how"), [("at once", "plain"), ("at work", "fork")])
def test_a_killed_trainer_takes_its_worker_along_within_three_seconds(tmp_path: Path, how: str, moment: str) -> None:
    """The trainer dies while the worker starts, or while it attacks.

    A data loader's process may hold the pipe open.
    """
    spool = test_worker.make(tmp_path, 1, finished=False, attacks=(ENDLESS,), budget_s=60.0, nice=7)
    with running([sys.executable, "-c", STARTER, str(spool.root), how]) as trainer:
        assert trainer.stdout is not None
        worker, child = map(int, trainer.stdout.readline().split())
        try:
            if moment == "at work":
                until(lambda: claimed(spool), seconds=240.0)  # it has the lowest priority of all on a busy machine
                assert_good_neighbour(worker, niceness=7)
            trainer.kill()
            until(lambda: not alive(worker), seconds=15.0)  # three on an idle machine
            assert child == 0 or alive(child), "the pipe was open all the time"
        finally:
            for pid in (worker, child):
                if pid and alive(pid):
                    os.kill(pid, signal.SIGKILL)
    assert not spool.attended()
    assert [path.name for path in spool.entries()] == ["000001.run" if moment == "at work" else "000001.ready"]
    with spool.worker_lock():
        assert spool.queue.poisonous() == [] and [path.name for path in spool.entries()] == ["000001.ready"]


def assert_good_neighbour(worker: int, niceness: int) -> None:
    """Check that a process leaves processor and memory to the trainer.

    It has few threads and no terminal.
    """
    stat = Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()
    assert int(stat[16]) == os.nice(0) + niceness
    assert Path(f"/proc/{worker}/oom_score_adj").read_text().strip() == "1000"
    assert int(stat[3]) == worker, "a session of its own: Ctrl-C in the terminal does not reach it"
    environment = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    assert {b"OMP_NUM_THREADS=1", b"MKL_NUM_THREADS=1", b"HF_HUB_OFFLINE=1"} <= set(environment)


def test_a_worker_that_is_started_again_after_training_has_the_processor(tmp_path: Path) -> None:
    """Nobody trains any more, so neither trainer nor worker lowers its priority."""
    spool = test_worker.make(tmp_path, 1, attacks=(ENDLESS,), budget_s=60.0, nice=7)
    side = SideProcess(spool)
    try:
        assert side.ensure() and side.pid
        os.kill(side.pid, signal.SIGKILL)
        os.waitid(os.P_PID, side.pid, os.WEXITED | os.WNOWAIT)
        side.end_training()
        assert side.ensure() and side.pid
        until(lambda: claimed(spool))
        assert os.getpriority(os.PRIO_PROCESS, side.pid) == os.nice(0)
        group = Path(f"/proc/{side.pid}/autogroup")
        assert not group.exists() or group.read_text().split()[-1] == "0"
    finally:
        side.stop()


def test_a_detached_worker_finishes_when_its_trainer_is_killed(tmp_path: Path) -> None:
    """It continues even if the trainer ends at once: the line waits in the pipe.

    The end of the thread that started it does not count as a death.
    """
    spool = test_worker.make(tmp_path, 1, at_end="detach")
    with running([sys.executable, "-c", STARTER, str(spool.root), "detach"]) as trainer:
        assert trainer.stdout is not None
        said = trainer.stdout.readline()  # stderr is in it, too
        assert "continues alone" in said
        worker = int(said.split("(process ")[1].split(")")[0])
        trainer.kill()
        trainer.wait(timeout=60)
        try:
            assert alive(worker)
            until((tmp_path / "audit" / "report.html").exists)
            until(lambda: not alive(worker), seconds=30.0)
        finally:
            if alive(worker):
                os.kill(worker, signal.SIGKILL)
    assert steps_of(tmp_path / "audit") == [1]
    assert (tmp_path / "audit" / "worker.log").read_text().count("Traceback") == 0


# ---------------------------------------------------------------------- the disk


FULL = """
import json, os, sys, time
from pathlib import Path
from leakaudit.capture.worker import restarts as worker_restarts
from tests.support import mini_trainer

folder, full = Path(sys.argv[1]), []
ballast = folder / "ballast"

def fill():
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            full.append(error.errno)

def wait(audit, taken):
    until = time.monotonic() + 30
    while (audit._run.recorder.writing() or taken and audit._run.spool.entries()) and time.monotonic() < until:
        time.sleep(0.01)

def each(audit, step):
    if step == 5:
        wait(audit, taken=True)
        fill()  # while the worker has nothing to do
    elif step == 11:
        ballast.unlink()
    elif step == 15:
        wait(audit, taken=False)  # step 14 is on the disk
        fill()  # whatever the worker is about to write
        time.sleep(0.5)
        ballast.unlink()

worker_restarts.RETRY_SECONDS = 0.2
mini_trainer.train(folder, 18, each)
left = sorted(path.name for path in (folder / "audit" / "spool").iterdir())
results = json.loads((folder / "audit" / "results.json").read_text())
log = (folder / "audit" / "worker.log").read_text()
print(json.dumps({"full": full, "left": left, "log": log, "steps": [step["step"] for step in results["steps"]]}))
"""
"""Trains on a disk that is full from step 5 to step 11, and for a moment later on."""


def test_a_disk_that_is_full_for_a_while_costs_these_steps_only(tmp_path: Path) -> None:
    """Steps before and after have their results, on a file system of 3 MB.

    Nothing half-written stays, and training ends.
    """
    mount = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces to mount a small file system in")
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "full.py").write_text(FULL)
    script = f"mount -t tmpfs -o size=3m tmpfs {disk} && exec {sys.executable} {tmp_path / 'full.py'} {disk}"
    done = subprocess.run(
        [*mount, "sh", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["full"] == [28, 28]
    assert "was not kept: its snapshot needs" in done.stderr
    assert found["left"] == AFTER_AN_AUDIT
    kept = [int(step) for step in re.findall(r"kept step (\d+) ", done.stderr)]
    assert found["steps"] == kept and {0, 2, 4, 12, 14} <= set(kept) and not {6, 8, 10} & set(kept)
    assert "Traceback" not in done.stderr + found["log"]


@pytest.mark.parametrize(("what", "schedule"), [("spool", "beside"), ("audit", "deferred")])
def test_a_folder_that_is_removed_during_training_is_no_exception_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, what: str, schedule: str
) -> None:
    """Training ends, and finished steps have their results.

    The exception is a folder that was removed together with them.
    """
    folder = tmp_path / "audit"
    target = folder / "spool" if what == "spool" else folder
    ended: list[int] = []

    def each(audit: Watch, step: int) -> None:
        ended.append(step)
        if step == 7:
            until(lambda: what == "audit" or (folder / "journal.jsonl").exists())
            while target.exists():  # both sides go on writing meanwhile
                shutil.rmtree(target, ignore_errors=True)

    audit = mini_trainer.train(tmp_path, 20, each, schedule=schedule)
    assert ended == list(range(20))
    assert "somebody removed" in caplog.text
    assert "this run was not audited: SpoolError: somebody removed" in capsys.readouterr().err
    assert audit._run is None
    if what == "spool":
        until((folder / "results.json").exists, seconds=90.0)
        results = load_results(folder)
        assert results.attempts[0].step == "st-000000" and {a.status for a in results.attempts} == {AttemptStatus.RAN}
    else:
        assert not folder.exists()


# ---------------------------------------------------------------------- another job


def test_a_spool_whose_trainer_left_it_to_others_is_finished_by_another_job(tmp_path: Path) -> None:
    """Snapshots of a cluster are encrypted and attacked elsewhere.

    The trainer never has the key, starts no process and skips no step.
    """
    public, private = new_identity()
    pids: list[int | None] = []

    def each(audit: Watch, step: int) -> None:
        pids.append(audit._run.side.pid if audit._run is not None else -1)

    mini_trainer.train(tmp_path, 10, each, schedule="deferred", at_end="leave", encrypt_to=[public])
    assert pids == [None] * 10 and not (tmp_path / "audit" / "worker.log").exists()
    spool = Spool(tmp_path / "audit" / "spool")
    assert spool.waiting() == 5
    assert run_worker(spool.root, identities=(private,)) == 0
    assert steps_of(tmp_path / "audit") == [0, 2, 4, 6, 8]
    assert spool_files(tmp_path) == AFTER_AN_AUDIT
