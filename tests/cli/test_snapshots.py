"""`leakaudit snapshots` and `worker`: output, refusals, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest

from leakaudit.cli import main
from leakaudit.config.audit import AuditConfig, load_config
from leakaudit.storage.encryption import new_identity
from leakaudit.storage.spool_files import Totals
from tests.audit import test_worker
from tests.storage import test_retention, test_spool
from tests.storage.test_retention import audited
from tests.support.snapshots import edit_manifest


def call(*words: object, given: str = "") -> click.testing.Result:
    """Run a command in this process."""
    return click.testing.CliRunner().invoke(main, [str(word) for word in words], input=given)


@pytest.mark.parametrize("place", ["audit", "audit/spool"])
def test_ls_says_what_is_there_and_when_it_goes(tmp_path: Path, place: str) -> None:
    """Given the audit's folder or the spool in it; for people and for machines."""
    spool = audited(tmp_path, 2.0, 30.0, -90.0)
    call("snapshots", "hold", spool.root, "--step", 1, "--reason", "case 17")
    said = call("snapshots", "ls", tmp_path / place)
    assert said.exit_code == 0
    rows = [" ".join(line.split()) for line in said.stdout.splitlines()]
    size = rows[1].split(" MB")[0].split()[-1]
    assert rows[0] == "step state age size opens with goes"
    assert rows[1] == f"0 kept 2 d {size} MB no key: in clear in 5 d"
    assert rows[2] == f"1 kept 30 d {size} MB no key: in clear held: case 17"
    assert rows[3] == f"2 kept unknown {size} MB no key: in clear by hand only: its age is unknown"
    assert rows[4].startswith("3 snapshots, ")
    listed = json.loads(call("snapshots", "ls", tmp_path / place, "--json").stdout)["snapshots"]
    assert [item["held"] for item in listed] == ["", "case 17", ""]
    assert listed[2]["age_s"] is None and listed[0]["bytes"] > 100_000


def test_an_empty_spool_and_no_spool_at_all_are_told_apart(tmp_path: Path) -> None:
    """The second is a mistake: exit 2, and what to give instead."""
    spool = test_worker.make(tmp_path)
    assert call("snapshots", "ls", spool.root).stdout == f"no snapshots in {spool.root}\n"
    said = call("snapshots", "ls", tmp_path)
    assert said.exit_code == 2 and "is no spool (no audit.json)" in said.stderr


def test_purge_keeps_what_is_young_and_says_how_to_remove_it(tmp_path: Path) -> None:
    """With a rehearsal first."""
    spool = audited(tmp_path, 1.0, 1.0)
    said = call("snapshots", "purge", spool.root)
    assert said.stdout == (
        "0 snapshots removed (0.0 MB)\nonly those older than 7 d go; --all or --step N removes others\n"
    )
    said = call("snapshots", "purge", spool.root, "--older-than", "12h", "--dry-run")
    assert said.stdout.startswith("2 snapshots would be removed (") and len(spool.entries()) == 2
    assert call("snapshots", "purge", spool.root, "--step", 1).stdout.startswith("1 snapshot removed")
    said = call("snapshots", "purge", spool.root, "--all")
    assert "1 snapshot removed" in said.stdout and "the key of the run's hashes is destroyed" in said.stdout
    assert spool.entries() == []


