"""`simulate` into a folder that is not empty, interrupted and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from leakaudit.audit.run_folder import run_folder
from leakaudit.cli import main
from tests.support import tiny
from tests.support.processes import until

ROOT = Path(__file__).parents[2]
TEXTS = ("the old dog chased a horse", "one bird ate two fish", "a cat found three trees", "four birds saw the river")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Give a folder with a tiny classifier and a data file."""
    folder = tmp_path_factory.mktemp("given")
    tiny.bert(seed=1).save_pretrained(folder / "model")  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(folder / "model")
    rows = [{"text": text, "label": n % 2} for n, text in enumerate(TEXTS * 50)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "model", folder / "rows.jsonl"


def _arguments(given: tuple[Path, Path], out: Path, *more: object) -> list[str]:
    battery = ("--attacks", "embedding-rows,idlg", "--defenses", "none,round", "--steps", 3, "--controls", 1)
    return [str(a) for a in ("simulate", "--model", given[0], "--data", given[1], "--out", out, *battery, *more)]


def _simulate(given: tuple[Path, Path], out: Path, *more: object) -> Result:
    return CliRunner().invoke(main, _arguments(given, out, *more), catch_exceptions=False)


def _results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def _timeless(found: dict[str, Any]) -> dict[str, Any]:
    """Leave out what the clock decides, and the digest over it."""
    attempts = [attempt | {"wall_s": 0} for attempt in found["attempts"]]
    summaries = [summary | {"seconds_per_step": 0} for summary in found["summaries"]]
    timeless = {"attempts": attempts, "summaries": summaries, "run": found["run"] | {"finished": ""}}
    return found | timeless | {"digest": ""}


def test_an_earlier_audit_moves_aside(given: tuple[Path, Path], tmp_path: Path) -> None:
    """To `out.1`, whole, as under the callback; files of others stay."""
    out = tmp_path / "night"
    assert _simulate(given, out).exit_code == 0
    (out / "notes.txt").write_text("mine")
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    again = _simulate(given, out, "--seed", 1)
    assert again.exit_code == 0 and "the earlier audit there is now in night.1" in again.stderr
    moved = {path.name: path.read_bytes() for path in (tmp_path / "night.1").iterdir()}
    assert moved == {name: content for name, content in first.items() if name != "notes.txt"}
    assert (out / "notes.txt").read_text() == "mine"
    assert _results(out)["run"]["seed"] == 1


def test_the_same_command_after_a_finished_audit_begins_anew(given: tuple[Path, Path], tmp_path: Path) -> None:
    """A nightly job runs the same command every night."""
    out = tmp_path / "night"
    assert _simulate(given, out).exit_code == 0
    again = _simulate(given, out)
    assert again.exit_code == 0 and "now in night.1" in again.stderr
    assert _results(out)["run"]["id"] != _results(tmp_path / "night.1")["run"]["id"]


@pytest.fixture
def halved(given: tuple[Path, Path], tmp_path: Path) -> Path:
    """Give the folder of an audit that was killed in the middle of its second step."""
    out = tmp_path / "out"
    code = (
        "import os, signal, sys\n"
        "from leakaudit.audit.state import Journal\n"
        "append = Journal.append\n"
        "def killed(self, entry):\n"
        "    append(self, entry)\n"
        "    len(self.entries) == 5 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "Journal.append = killed\n"
        "from leakaudit.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *_arguments(given, out)], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len((out / "journal.jsonl").read_text().splitlines()) == 5 and not (out / "results.json").exists()
    return out


def test_a_killed_audit_is_gone_on_with(halved: Path, given: tuple[Path, Path], tmp_path: Path) -> None:
    """And comes to the same results as one that nobody killed, under the same key."""
    whole = Path(shutil.copytree(halved, tmp_path / "whole"))
    (whole / "journal.jsonl").write_text("")
    state = json.loads((whole / "state.json").read_text())
    (whole / "state.json").write_text(json.dumps(state | {"steps": [], "controls": []}))
    reference = _simulate(given, whole)
    resumed = _simulate(given, halved)
    assert "resuming: 0 of 12 attempts are done" in reference.stderr
    assert "resuming: 5 of 12 attempts are done" in resumed.stderr
    assert (reference.exit_code, resumed.exit_code) == (0, 0)
    assert _timeless(_results(halved)) == _timeless(_results(whole))
    assert _results(halved)["run"]["interrupted"] is False
    assert not (tmp_path / "out.1").exists()
    left = json.loads((halved / "state.json").read_text())
    assert (left["key"], left["source"], left["finished"]) == ("", "", True)


@pytest.mark.parametrize(
    "other", [("--seed", 3), ("--budget", 5), ("--attacks", "idlg"), ("--steps", 2), ("--text", "hash"), ("--fresh",)]
)
def test_another_command_begins_anew_and_keeps_what_is_there(
    halved: Path, given: tuple[Path, Path], tmp_path: Path, other: tuple[object, ...]
) -> None:
    """The unfinished audit moves aside, and the user is told."""
    before = (halved / "journal.jsonl").read_bytes()
    result = _simulate(given, halved, *other)
    assert result.exit_code == 0, result.stderr
    assert "the earlier audit there is now in out.1; that audit was not finished" in result.stderr
    assert (tmp_path / "out.1" / "journal.jsonl").read_bytes() == before


def test_other_data_begins_anew(halved: Path, given: tuple[Path, Path], tmp_path: Path) -> None:
    """Its path may be the same or not: the content counts."""
    moved = Path(shutil.copy(given[1], tmp_path / "other.jsonl"))
    kept = Path(shutil.copytree(halved, tmp_path / "kept"))
    assert "resuming: 5 of 12" in _simulate((given[0], moved), kept).stderr
    moved.write_text(moved.read_text().replace("fish", "horse"))
    assert "resuming" not in _simulate((given[0], moved), halved).stderr
    assert (tmp_path / "out.1").exists()


def test_resume_insists(halved: Path, given: tuple[Path, Path], tmp_path: Path) -> None:
    """Without an unfinished audit of the same, it is an error and changes nothing."""
    nothing = _simulate(given, tmp_path / "new", "--resume")
    assert nothing.exit_code == 2 and "holds no unfinished audit" in nothing.stderr
    before = {path.name: path.read_bytes() for path in halved.iterdir()}
    other = _simulate(given, halved, "--resume", "--seed", 4)
    assert other.exit_code == 2 and "holds an unfinished audit of another command" in other.stderr
    assert {path.name: path.read_bytes() for path in halved.iterdir()} == before
    assert "resuming: 5 of 12" in _simulate(given, halved, "--resume").stderr


@pytest.mark.parametrize(
    "junk", ["{", "[]", '{"run": 5}', '{"run":"a","started":"b","battery":"c","key":"zz"}', "[" * 10**5]
)
def test_a_state_that_cannot_be_read_moves_aside(given: tuple[Path, Path], tmp_path: Path, junk: str) -> None:
    """It is nobody's audit to go on with."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "state.json").write_text(junk)
    (out / "journal.jsonl").write_text("")
    assert _simulate(given, out).exit_code == 0
    assert (tmp_path / "out.1" / "state.json").read_text() == junk


def test_a_folder_that_another_audit_holds_is_refused(given: tuple[Path, Path], tmp_path: Path) -> None:
    """Two audits must not write one journal."""
    from leakaudit.audit.state import Unfinished
    from leakaudit.storage.run_folders import archive_previous

    out = tmp_path / "out"
    with run_folder(out, Unfinished("", "", 0), None):
        (out / "journal.jsonl").write_text("")
        result = _simulate(given, out)
        assert result.exit_code == 2 and "another audit is at work there" in result.stderr
        assert archive_previous(out).folder == tmp_path / "out-2"  # a training run's audit goes beside it
    assert _simulate(given, out).exit_code == 0


# ---------------------------------------------------------------------- signals


@contextlib.contextmanager
def _running(arguments: list[str], *before: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command as a process of its own, in a group of its own."""
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "leakaudit", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _slow(given: tuple[Path, Path], out: Path) -> list[str]:
    """Return a command of many short attempts."""
    return _arguments(given, out, "--attacks", "idlg", "--steps", 200)


def _attempts(out: Path) -> int:
    try:
        return (out / "journal.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_stops_with_a_report_of_what_is_finished(
    given: tuple[Path, Path], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Time limits, containers and closed terminals send these signals.

    The same command resumes the audit.
    """
    out = tmp_path / "out"
    with _running(_slow(given, out)) as process:
        until(lambda: _attempts(out) >= 3, 120)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr and "the same command continues with the rest" in stderr
    found = _results(out)
    assert found["run"]["interrupted"] is True and len(found["attempts"]) >= 3
    assert (out / "report.html").exists() and "report.html" in stdout
    gate = CliRunner().invoke(main, ["gate", str(out)])
    assert gate.exit_code in (3, 4), gate.output  # never a pass on so few steps


def test_a_stopped_audit_is_gone_on_with(given: tuple[Path, Path], tmp_path: Path) -> None:
    """By the same command, as the same audit."""
    out = tmp_path / "out"
    with _running(_slow(given, out)) as process:
        until(lambda: _attempts(out) >= 3, 120)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    before = _results(out)
    done = len(before["attempts"])
    again = CliRunner().invoke(main, _slow(given, out), catch_exceptions=False)
    assert again.exit_code == 0 and f"resuming: {done} of 400 attempts are done" in again.stderr
    found = _results(out)
    assert (found["run"]["id"], found["run"]["interrupted"]) == (before["run"]["id"], False)
    assert found["attempts"][:done] == before["attempts"] and len(found["attempts"]) == 400


def test_a_signal_before_the_first_attempt_leaves_nothing_behind_to_gate(
    given: tuple[Path, Path], tmp_path: Path
) -> None:
    """There is nothing to write."""
    out = tmp_path / "out"
    with _running(_arguments(given, out, "--attacks", "tag(steps=100000)", "--budget", 100)) as process:
        until(lambda: (out / "state.json").exists(), 120)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 143 and "stopped before the first attempt was finished" in stderr
    assert not (out / "results.json").exists()


def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    """The second signal ends the command at any point.

    A signal that comes with the first is the same request.
    """
    code = (
        "import time\n"
        "from leakaudit.cli.stopping import SAME_REQUEST_SECONDS, stop_on_signals\n"
        "with stop_on_signals():\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        print('stopping', flush=True)\n"
        "        time.sleep(SAME_REQUEST_SECONDS)\n"
        "        print('writing', flush=True)\n"
        "        time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGTERM)  # `timeout` signals the process and its group
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130


def test_timeout_stops_it_gently(given: tuple[Path, Path], tmp_path: Path) -> None:
    """`timeout` of most nightly jobs signals the process and its group."""
    out = tmp_path / "out"
    with _running(_slow(given, out), "timeout", "600") as process:
        until(lambda: _attempts(out) >= 1, 120)
        process.send_signal(signal.SIGTERM)  # it hands this on as it does when time is up
        _, stderr = process.communicate(timeout=120)
    assert "the same command continues with the rest" in stderr
    assert (out / "report.html").exists()


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """`nohup` ignores SIGHUP for the program that it starts."""
    from leakaudit.cli.stopping import stop_on_signals

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nobody_who_reads_the_progress_is_no_reason_to_stop(given: tuple[Path, Path], tmp_path: Path) -> None:
    """As under `2>&1 | head`, or after a closed connection: results are still written."""
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [*_arguments(given, tmp_path / "out", "--attacks", "idlg", "--steps", 2), "--json"]
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "leakaudit", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=closed,
            check=False,
        )
    assert done.returncode == 0
    assert json.loads(done.stdout)["interrupted"] is False and (tmp_path / "out" / "report.html").exists()
