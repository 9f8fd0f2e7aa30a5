"""`leakaudit nightly`: one night from its lock to its record."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from leakaudit.cli import main
from leakaudit.cli.nights.night import period_of
from leakaudit.cli.nights.starter import starter
from leakaudit.config.nightly import load_nightly
from leakaudit.history.nights import History
from tests.support.same_results import same_results

FIRST, SECOND = "2026-11-01", "2026-11-02"
STEPS = 3


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the starter's configuration and its example."""
    folder = tmp_path_factory.mktemp("starter")
    done = CliRunner().invoke(main, ["nightly", "init", "--out", str(folder / "nightly.yaml")])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def place(example: Path, tmp_path: Path) -> Path:
    """Return a folder with a short night's configuration."""
    shutil.copytree(example, tmp_path, dirs_exist_ok=True)
    configure(tmp_path)
    return tmp_path


def configure(place: Path, **extra: Any) -> None:
    """Write the configuration of a short night, with other keys."""
    source = {"model": "leakaudit-example/model", "data": "leakaudit-example/data.jsonl", "steps": STEPS}
    fields: dict[str, Any] = {
        "schema": "leakaudit.nightly/1",
        "simulate": source,
        "attacks": ["span", "idlg"],
        "controls": 1,
        "stop_when_decided": False,
    }
    (place / "nightly.yaml").write_text(yaml.safe_dump(fields | extra), encoding="utf-8")


def night(place: Path, at: str = FIRST, *more: str) -> Result:
    """Run one night in this process."""
    return CliRunner().invoke(main, ["nightly", "--config", str(place / "nightly.yaml"), "--at", at, *more])


def history(place: Path) -> History:
    """Read the history of a folder."""
    return History.load(place / "leakaudit-nights/history")


def period(at: str) -> str:
    """Return the name of the night that a value of --at gives."""
    return period_of(datetime.fromisoformat(at), timedelta(days=1))


def folder_of(place: Path, at: str = FIRST) -> Path:
    """Return the folder of a night."""
    return place / f"leakaudit-nights/nights/{at}T0000Z"


def test_the_starter_names_every_key_and_runs_as_it_stands(example: Path) -> None:
    """Uncommented, each of its keys has the default that it names."""
    assert load_nightly(example / "nightly.yaml").simulate is not None
    lines = starter({"model": "m", "data": "d"}).splitlines()
    keys = [line.removeprefix("# ") for line in lines if line.startswith("# ") and line[2:3].islower() and ":" in line]
    given = yaml.safe_load("\n".join(line for line in keys if not line.startswith(("snapshots", "training"))))
    assert {"attacks", "budget", "keep", "notify_command", "stop_when_decided"} <= given.keys()


def test_a_commented_section_of_the_starter_is_yaml_without_its_marks() -> None:
    """Who removes one mark from each line of a section has the section."""
    lines = starter({"model": "m", "data": "d"}).splitlines()
    start = lines.index("# training:")
    end = lines.index("", start)
    section = yaml.safe_load("\n".join(line[2:] for line in lines[start:end]))
    assert section == {"training": {"command": ["python", "train.py"]}}


def test_the_starter_overwrites_nothing(example: Path) -> None:
    """A configuration that exists stays as it is."""
    before = (example / "nightly.yaml").read_bytes()
    again = CliRunner().invoke(main, ["nightly", "init", "--out", str(example / "nightly.yaml")])
    assert again.exit_code == 2
    assert "exists and was not changed" in again.output
    assert (example / "nightly.yaml").read_bytes() == before


def test_a_name_with_an_umlaut_is_written_as_it_is(tmp_path: Path) -> None:
    """The file is for people."""
    place = tmp_path / "für Nächte.yaml"
    models = ["--model", str(tmp_path / "Modell ä"), "--data", str(tmp_path / "dätén 1.jsonl")]
    done = CliRunner().invoke(main, ["nightly", "init", "--out", str(place), *models])
    assert "Modell ä" in place.read_text(encoding="utf-8")
    assert f"nightly --config '{place}'" in done.stderr
    config = load_nightly(place).simulate
    assert config is not None and config.data.name == "dätén 1.jsonl"


def test_a_night_is_audited_judged_reported_and_recorded(place: Path) -> None:
    """Its exit code is the verdict's, and stdout has one line."""
    done = night(place)
    (record,) = history(place).records
    assert (done.exit_code, record.exit_code, record.verdict) == (3, 3, "FAIL")
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("2026-11-01T0000Z FAIL: exact_sentence 3/3")
    assert (record.steps, record.planned, len(set(record.units))) == (STEPS, STEPS, STEPS)
    names = {path.name for path in folder_of(place).iterdir()}
    assert {"results.json", "verdict.json", "report.html", "trend.json"} <= names