def test_purge_says_what_is_held_and_what_is_in_use(tmp_path: Path) -> None:
    """As numbers for machines."""
    spool = test_worker.make(tmp_path, 1, 2, finished=False)
    call("snapshots", "hold", spool.root, "--step", 2, "--reason", "case 17")
    (spool.root / "000003.tmp").mkdir()
    said = call("snapshots", "purge", spool.root, "--all", "--dry-run")
    assert said.stdout.endswith("; 1 held: case 17; 1 in use\n")
    done = json.loads(call("snapshots", "purge", spool.root, "--all", "--json").stdout)
    assert done["removed"] == ["000001.ready"] and done["held"] == ["000002.ready"] and done["in_use"] == ["000003.tmp"]
    assert done["key_destroyed"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("purge", "--older-than", "soon"), "write a number and d, h, m or s, such as 7d"),
        (("purge", "--older-than", "7d", "--all"), "--older-than does not go with --all or --step"),
        (("purge", "--step", "9"), "no snapshot of step 9; there are: 0"),
        (("hold",), "--reason is missing"),
        (("hold", "--reason", " "), "--reason is missing"),
        (("verify", "--identity", "nowhere"), "nowhere: cannot be read as a private key (FileNotFoundError)"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    """On one line, exit 2, nothing done."""
    spool = audited(tmp_path, 1.0)
    said = call("snapshots", words[0], spool.root, *words[1:])
    assert said.exit_code == 2 and message in said.stderr and said.stderr.count("\n") == 1
    assert len(spool.entries()) == 1


def test_hold_and_release(tmp_path: Path) -> None:
    """Of one step, and of everything."""
    spool = audited(tmp_path, 30.0, 30.0)
    assert call("snapshots", "hold", spool.root, "--step", 0, "--reason", "x").stdout.startswith("1 snapshot held;")
    said = call("snapshots", "hold", spool.root, "--reason", "y").stdout
    assert said == "2 snapshots held, and whatever else comes into this spool; --release takes it off again\n"
    assert call("snapshots", "hold", spool.root, "--release").stdout.startswith("2 snapshots released;")
    assert call("snapshots", "purge", spool.root).stdout.startswith("2 snapshots removed")


def test_verify_says_which_snapshots_have_no_digest_of_their_manifest(tmp_path: Path) -> None:
    """An earlier version wrote them."""
    spool = audited(tmp_path, 1.0, 2.0)
    assert "digest" not in call("snapshots", "verify", spool.root).stdout
    edit_manifest(spool.entries()[0], lambda raw: raw.update(schema="leakaudit.snapshot/1.3"))
    said = call("snapshots", "verify", spool.root)
    assert said.exit_code == 0 and "0 problems; 1 of an earlier version, which wrote no digest" in said.stdout


def test_verify_exits_5_where_something_is_wrong(tmp_path: Path) -> None:
    """And names it."""
    spool = audited(tmp_path, 1.0, 1.0)
    said = call("snapshots", "verify", spool.root)
    assert (said.exit_code, said.stdout) == (0, "2 snapshots checked, 0 problems\n")
    (spool.snapshot_folder(1).with_suffix(".kept") / "truth.safetensors").unlink()
    said = call("snapshots", "verify", spool.root)
    assert said.exit_code == 5 and "000001.kept: " in said.stdout and "truth.safetensors is missing" in said.stdout
    assert said.stdout.endswith("2 snapshots checked, 1 problem\n")
    found = json.loads(call("snapshots", "verify", spool.root, "--json").stdout)
    assert found["checked"] == 2 and [problem["name"] for problem in found["problems"]] == ["000001.kept"]


def test_encrypted_snapshots_from_keys_to_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys from keygen to results: verify, worker and run, with wrong keys, too."""
    made = call("snapshots", "keygen", tmp_path / "key")
    public = made.stdout.strip()
    assert public.startswith("age1") and "without it nobody can open" in made.stderr
    call("snapshots", "keygen", tmp_path / "other")
    spool = test_worker.make(tmp_path, encrypt_to=(public,), finished=False, keep_snapshots=True)
    test_retention.put_sealed(spool, 1, "the old dog chased a cat .")
    spool.finish(Totals(total_steps=2, kept=1))
    said = call("snapshots", "verify", spool.root)
    assert said.exit_code == 0 and "1 encrypted and not opened, which takes --identity" in said.stdout
    assert call("snapshots", "verify", spool.root, "--identity", tmp_path / "other").exit_code == 5
    assert call("snapshots", "verify", spool.root, "--identity", tmp_path / "key").exit_code == 0
    said = call("worker", spool.root)
    assert said.exit_code == 2 and f"encrypted to {public}; give a private key with --identity FILE" in said.stderr
    said = call("worker", spool.root, "--identity", tmp_path / "other")
    assert said.exit_code == 2 and "the private key given is not one of these" in said.stdout
    assert [path.name for path in spool.entries()] == ["000001.ready"], "it is nobody's fault, and not lost"
    said = call("worker", tmp_path / "audit", "--identity", "-", given=(tmp_path / "key").read_text())
    assert said.exit_code == 0, said.output
    assert (tmp_path / "audit" / "results.json").is_file()
    monkeypatch.setenv("LEAKAUDIT_IDENTITY", str(tmp_path / "key"))
    (tmp_path / "quick.yaml").write_text("attacks: [embedding-rows]\ncontrols: 0\n")
    again = ("run", spool.root, "--out", tmp_path / "again", "--config", tmp_path / "quick.yaml")
    said = call(*again)
    assert said.exit_code == 0, said.output
    monkeypatch.delenv("LEAKAUDIT_IDENTITY")
    said = call(*again)
    assert said.exit_code == 5 and "give the private key with --identity FILE" in said.stderr


def test_a_worker_of_a_trainer_on_another_machine_stops_when_nothing_comes(tmp_path: Path) -> None:
    """Kept steps are audited, and the results say that the run did not end."""
    spool = test_worker.make(tmp_path, 1, finished=False)
    test_spool.edit_audit(spool, trainer_host="elsewhere")
    assert call("worker", spool.root, "--idle-limit", "0.3").exit_code == 0
    results = json.loads((tmp_path / "audit" / "results.json").read_text())
    assert results["run"]["interrupted"] is True and len(results["steps"]) == 1
    said = call("worker", spool.root, "--device", "gpu")
    assert said.exit_code == 2 and "device 'gpu': expected auto, cpu, cuda or cuda:1" in said.stderr


def test_an_age_that_is_no_length_of_time_is_refused(tmp_path: Path) -> None:
    """The message names the option and gives an example."""
    spool = audited(tmp_path)
    for text in ("", "7", "d7", "-1d", "1 week"):
        said = call("snapshots", "purge", spool.root, "--older-than", text)
        assert said.exit_code == 2 and "--older-than: " in said.stderr and "such as 7d" in said.stderr


PAGE = Path(__file__).parents[2] / "docs" / "side_process.md"


def blocks(kind: str) -> list[str]:
    """Return the code blocks of the page."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_configurations_on_the_page_are_valid(tmp_path: Path) -> None:
    """Each is read as a user's file would be."""
    assert len(blocks("yaml")) == 3
    for block in blocks("yaml"):
        (tmp_path / "audit.yaml").write_text(block.replace("age1...", new_identity()[0]))
        config = load_config(tmp_path / "audit.yaml")
        assert config != AuditConfig()


def test_the_commands_on_the_page_exist_with_their_options() -> None:
    """Folder, key and step are what they stand for; nothing is run."""
    commands = [line.split("#")[0].split() for block in blocks("sh") for line in block.splitlines() if line.strip()]
    assert len(commands) == 10
    for program, *words in commands:
        assert program == "leakaudit"
        group: Any = main
        while isinstance(group, click.Group):
            group = group.commands[words.pop(0)]
        known = {option for parameter in group.params for option in parameter.opts}
        named = {word for word in re.split(r"[\s\[\]|]+", " ".join(words)) if word.startswith("--")}
        assert named <= known, (group.name, named - known)


def test_the_page_has_every_way_of_scheduling() -> None:
    """With the names that the configuration knows."""
    text = PAGE.read_text(encoding="utf-8")
    for field in ("schedule", "at_end"):
        for value in AuditConfig.model_json_schema()["properties"][field]["enum"]:
            assert f"`{value}`" in text, (field, value)
