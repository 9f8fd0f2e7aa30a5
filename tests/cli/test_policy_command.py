"""`leakaudit policy check|show|diff|init`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from leakaudit.cli import main
from leakaudit.cli.policy import FILE, PRESETS
from leakaudit.config.strict_yaml import parse_yaml
from leakaudit.gate.policy import Policy, default_policy
from leakaudit.gate.policy_text import preset_names
from leakaudit.reports.escaping import plain

GOOD = "schema: leakaudit.policy/1\nname: p\nrules:\n  - id: a\n    event: exact_sequence\n    max_count: 0\n"
WEAK = GOOD + "evidence: {max_age: 400d}\n"
WRONG = GOOD.replace("max_count", "max_cuont")


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["policy", *words])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_check_reads_the_policy_of_the_folder(here: Path) -> None:
    """The last line says how many steps it takes.

    It also names the digest that the verdict repeats.
    """
    assert (missing := run("check")).exit_code == 2 and "leakaudit policy init" in missing.stderr
    (here / FILE).write_text(GOOD)
    done = run("check")
    digest = parse_yaml(GOOD, Policy, "p").digest
    assert (done.exit_code, done.stdout) == (0, f"ok: 1 rule, 1 need at least 59 steps, digest {digest}\n")


def test_a_wrong_policy_ends_with_2_and_names_its_lines(here: Path) -> None:
    """Every mistake at once, on stderr; with --json in one document as well."""
    (here / "p.yaml").write_text(WRONG + "owner: 5\n")
    done = run("check", "p.yaml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.count("p.yaml:") == 2 and "p.yaml:6: unknown key 'max_cuont'; did you mean" in done.stderr
    told = json.loads(run("check", "p.yaml", "--json").stdout)
    assert (told["ok"], told["exit"], told["error"]) == (False, 2, "WrongFileError")
    assert [(one["line"], one["key"]) for one in told["problems"]] == [(6, "rules[0].max_cuont"), (7, "owner")]


def test_a_weak_policy_is_valid_unless_strict(here: Path) -> None:
    """A warning names line, key, what to do and the check."""
    (here / "p.yaml").write_text(WEAK)
    done, strict = run("check", "p.yaml"), run("check", "p.yaml", "--strict")
    assert (done.exit_code, strict.exit_code) == (0, 2)
    assert done.stdout.startswith("warning: p.yaml:7: evidence.max_age: results may be 400d old")
    assert "[old-evidence]" in done.stdout and done.stdout.splitlines()[-1].startswith("ok: 1 warning, ")
    assert strict.stdout.splitlines()[-1].startswith("refused (--strict): 1 warning, ")
    told = json.loads(run("check", "p.yaml", "--json").stdout)
    [warning] = told["warnings"]
    assert (warning["id"], warning["line"], warning["key"]) == ("old-evidence", 7, "evidence.max_age")
    assert told["ok"] and told["digest"] == parse_yaml(WEAK, Policy, "p").digest


def test_the_configuration_says_which_attacks_will_run(here: Path) -> None:
    """Without it the same policy has no warning."""
    (here / "p.yaml").write_text(GOOD)
    (here / "leakaudit.yaml").write_text("attacks: [llg, {name: idlg}]\n")
    assert run("check", "p.yaml", "--strict").exit_code == 0
    done = run("check", "p.yaml", "--strict", "--config", "leakaudit.yaml")
    assert done.exit_code == 2 and "[cannot-trigger]" in done.stdout
    (here / "leakaudit.yaml").write_text("attacks: [span, other-attack]\n")
    (here / "q.yaml").write_text(GOOD + "    scope: {attack: other-attack}\n")
    assert run("check", "q.yaml").exit_code == 2
    assert run("check", "q.yaml", "--config", "leakaudit.yaml").exit_code == 0


def test_what_show_prints_check_accepts(here: Path) -> None:
    """Without a file it is the built-in policy, to the digest."""
    for words in (["show"], ["show", "--origin"]):
        text = run(*words).stdout
        assert parse_yaml(text, Policy, "shown").digest == default_policy().digest
    (here / "p.yaml").write_text(WEAK)
    shown = run("show", "p.yaml", "--origin").stdout
    assert '  max_age: "400d"  # file line 7\n' in shown and "  min_steps: 59  # default\n" in shown
    (here / "q.yaml").write_text(shown)
    assert parse_yaml(shown, Policy, "q").digest == parse_yaml(WEAK, Policy, "p").digest
    assert run("check", "q.yaml").exit_code == 0


def test_diff_ends_with_3_if_something_is_looser(here: Path) -> None:
    """A pipeline can then ask for a second pair of eyes."""
    (here / "old.yaml").write_text(GOOD)
    (here / "new.yaml").write_text(WEAK)
    looser, tighter, same = (
        run("diff", "old.yaml", "new.yaml"),
        run("diff", "new.yaml", "old.yaml"),
        run("diff", "old.yaml", "old.yaml"),
    )
    assert (looser.exit_code, tighter.exit_code, same.exit_code) == (3, 0, 0)
    assert looser.stdout == "evidence.max_age 7d -> 400d: looser\n1 looser, 0 tighter, 0 neither\n"
    assert tighter.stdout.startswith("evidence.max_age 400d -> 7d: tighter\n")
    assert same.stdout.startswith("no difference: ")
    told = json.loads(run("diff", "old.yaml", "new.yaml", "--json").stdout)
    assert (told["looser"], told["exit"], told["changes"][0]["direction"]) == (True, 3, "looser")
    assert run("diff", "built-in", "old.yaml").exit_code == 3  # seven rules fewer
    (here / "new.yaml").write_text(WRONG)
    assert run("diff", "old.yaml", "new.yaml").exit_code == 2


def test_diff_reads_what_git_keeps(here: Path) -> None:
    """`HEAD:policy.yaml` is the committed one, whatever lies in the folder."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    (here / "policy.yaml").write_text(GOOD)
    git("init", "-q")
    git("add", "policy.yaml")
    git("commit", "-qm", "policy")
    (here / "policy.yaml").write_text(WEAK)
    assert run("diff", "HEAD:policy.yaml", "policy.yaml").exit_code == 3
    for name in ("HEAD:other.yaml", "elsewhere:policy.yaml", "-x:policy.yaml", "missing.yaml"):
        done = run("diff", "--", name, "policy.yaml")
        assert done.exit_code == 2 and f"{name}: no such file" in done.stderr, name


def test_init_writes_a_policy_that_check_accepts(here: Path) -> None:
    """It never overwrites a file unasked."""
    assert sorted(PRESETS) == list(preset_names())
    for preset in PRESETS:
        assert run("init", "--preset", preset, "-o", f"{preset}.yaml").exit_code == 0
        assert run("check", f"{preset}.yaml", "--strict").exit_code == 0, preset
        assert run("init", "--preset", preset, "-o", "-").stdout == (here / f"{preset}.yaml").read_text(
            encoding="utf-8"
        )
    (here / FILE).write_text("mine")
    refused = run("init")
    assert refused.exit_code == 2 and "--force" in refused.stderr and (here / FILE).read_text() == "mine"
    assert run("init", "--force").exit_code == 0 and run("check", "--strict").exit_code == 0
    assert "cannot be written" in run("init", "-o", "none/p.yaml").stderr


def test_what_a_file_holds_cannot_steer_a_terminal(here: Path) -> None:
    """A rule's names come from a file that somebody else may have written."""
    steering = GOOD + 'owner: "\\e[2J"\n'
    (here / "p.yaml").write_text(steering)
    done = run("diff", "built-in", "p.yaml")
    assert "\x1b" not in done.stdout and plain("\x1b[2J") in done.stdout