def test_a_second_start_repeats_nothing(place: Path) -> None:
    """The night is complete; the line and the exit code are the same."""
    first = night(place)
    written = {path: path.stat().st_mtime_ns for path in (place / "leakaudit-nights").rglob("*")}
    second = night(place)
    assert (second.exit_code, second.stdout) == (first.exit_code, first.stdout)
    assert "`--at 2026-11-02T0000Z` runs it now" in second.stderr and period("2026-11-02T0000Z") == "2026-11-02T0000Z"
    assert {path: path.stat().st_mtime_ns for path in (place / "leakaudit-nights").rglob("*")} == written
    assert "is complete" in second.stderr


def test_a_pass_of_a_complete_night_ends_with_its_evidence(place: Path) -> None:
    """A job that always names the same night would pass forever."""
    night(place)
    file = place / "leakaudit-nights/history/2026-11-01T0000Z.json"
    record = json.loads(file.read_text())
    for age, code in ((timedelta(days=6), 0), (timedelta(days=8), 4)):
        finished = (datetime.now(UTC) - age).isoformat(timespec="seconds")
        file.write_text(json.dumps(record | {"exit_code": 0, "verdict": "PASS", "finished": finished}))
        done = night(place)
        assert done.exit_code == code, done.output
        assert done.stdout.startswith(f"2026-11-01T0000Z {'PASS' if code == 0 else 'INCONCLUSIVE'}:")
        said = json.loads(night(place, FIRST, "--json").stdout)
        assert ("The evidence is 8.0 days old; the policy allows 7d." in said["sentence"]) == (code == 4)


def test_a_night_of_the_future_removes_nothing_that_is_young(place: Path) -> None:
    """`--at` names a night; it does not make the others old."""
    configure(place, keep="30d")
    today = datetime.now(UTC)
    night(place, today.date().isoformat())
    night(place, (today + timedelta(days=60)).date().isoformat())
    assert folder_of(place, today.date().isoformat()).exists()


def test_two_nights_have_other_steps_and_one_sequence(place: Path) -> None:
    """The seed of a night is its own, so both nights are evidence."""
    night(place)
    night(place, SECOND)
    one, two = history(place).records
    assert not set(one.units) & set(two.units)
    assert two.repeated == 0
    assert two.rates[0].so_far == (2 * STEPS, 2 * STEPS)
    assert ": no difference shown. 3 of 3 steps now, 3 of 3 before" in two.since_last


def test_nights_that_repeat_the_same_steps_add_no_evidence(place: Path) -> None:
    """A fixed seed and unchanged weights give the same updates."""
    fixed = {"model": "leakaudit-example/model", "data": "leakaudit-example/data.jsonl", "steps": STEPS, "seed": 4}
    configure(place, simulate=fixed)
    night(place)
    night(place, SECOND)
    two = history(place).records[1]
    assert two.repeated == STEPS
    assert two.rates[0].so_far == (STEPS, STEPS)


def test_a_night_ends_when_its_policy_is_decided_and_says_what_it_saved(place: Path) -> None:
    """One leak fails the built-in policy for certain."""
    configure(place, stop_when_decided=True)
    night(place)
    (record,) = history(place).records
    assert (record.steps, record.planned) == (1, STEPS)
    assert record.saved == "2 steps left out: the policy was decided (FAIL)."


def test_a_night_whose_steps_cannot_be_made_is_a_gap(place: Path) -> None:
    """The reason has no path, a later start still gives results."""
    data = place / "leakaudit-example/data.jsonl"
    data.rename(place / "elsewhere")
    failed = night(place)
    (gap,) = history(place).records
    assert (failed.exit_code, gap.status, gap.exit_code) == (5, "gap", 5)
    assert gap.reason == "the steps could not be made: a data file is missing, empty or lacks a field"
    assert "no such file" in failed.stderr
    (place / "elsewhere").rename(data)
    assert night(place).exit_code == 3
    assert [record.status for record in history(place).records] == ["audited"]
    assert (place / "leakaudit-nights/history/2026-11-01T0000Z.gap1.json").exists()


@pytest.mark.parametrize("wrong", [{"attacks": ["spam"]}, {"defenses": ["prune(shar=0.9)"]}])
def test_a_wrong_name_in_the_configuration_is_no_gap(place: Path, wrong: dict[str, Any]) -> None:
    """It is mended before the night, so nothing is recorded."""
    configure(place, **wrong)
    refused = night(place)
    assert (refused.exit_code, history(place).records) == (2, ())
    assert "did you mean" in refused.stderr


