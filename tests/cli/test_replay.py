"""`leakaudit replay`: an attempt again on a kept snapshot."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from leakaudit.audit.worker import run_worker
from leakaudit.cli import main
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.results.files import load_results, to_json, with_digest
from leakaudit.results.replay_command import replay_command
from leakaudit.results.schema import Attempt, Results
from leakaudit.storage.encryption import write_identity
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import Totals
from tests.support import tiny
from tests.support.factories import audit
from tests.support.snapshots import write_step

TEXT = "the old dog chased a cat ."
NOISE = "gaussian-noise(scale=0.01)"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an audit of steps 1 and 2 that keeps its snapshots."""
    return _audited(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder, to change."""
    shutil.copytree(finished, tmp_path / "audit", symlinks=True)
    return tmp_path / "audit"


def _audited(folder: Path, identities: tuple[str, ...] = (), **more: Any) -> Path:
    config = AuditConfig(
        out_dir=folder / "audit",
        attacks=(PluginSpec(name="span"), PluginSpec(name="embedding-rows"), PluginSpec(name="llg")),
        defenses=(PluginSpec(name="none"), PluginSpec(name="gaussian-noise", options={"scale": 0.01})),
        controls=0,
        device="cpu",
        seed=7,
        keep_snapshots=True,
        attack_recovered_steps=True,
        **more,
    )
    spool = Spool.create(folder / "audit" / "spool", config, tiny.bert_tokenizer())
    for number in (1, 2):
        step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), [TEXT], [1])
        write_step(spool.snapshot_folder(number), step, number, spool.keys.recipients if spool.keys else ())
    spool.finish(Totals(total_steps=10, kept=2))
    assert run_worker(spool.root, identities=identities) == 0
    return folder / "audit"


def replayed(run_dir: Path, *more: str, step: int = 2, attack: str = "span") -> Result:
    words = ["replay", str(run_dir), "--step", str(step), "--attack", attack, *more]
    return CliRunner().invoke(main, words, catch_exceptions=False)


def _changed(run_dir: Path, change: Callable[[Attempt], Attempt], **run: Any) -> None:
    """Change the attempts of stored results, and facts of the run, under a new digest."""
    found = load_results(run_dir)
    attempts = tuple(map(change, found.attempts))
    changed = found.model_copy(update={"attempts": attempts, "run": found.run.model_copy(update=run)})
    (run_dir / "results.json").write_text(json.dumps(to_json(with_digest(changed))), encoding="utf-8")


@pytest.mark.parametrize("attack", ["span", "embedding-rows", "llg"])
@pytest.mark.parametrize("defense", ["none", NOISE])
def test_every_attempt_is_the_same_again(attack: str, defense: str, finished: Path) -> None:
    """With noise too: the seeds are those of the audit."""
    done = replayed(finished, "--defense", defense, "--json", attack=attack)
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["equal"] and found["differences"] == []
    assert found["again"]["status"] == "ran" and found["compared"] > 10 and found["seed"] == 7


def test_no_file_is_changed_and_none_is_left(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the audit's folder and writes nothing into it.

    Its temporary folder holds no text, either.
    """
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    written: list[str] = []
    clean_up = tempfile.TemporaryDirectory.cleanup

    def seen(self: tempfile.TemporaryDirectory[str]) -> None:
        written.extend(path.read_text(errors="replace") for path in Path(self.name).rglob("*") if path.is_file())
        clean_up(self)

    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", seen)

    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(run_dir.rglob("*")) if path.is_file()}

    before, key = content(), json.loads((run_dir / "state.json").read_text())["key"]
    assert len(key) == 64
    assert replayed(run_dir, "--text", "full").exit_code == 0
    assert content() == before
    assert written and not any("chased" in text or key in text for text in written)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_text_is_masked_unless_it_is_asked_for(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strip says how much came back; `--text full` shows the words."""
    monkeypatch.delenv("CI", raising=False)
    masked = replayed(finished)
    assert masked.exit_code == 0 and "EQUAL" in masked.stdout and "████████████████" in masked.stdout
    assert "dog" not in masked.output
    assert "the old dog chased a cat ." in replayed(finished, "--text", "full").stdout


def test_another_score_is_named(run_dir: Path) -> None:
    """A stored number that does not come back is a difference.

    The exit code is 3.
    """
    _changed(run_dir, lambda one: one.model_copy(update={"events": ("label_counts",)}))
    done = replayed(run_dir)
    assert done.exit_code == 3 and "DIFFERS" in done.stdout
    assert "events: label_counts stored, exact_sequence, all_words, label_counts again" in " ".join(done.stdout.split())


def test_a_difference_on_another_version_is_undecided(run_dir: Path) -> None:
    """Nobody can say whether the results or the version are the cause."""
    _changed(run_dir, lambda one: one.model_copy(update={"events": ()}), tool="0.0.1")
    done = replayed(run_dir)
    assert done.exit_code == 4 and "may be the cause: the run was audited by version 0.0.1" in " ".join(
        done.stdout.split()
    )


def test_another_snapshot_is_noticed(run_dir: Path) -> None:
    """A snapshot of another text in its place is not the audited one."""
    place = run_dir / "spool" / "000002.kept"
    shutil.rmtree(place)
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["a cat saw the dog ."], [1])
    write_step(place, step, 2)
    done = replayed(run_dir, "--json")
    assert done.exit_code == 3
    assert {"step.snapshot", "sequences.0.hmac"} <= {one["what"] for one in json.loads(done.stdout)["differences"]}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"step": 40}, "this audit has no step 40; near it are 1, 2"),
        ({"attack": "spam"}, "step 2 has no attack 'spam'; did you mean span? it has embedding-rows, llg, span"),
        ({"more": ("--defense", "gaussian-noise")}, f"did you mean {NOISE}? it has none, {NOISE}"),
    ],
)
def test_an_unknown_name_lists_near_ones(words: dict[str, Any], says: str, finished: Path) -> None:
    """The exit code is that of a usage error."""
    done = replayed(finished, *words.pop("more", ()), **words)
    assert done.exit_code == 2 and says in done.stderr


def test_a_snapshot_that_is_gone_says_how_to_keep_it(run_dir: Path) -> None:
    """And which ones are there."""
    shutil.rmtree(run_dir / "spool" / "000002.kept")
    done = replayed(run_dir)
    assert done.exit_code == 2
    assert "its snapshot is gone; `keep_snapshots: true`" in done.stderr and "steps 1" in done.stderr
    shutil.rmtree(run_dir / "spool")
    assert "holds no snapshots" in replayed(run_dir).stderr


def test_a_simulation_names_the_command_that_repeats_it(tmp_path: Path) -> None:
    """It keeps no snapshots."""
    found = audit(2, 2)
    command = "leakaudit simulate <path> --steps 4"
    run = found.run.model_copy(update={"simulated": True, "command": command})
    document = to_json(with_digest(found.model_copy(update={"run": run})))
    (tmp_path / "results.json").write_text(json.dumps(document), encoding="utf-8")
    done = replayed(tmp_path, step=found.steps[0].step)
    assert done.exit_code == 2 and command in done.stderr


def test_an_attempt_that_did_not_run_says_why(run_dir: Path) -> None:
    """There is nothing to make again."""
    skipped = {"status": "not_needed", "reason": "span had recovered every text of this step"}
    _changed(run_dir, lambda one: Attempt.model_validate({**one.model_dump(), **skipped}))
    done = replayed(run_dir, attack="embedding-rows")
    assert done.exit_code == 2 and "did not run, so there is nothing to replay: span had recovered" in done.stderr


def test_an_encrypted_snapshot_needs_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key the message names the option.

    With it, the attempt is the same again.
    """
    pytest.importorskip("pyrage")
    monkeypatch.delenv("LEAKAUDIT_IDENTITY", raising=False)
    public = write_identity(tmp_path / "key")
    private = next(line for line in (tmp_path / "key").read_text().splitlines() if line.startswith("AGE-"))
    run_dir = _audited(tmp_path, (private,), encrypt_to=(public,))
    refused = replayed(run_dir)
    assert refused.exit_code == 2 and "--identity" in refused.stderr
    assert replayed(run_dir, "--identity", str(tmp_path / "key")).exit_code == 0


def _first(results: Results) -> Attempt:
    return next(one for one in results.attempts if one.leaked)


def test_the_command_is_named_while_the_snapshot_is_kept(run_dir: Path) -> None:
    """`show` prints it with the folder; without the snapshot there is none."""
    results = load_results(run_dir)
    command = replay_command(results, _first(results), run_dir)
    assert command == "leakaudit replay RUN --step 1 --attack span --defense none"
    shown = CliRunner().invoke(main, ["show", str(run_dir), "step", "1"])
    assert f"again: leakaudit replay {run_dir} --step 1 --attack span" in shown.stdout
    shutil.rmtree(run_dir / "spool")
    assert replay_command(results, _first(results), run_dir) is None
    assert "again:" not in CliRunner().invoke(main, ["show", str(run_dir), "step", "1"]).stdout


def test_the_report_names_the_command_of_its_worst_case(run_dir: Path) -> None:
    """While the snapshot is there; the command has no path."""

    def page() -> str:
        done = CliRunner().invoke(main, ["report", str(run_dir)])
        assert done.exit_code == 0, done.output
        return (run_dir / "report.html").read_text(encoding="utf-8")

    command = "<code>leakaudit replay RUN --step 1 --attack span --defense none</code>"
    other = command.replace("--step 1", "--step 2")
    assert command in page() or other in page()
    shutil.rmtree(run_dir / "spool")
    assert "leakaudit replay" not in page()


def test_the_worker_says_what_was_found_and_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each attempt, with the leaks so far.

    It has the time left as soon as every attack was timed.
    """
    _audited(tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("st-")]
    assert len(lines) == 12
    assert re.search(r"span / none: ran in .* s; 1 of 1 attempt with a leak event$", lines[0]), lines[0]
    assert re.search(r"; \d of 4 attempts with a leak event; about .* left for 2 snapshots$", lines[3]), lines[3]
