"""The side process audits every snapshot, loses none and logs nothing private."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch import nn

from leakaudit.audit.worker import DIED_OVER, run_worker
from leakaudit.cli import main
from leakaudit.client.snapshot import OBSERVED, Snapshot
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.errors import ConfigError, ResultsError, SnapshotError, SpoolError
from leakaudit.exit_codes import ExitCode
from leakaudit.models import factories
from leakaudit.results.files import load_results
from leakaudit.results.journal import load_journal
from leakaudit.storage.parent_watch import FACTORIES_VARIABLE, PARENT_VARIABLE
from leakaudit.storage.snapshot_queue import MAX_CRASHES, SnapshotQueue
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import Totals
from tests.support import made_bert, tiny
from tests.support.endless import ENDLESS
from tests.support.processes import until
from tests.support.snapshots import write_step

ROOT = Path(__file__).parents[2]
TEXT = "the old dog chased a cat ."


def make(folder: Path, *steps: int, finished: bool = True, **more: Any) -> Spool:
    """Return a spool with real snapshots of a tiny BERT."""
    config = AuditConfig(
        **{
            "out_dir": folder / "audit",
            "attacks": (PluginSpec(name="embedding-rows"), PluginSpec(name="llg")),
            "controls": 0,
            "device": "cpu",
            **more,
        }
    )
    spool = Spool.create(folder / "audit" / "spool", config, tiny.bert_tokenizer())
    for step in steps:
        put(spool, step)
    if finished:
        spool.finish(Totals(total_steps=max(10, len(steps)), kept=len(steps), skipped=1))
    return spool


def put(spool: Spool, number: int, model: nn.Module | None = None) -> None:
    """Write a real snapshot."""
    step = tiny.client_step(model or tiny.bert(), tiny.bert_tokenizer(), [TEXT], [1])
    write_step(spool.snapshot_folder(number), step, number)


class FakeAudit:
    """Notes which steps it was given; `act` does what goes wrong."""

    def __init__(self, act: Callable[[int], None] = lambda step: None) -> None:
        self.act = act
        self.steps: list[int] = []
        self.finished: dict[str, Any] | None = None
        self.lost: dict[int, str] = {}

    def __call__(self, *args: Any) -> FakeAudit:
        return self

    def step(self, snapshot: Snapshot, others_wait: Callable[[], bool]) -> bool:
        self.steps.append(snapshot.provenance.step)
        self.act(snapshot.provenance.step)
        return True

    def only_slow_left(self, step: int) -> bool:
        return False

    def lose(self, step: int, reason: str) -> None:
        self.lost[step] = reason

    def unlose(self, step: int) -> None:
        self.lost.pop(step)

    def finish(self, **totals: Any) -> None:
        self.finished = totals


def names(spool: Spool) -> list[str]:
    """Return the snapshots in a spool."""
    return sorted(path.name for path in spool.root.iterdir() if path.name[0].isdigit())


def test_a_worker_imports_no_maker_that_only_a_snapshot_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The snapshot waits for a worker whose user named it."""
    spool = make(tmp_path)
    put(spool, 1, made_bert.make())
    monkeypatch.setattr(factories, "_vouched", set())
    assert run_worker(spool.root, audit_factory=FakeAudit()) == ExitCode.USAGE
    assert f"--allow-factory {made_bert.MAKER}" in capsys.readouterr().out and names(spool) == ["000001.ready"]
    monkeypatch.setenv(FACTORIES_VARIABLE, json.dumps([made_bert.MAKER]))
    assert run_worker(spool.root, audit_factory=FakeAudit()) == 0
    assert names(spool) == []