def test_a_disk_without_room_is_named_in_the_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The type of an exception says nothing to its reader, and a path is private."""
    from leakaudit.cli.nights import night as module

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))

    monkeypatch.setattr(module, "run_audit", full)
    failed = night(place)
    assert failed.stdout == "2026-11-01T0000Z ERROR: the audit could not be made: No space left on device\n"


def test_time_that_ends_within_a_step_gives_the_night_what_is_done(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the rest of the step must not stop the night a second time."""
    from leakaudit.audit.due_attempts import DueAttempts

    sent: list[str] = []
    append = DueAttempts.append

    def time_is_up_once(self: DueAttempts, entry: Any) -> None:
        append(self, entry)
        if not sent:
            sent.append(entry.attempt.attack)
            signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(DueAttempts, "append", time_is_up_once)
    ended = night(place)
    (record,) = history(place).records
    assert (record.status, record.steps, sent) == ("audited", 1, ["span"]), ended.stderr
    assert "the budget of the night was used up" in record.saved


def test_a_fresh_head_is_no_new_version_of_the_model(place: Path) -> None:
    """The stored weights are the same; only the head that a simulation adds differs."""
    from safetensors.torch import load_file, save_file

    weights = place / "leakaudit-example/model/model.safetensors"
    stored = load_file(weights)
    save_file({name: stored[name] for name in stored if "classifier" not in name}, weights, {"format": "pt"})
    night(place, FIRST)
    night(place, SECOND)
    stored["bert.pooler.dense.bias"] += 1.0
    save_file(stored, weights, {"format": "pt"})
    night(place, "2026-11-03")
    one, two, three = (record.model_version for record in history(place).records)
    assert one == two != three


def test_the_line_of_a_night_names_a_rate_that_was_judged(place: Path) -> None:
    """`embedding-rows` names words and cannot judge a sentence."""
    configure(place, attacks=["embedding-rows"])
    line = night(place).stdout
    assert "0/0" not in line and f"all_words {STEPS}/{STEPS}" in line


def test_less_data_than_steps_is_said(place: Path) -> None:
    """Otherwise a night of two steps looks as it was planned."""
    data = place / "leakaudit-example/data.jsonl"
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:2]))
    assert "3 steps wanted, and the data gives 2 full batches" in night(place).stderr


def test_an_unfinished_night_is_a_gap_for_the_next_one(place: Path) -> None:
    """It never counts as a night."""
    folder_of(place).mkdir(parents=True)
    assert night(place, SECOND).exit_code == 3
    one, two = history(place).records
    assert (one.status, two.status) == ("gap", "audited")
    assert "stopped before its end" in one.reason


def test_a_clock_that_went_back_changes_nothing(place: Path) -> None:
    """The message names the last night and what to do."""
    night(place, SECOND)
    before = sorted(path.name for path in (place / "leakaudit-nights").rglob("*"))
    back = night(place, FIRST)
    assert back.exit_code == 5
    assert "has the clock gone back" in back.stderr
    assert sorted(path.name for path in (place / "leakaudit-nights").rglob("*")) == before


@pytest.mark.parametrize(
    ("at", "name"),
    [
        ("2026-11-02T00:30+01:00", "2026-11-01T0000Z"),  # a time zone
        ("2026-10-25T02:30+02:00", "2026-10-25T0000Z"),  # twice on the day when summer time ends
        ("2026-10-25T02:30+01:00", "2026-10-25T0000Z"),
        ("2026-11-01", "2026-11-01T0000Z"),
    ],
)
def test_the_name_of_a_night_does_not_depend_on_the_zone(at: str, name: str) -> None:
    """Nights are counted in UTC, which has no summer time."""
    from datetime import UTC, datetime, timedelta

    from leakaudit.cli.nights.night import period_of

    moment = datetime.fromisoformat(at)
    assert period_of(moment if moment.tzinfo else moment.replace(tzinfo=UTC), timedelta(days=1)) == name


def test_an_unreadable_record_of_another_night_is_named_and_stays(place: Path) -> None:
    """The night runs; nothing of the record is lost."""
    night(place)
    record = place / "leakaudit-nights/history/2026-11-01T0000Z.json"
    record.write_text("{", encoding="utf-8")
    assert night(place, SECOND).exit_code == 3
    assert record.read_text(encoding="utf-8") == "{"


def test_a_record_of_this_night_by_a_newer_version_is_refused(place: Path) -> None:
    """Nobody can know what it says."""
    night(place)
    record = place / "leakaudit-nights/history/2026-11-01T0000Z.json"
    newer = json.loads(record.read_text(encoding="utf-8")) | {"schema": "leakaudit.night/2.0"}
    record.write_text(json.dumps(newer), encoding="utf-8")
    refused = night(place)
    assert refused.exit_code == 5
    assert "a newer leakaudit wrote it" in refused.stderr
    assert json.loads(record.read_text(encoding="utf-8")) == newer