@pytest.mark.parametrize("command", [["worker", "--once"], ["run", "--out", "out"]])
def test_a_command_names_the_maker_of_the_models(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the option it ends with the option to give."""
    monkeypatch.chdir(tmp_path)
    spool = make(tmp_path)
    put(spool, 1, made_bert.make())
    monkeypatch.setattr(factories, "_vouched", set())
    given = [*command, str(spool.root)]
    refused = CliRunner().invoke(main, given)
    assert refused.exit_code == ExitCode.USAGE and f"--allow-factory {made_bert.MAKER}" in refused.output
    done = CliRunner().invoke(main, [*given, "--allow-factory", made_bert.MAKER])
    assert done.exit_code == 0, done.output


def raising(error: BaseException, at: int = 1) -> Callable[[int], None]:
    """Return something that raises at one step."""

    def act(step: int) -> None:
        if step == at:
            raise error

    return act


def test_every_snapshot_is_audited_in_turn_and_removed(tmp_path: Path) -> None:
    """Then the results are written with the trainer's totals."""
    spool, audit = make(tmp_path, 2, 1), FakeAudit()
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.steps == [1, 2]
    assert names(spool) == []
    assert audit.finished is not None
    assert (audit.finished["refused"], audit.finished["total_steps"], audit.finished["interrupted"]) == (0, 10, False)
    assert audit.finished["not_kept"] == [(1, "the step before was still on its way to the disk")]


@pytest.mark.parametrize(
    ("more", "goes"),
    [
        ({}, True),
        ({"keep_snapshots": True}, False),
        ({"finished": False}, False),
        ({"unit": "round", "finished": False}, False),
    ],
)
def test_the_tokenizer_goes_when_the_audit_is_over_and_no_snapshot_is_left(
    tmp_path: Path, more: dict[str, Any], goes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as a snapshot may come, workers need it.

    Tokens that the user added may be private words.
    """
    spool, audit = make(tmp_path, 1, **more), FakeAudit()
    assert run_worker(spool.root, audit_factory=audit, once=True) == 0
    assert audit.steps == [1]
    assert (spool.root / "tokenizer").is_dir() is not goes
    if goes:
        assert run_worker(spool.root, once=True) == 0
        assert "nothing is left to attack" in capsys.readouterr().out


class TwoTurns(FakeAudit):
    """Runs slow attacks when no other step waits for its quick ones."""

    def step(self, snapshot: Snapshot, others_wait: Callable[[], bool]) -> bool:
        again = self.only_slow_left(snapshot.provenance.step)
        super().step(snapshot, others_wait)
        return again or not others_wait()

    def only_slow_left(self, step: int) -> bool:
        return step in self.steps


def test_slow_attacks_begin_when_every_waiting_step_had_the_quick_ones(tmp_path: Path) -> None:
    """A step that arrives meanwhile overtakes; a snapshot stays until all is done."""
    spool = make(tmp_path, 1, 2, 3, finished=False)
    left: list[list[str]] = []

    def act(step: int) -> None:
        left.append(names(spool))
        if len(left) == 4:
            put(spool, 4)
            spool.finish(Totals(total_steps=5, kept=4))

    audit = TwoTurns(act)
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.steps == [1, 2, 3, 1, 4, 2]
    assert left[3] == ["000001.run", "000002.ready"], "the last to arrive has had all"
    assert names(spool) == []


@pytest.mark.parametrize("gone", [True, False])
def test_half_a_snapshot_of_a_killed_trainer_is_removed_and_that_of_a_living_one_is_not(
    tmp_path: Path, gone: bool
) -> None:
    """Half a snapshot of a killed trainer is removed; that of a living one stays."""
    spool = make(tmp_path, 1)
    (spool.root / "000002.tmp").mkdir()
    if gone:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        file = spool.root / "audit.json"
        file.write_text(file.read_text().replace(f'"trainer_pid": {os.getpid()}', f'"trainer_pid": {dead.pid}'))
    assert run_worker(spool.root, audit_factory=FakeAudit()) == 0
    assert names(spool) == ([] if gone else ["000002.tmp"])


def test_an_audit_that_was_moved_aside_goes_on_where_it_is_now(tmp_path: Path) -> None:
    """Its configuration still names the folder that a later run has by then."""
    make(tmp_path, 1)
    (tmp_path / "audit").rename(tmp_path / "audit.1")
    assert run_worker(tmp_path / "audit.1" / "spool") == 0
    assert load_results(tmp_path / "audit.1").coverage.audited_steps == 1
    assert not (tmp_path / "audit").exists()


def test_snapshots_stay_where_that_is_asked_for(tmp_path: Path) -> None:
    """Under another name."""
    spool = make(tmp_path, 1, keep_snapshots=True)
    assert run_worker(spool.root, audit_factory=FakeAudit()) == 0
    assert names(spool) == ["000001.kept"]


def test_a_worker_waits_for_a_trainer_that_is_not_through(tmp_path: Path) -> None:
    """It looks again and again until the totals are there."""
    spool = make(tmp_path, 1, finished=False)

    def more(step: int) -> None:
        if step == 1:
            put(spool, 2)
        else:
            spool.finish(Totals(kept=2))

    audit = FakeAudit(more)
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.steps == [1, 2]


def test_a_worker_by_hand_does_not_wait_for_a_dead_trainer(tmp_path: Path) -> None:
    """A killed trainer leaves no totals: the results say "interrupted".

    The steps that it kept are audited.
    """
    spool = make(tmp_path, 1, finished=False)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    file = spool.root / "audit.json"
    file.write_text(file.read_text().replace(f'"trainer_pid": {os.getpid()}', f'"trainer_pid": {dead.pid}'))
    audit = FakeAudit()
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.steps == [1] and audit.finished is not None and audit.finished["interrupted"] is True


def test_a_last_snapshot_that_comes_with_the_end_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last snapshot may arrive just after the worker found none."""
    spool = make(tmp_path, 3, finished=False)
    claim, looks = SnapshotQueue.claim, []

    def claim_in_between(self: SnapshotQueue, last: Callable[[Path], bool]) -> Path | None:
        found = claim(self, last)
        looks.append(found)
        if len(looks) == 2:
            put(spool, 7)
            spool.finish(Totals(total_steps=8, kept=1))
        return found

    monkeypatch.setattr(SnapshotQueue, "claim", claim_in_between)
    audit = FakeAudit()
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.steps == [3, 7] and looks[1] is None


def test_a_first_snapshot_that_comes_with_the_end_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting worker asks whether training is over before it looks for a step."""
    spool, audit = make(tmp_path, finished=False), FakeAudit()
    waiting, looks = Spool.waiting, []

    def waiting_in_between(self: Spool) -> int:
        looks.append(waiting(self))
        if len(looks) == 1:
            put(spool, 7)
            spool.finish(Totals(total_steps=8, kept=1))
        return looks[-1]

    monkeypatch.setattr(Spool, "waiting", waiting_in_between)
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.steps == [7] and looks[0] == 0


def test_a_worker_that_was_given_no_step_ends_quietly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It opens no audit and says why there is nothing to report.

    The next run in the folder then finds none.
    """
    spool = make(tmp_path)
    assert run_worker(spool.root) == 0
    assert capsys.readouterr().out == "no step was kept: nothing to attack and nothing to report\n"
    assert [path.name for path in (tmp_path / "audit").iterdir()] == ["spool"]


def test_once_does_not_wait(tmp_path: Path) -> None:
    """What is there is audited, the trainer may go on."""
    spool, audit = make(tmp_path, 1, finished=False), FakeAudit()
    assert run_worker(spool.root, once=True, audit_factory=audit) == 0
    assert audit.finished is not None


def test_a_damaged_snapshot_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named, noted as lost and removed."""
    spool, audit = make(tmp_path, 1, 2), FakeAudit()
    (spool.snapshot_folder(1) / OBSERVED).write_bytes(b"short")
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.steps == [2]
    assert names(spool) == []
    assert "snapshot 000001 refused: SnapshotDamagedError" in capsys.readouterr().out
    assert audit.finished is not None and audit.finished["refused"] == 0
    assert audit.lost == {1: "its snapshot could not be audited (SnapshotDamagedError)"}


def test_a_crash_of_the_battery_does_not_stop_the_others_and_quotes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Type and place only: its message may hold private text."""
    spool, audit = make(tmp_path, 1, 2), FakeAudit(raising(ValueError(TEXT)))
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.steps == [1, 2]
    said = capsys.readouterr().out
    assert "snapshot 000001 refused: ValueError at test_worker.py:" in said
    assert "dog" not in said


def test_a_full_disk_gives_the_snapshot_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no fault of the snapshot's; another worker goes on with it."""
    spool = make(tmp_path, 1)
    assert run_worker(spool.root, audit_factory=FakeAudit(raising(OSError(28, os.strerror(28))))) == 5
    assert names(spool) == ["000001.ready"]
    assert "error: cannot continue (No space left on device); free some space" in capsys.readouterr().out
    assert run_worker(spool.root, audit_factory=FakeAudit()) == 0


def test_a_disk_that_fills_up_in_the_middle_of_a_line_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial line is removed, or it would spoil the next result too."""
    spool, real, lines = make(tmp_path, 1), os.write, []

    def full(descriptor: int, data: Any) -> int:
        if bytes(data[:11]) == b'{"attempt":':
            lines.append(data)
        if len(lines) < 2:
            return real(descriptor, data)
        if len(lines) > 2 or bytes(data[:11]) != b'{"attempt":':
            raise OSError(28, os.strerror(28))
        return real(descriptor, data[:20])  # what is left takes so much, and then no more

    journal = tmp_path / "audit" / "journal.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert run_worker(spool.root) == 5
    assert len(lines) == 2 and names(spool) == ["000001.ready"]
    assert journal.read_bytes() == lines[0]
    assert run_worker(spool.root) == 0
    assert [entry.attempt.attack for entry in load_journal(journal)] == ["embedding-rows", "llg"]
    assert journal.read_bytes().startswith(lines[0])


def test_an_interrupted_worker_gives_the_snapshot_back_and_writes_what_it_has(tmp_path: Path) -> None:
    """Marked as interrupted; exit code 130."""
    spool, audit = make(tmp_path, 1), FakeAudit(raising(KeyboardInterrupt()))
    assert run_worker(spool.root, audit_factory=audit) == 130
    assert names(spool) == ["000001.ready"]
    assert audit.finished is not None and audit.finished["interrupted"]


def test_a_time_limit_gives_the_snapshot_back_and_writes_what_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Marked as interrupted, exit code 124; the next worker does the rest."""
    before = signal.getsignal(signal.SIGALRM)

    def second_is_slow(step: int) -> None:
        if step == 2:
            time.sleep(30)

    spool, audit = make(tmp_path, 1, 2, 3), FakeAudit(second_is_slow)
    assert run_worker(spool.root, audit_factory=audit, work_s=0.5) == ExitCode.TIME_LIMIT
    assert audit.steps == [1, 2]
    assert names(spool) == ["000002.ready", "000003.ready"]
    assert audit.finished is not None and audit.finished["interrupted"]
    assert "the time limit: finished attempts are kept; `leakaudit worker" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    rest = FakeAudit()
    assert run_worker(spool.root, audit_factory=rest) == 0
    assert rest.steps == [2, 3]


def test_a_time_limit_whose_exception_a_destructor_swallowed_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what `__del__` raises."""
    monkeypatch.setattr("leakaudit.audit.worker_signals.ASK_AGAIN_S", 0.2)

    class Slow:
        def __del__(self) -> None:
            time.sleep(1)

    def swallows(_step: int) -> None:
        Slow()
        time.sleep(30)

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    spool = make(tmp_path, 1)
    begun = time.monotonic()
    assert run_worker(spool.root, audit_factory=FakeAudit(swallows), work_s=0.3) == ExitCode.TIME_LIMIT
    assert time.monotonic() - begun < 20


def test_sigterm_is_an_interruption(tmp_path: Path) -> None:
    """And the caller's own handling of it comes back afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    spool = make(tmp_path, 1)
    audit = FakeAudit(lambda step: os.kill(os.getpid(), signal.SIGTERM))
    assert run_worker(spool.root, audit_factory=audit) == 130
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("kind", [ValueError, SnapshotError, OSError])
def test_a_sigterm_that_foreign_code_turned_into_an_error_is_an_interruption(
    tmp_path: Path, kind: type[Exception]
) -> None:
    """The snapshot is given back, and not set aside as damaged."""

    def loses_it(_step: int) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        except KeyboardInterrupt:
            raise kind("invalid file") from None

    spool, audit = make(tmp_path, 1), FakeAudit(loses_it)
    assert run_worker(spool.root, audit_factory=audit) == 130
    assert names(spool) == ["000001.ready"]
    assert audit.finished is not None and audit.finished["interrupted"]


@pytest.mark.parametrize("act", [lambda spool: None, lambda spool: spool.discard()], ids=["through", "spool removed"])
def test_sigterm_does_not_end_the_writing_of_results(tmp_path: Path, act: Callable[[Spool], None]) -> None:
    """It asks for them: a trainer that goes off at that very moment sends it."""
    spool, written = make(tmp_path, 1), []

    class Asked(FakeAudit):
        def finish(self, **totals: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            written.append(totals)

    assert run_worker(spool.root, audit_factory=Asked(lambda step: act(spool))) == 0
    assert len(written) == 1 and not written[0]["interrupted"]


def test_a_trainer_that_was_interrupted_is_noted(tmp_path: Path) -> None:
    """In the results."""
    spool, audit = make(tmp_path, 1, finished=False), FakeAudit()
    spool.finish(Totals(interrupted=True))
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.finished is not None and audit.finished["interrupted"]


def test_a_removed_spool_ends_the_worker_with_what_it_has(tmp_path: Path) -> None:
    """Also in the middle of a snapshot."""
    spool = make(tmp_path, 1, 2, finished=False)
    audit = FakeAudit(lambda step: spool.discard())
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.steps == [1]
    assert audit.finished is not None


def test_a_snapshot_that_workers_die_over_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that the others are audited. It stays, and can be tried again."""
    spool = make(tmp_path, 1)
    for _ in range(MAX_CRASHES - 1):
        assert spool.queue.claim() is not None
        with spool.worker_lock():
            pass
    assert spool.queue.claim() is not None
    put(spool, 2)
    audit = FakeAudit()
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.steps == [2]
    assert names(spool) == ["000001.bad"]
    assert audit.lost == {1: DIED_OVER}
    assert "snapshot 000001 set aside: workers died over it" in capsys.readouterr().out
    assert run_worker(spool.root, audit_factory=audit) == 0
    assert audit.steps == [2] and names(spool) == ["000001.bad"]
    assert run_worker(spool.root, retry=True, audit_factory=audit) == 0
    assert audit.steps == [2, 1] and names(spool) == [] and audit.lost == {}


def test_a_step_that_is_tried_again_is_as_if_it_had_never_been_lost(tmp_path: Path) -> None:
    """In the results of the command that tries it again."""
    spool = make(tmp_path, 1)
    for _ in range(MAX_CRASHES):
        assert spool.queue.claim() is not None
        with spool.worker_lock():
            pass
    put(spool, 2)
    folder = tmp_path / "audit"
    assert run_worker(spool.root) == 0
    lost = load_results(folder)
    assert {a.status.value for a in lost.attempts if a.step == "st-000001"} == {"error"}
    done = CliRunner().invoke(main, ["worker", str(folder), "--retry"])
    assert done.exit_code == 0, done.output
    again = load_results(folder)
    assert [step.step for step in again.steps] == [1, 2]
    assert all(step.n_sequences == 1 for step in again.steps)
    assert {a.status.value for a in again.attempts} == {"ran"} and len(again.attempts) == 4
    assert not [missing for missing in again.coverage.not_tested if missing.what == "step 1"]
    assert names(spool) == []


def test_a_worker_that_is_killed_while_it_tries_again_loses_nothing(tmp_path: Path) -> None:
    """The next one finds the step lost, as before, or waiting."""
    spool, audit = make(tmp_path, 1), FakeAudit()
    for _ in range(MAX_CRASHES):
        assert spool.queue.claim() is not None
        with spool.worker_lock():
            pass
    assert run_worker(spool.root, audit_factory=audit) == 0

    class Killed(FakeAudit):
        def unlose(self, step: int) -> None:
            raise SystemExit

    with pytest.raises(SystemExit):
        run_worker(spool.root, retry=True, audit_factory=Killed())
    after = FakeAudit()
    assert run_worker(spool.root, audit_factory=after) == 0
    assert after.lost == {1: DIED_OVER} and names(spool) == ["000001.bad"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ResultsError("no step was audited"), "error: no step was audited"),
        (ConfigError("policy.yaml: no such file"), "error: policy.yaml: no such file"),
        (ValueError(TEXT), "error: the results cannot be written: ValueError at test_worker.py:"),
    ],
)
def test_results_that_cannot_be_written_are_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    """Exit code 5, and nothing private."""

    class Unfinished(FakeAudit):
        def finish(self, **totals: Any) -> None:
            raise error

    assert run_worker(make(tmp_path, 1).root, audit_factory=Unfinished()) == 5
    output = capsys.readouterr().out
    assert said in output and "dog" not in output


def test_what_is_no_spool_is_refused(tmp_path: Path) -> None:
    """Before anything is touched."""
    with pytest.raises(SpoolError, match="is no spool"):
        run_worker(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- real processes


def start(spool: Spool, **environment: str) -> subprocess.Popen[bytes]:
    """Start a real worker."""
    return subprocess.Popen(
        [sys.executable, "-m", "leakaudit", "worker", str(spool.root)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing behind, however the test ended."""
    if process.poll() is None:
        process.kill()
    process.wait(timeout=60)
    if process.stdin is not None:
        process.stdin.close()


def test_a_worker_killed_in_the_middle_of_an_attack_repeats_that_attempt_only(tmp_path: Path) -> None:
    """Finished attempts stay as they are, byte for byte, and are not run again."""
    spool = make(tmp_path, 1, attacks=(PluginSpec(name="embedding-rows"), ENDLESS), budget_s=2.0)
    journal = tmp_path / "audit" / "journal.jsonl"
    process = start(spool)
    try:
        until(lambda: process.poll() is not None or (journal.exists() and journal.stat().st_size > 0))
        time.sleep(0.5)  # into the endless attack
        process.kill()
        process.wait(timeout=60)
    finally:
        end(process)
    finished = journal.read_bytes()
    assert finished.count(b"\n") == 1
    assert names(spool) == ["000001.run"]
    with journal.open("ab") as file:
        file.write(b'{"attempt": {"step": "st-0')  # what a kill in the middle of a line leaves
    assert run_worker(spool.root) == 0
    assert journal.read_bytes().startswith(finished)
    assert [entry.attempt.attack for entry in load_journal(journal)] == ["embedding-rows", "tag"]
    assert len(load_results(tmp_path / "audit").attempts) == 2
    assert names(spool) == []


def test_a_worker_goes_when_its_input_ends(tmp_path: Path) -> None:
    """A killed trainer closes the pipe; the snapshot stays and is not blamed.

    A worker that is in our session, as this one, does not slow the whole session down.
    """
    group = Path("/proc/self/autogroup")
    before = group.read_text() if group.exists() else ""
    spool = make(tmp_path, finished=False)
    process = start(spool, **{PARENT_VARIABLE: str(os.getpid())})
    try:
        until(lambda: spool.attended() or process.poll() is not None)
        assert not before or group.read_text() == before
        began = time.monotonic()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == ExitCode.ORPHANED
        assert time.monotonic() - began < 15.0
    finally:
        end(process)
    assert not spool.attended()