def test_a_full_disk_loses_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command records the audit when there is room."""
    from leakaudit.history import nights

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(nights, "write_atomic", full)
        failed = night(place)
    assert failed.exit_code == 5
    assert "No space left on device" in failed.stderr
    assert not history(place).records
    results = (folder_of(place) / "results.json").read_bytes()
    assert night(place).exit_code == 3
    assert (folder_of(place) / "results.json").read_bytes() == results
    assert [record.status for record in history(place).records] == ["audited"]


def test_old_nights_are_removed_and_their_records_stay(place: Path) -> None:
    """Retention is in the configuration."""
    configure(place, keep="1d")
    night(place)
    night(place, "2026-11-03")
    assert not folder_of(place).exists()
    assert [record.night for record in history(place).records] == ["2026-11-01T0000Z", "2026-11-03T0000Z"]


def test_the_command_of_the_user_gets_the_night(place: Path) -> None:
    """On its standard input, as one JSON document without marks of steps."""
    told = place / "told.json"
    program = f"import pathlib, sys; pathlib.Path({str(told)!r}).write_text(sys.stdin.read())"
    configure(place, notify_command=[sys.executable, "-c", program])
    night(place)
    document = json.loads(told.read_text(encoding="utf-8"))
    assert (document["verdict"], document["exit_code"]) == ("FAIL", 3)
    assert "units" not in document


@pytest.mark.parametrize("command", [["/nowhere/at-all"], [sys.executable, "-c", "raise SystemExit(9)"]])
def test_a_command_that_fails_changes_no_verdict(place: Path, command: list[str]) -> None:
    """The night says so."""
    configure(place, notify_command=command)
    done = night(place)
    assert done.exit_code == 3
    assert "notify_command" in done.stderr


def test_a_night_worse_than_the_baseline_fails(place: Path) -> None:
    """Although its own policy decides nothing: no step of the baseline leaked."""
    from leakaudit.gate.evaluate import evaluate
    from leakaudit.gate.policy import load_policy
    from leakaudit.history.baseline import baseline_of, save
    from leakaudit.history.rates import rates_of
    from leakaudit.plugins.names import registered_names
    from leakaudit.results.files import load_results

    policy = place / "policy.yaml"
    rules = [
        {"id": "shown", "event": "exact_sentence", "max_rate": 0.05, "level": "warn"},
        {"id": "open", "event": "exact_sentence", "max_rate": 0.05, "scope": {"attack": ["embedding-rows"]}},
    ]
    policy.write_text(
        yaml.safe_dump({"schema": "leakaudit.policy/1", "name": "test", "rules": rules}), encoding="utf-8"
    )
    source = {"model": "leakaudit-example/model", "data": "leakaudit-example/data.jsonl", "steps": 8}
    configure(place, policy="policy.yaml", simulate=source)
    first = night(place)
    assert first.exit_code == 4, first.output
    results = load_results(folder_of(place))
    own = load_policy(policy, registered_names())
    from datetime import UTC, datetime

    saved = baseline_of(results, own, evaluate(results, own, now=datetime.now(UTC)))
    keys = history(place).records[0].keys
    clean = tuple(
        rate.model_copy(update={"k": 0, "fresh_k": 0, "n": 200, "fresh_n": 200}) for rate in rates_of(results, own)
    )
    save(saved.model_copy(update={"keys": keys, "rates": clean}).with_digest(), place / "leakaudit.baseline.json")
    done = night(place, SECOND)
    two = history(place).records[1]
    assert (done.exit_code, two.worse, two.baseline) == (3, True, saved.run)
    assert "worse than the baseline" in done.stdout


def _process(place: Path, at: str = FIRST) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "leakaudit", "nightly", "--config", str(place / "nightly.yaml"), "--at", at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_night_goes_on_and_every_unit_counts_once(place: Path) -> None:
    """SIGKILL leaves the finished attempts; the next start runs the rest."""
    journal = folder_of(place) / "journal.jsonl"
    process = _process(place)
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 2):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not history(place).records
    done = night(place)
    assert done.exit_code == 3
    assert "it goes on" in done.stderr
    (record,) = history(place).records
    assert (record.steps, len(set(record.units))) == (STEPS, STEPS)
    whole = place / "whole"
    whole.mkdir()
    shutil.copytree(place / "leakaudit-example", whole / "leakaudit-example")
    configure(whole)
    shutil.copytree(
        place / "leakaudit-nights/history",
        whole / "leakaudit-nights/history",
        ignore=lambda *_: ["2026-11-01T0000Z.json"],
    )
    night(whole)
    assert same_results(folder_of(place)) == same_results(folder_of(whole))


def test_two_at_once_are_one_night(place: Path) -> None:
    """The second start ends with a message and its own exit code."""
    from leakaudit.storage.locks import lock_folder

    (place / "leakaudit-nights").mkdir()
    held = lock_folder(place / "leakaudit-nights")
    try:
        second = night(place)
    finally:
        os.close(held)
    assert second.exit_code == 7
    assert "another process runs a night there" in second.stderr
    assert not history(place).records
