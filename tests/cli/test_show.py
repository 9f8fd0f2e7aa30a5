"""`leakaudit show`: the audit, a rule, a step and an attack on one screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from leakaudit.cli import main
from leakaudit.results.files import to_json, with_digest
from tests.support.factories import audit


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the folder of an audit with 2 leaks in 20 steps."""
    (tmp_path / "results.json").write_text(json.dumps(to_json(audit(2, 18))), encoding="utf-8")
    return tmp_path


def shown(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, ["show", *map(str, arguments)], catch_exceptions=False)


def test_the_audit_fits_in_eighty_columns(run_dir: Path) -> None:
    """No line of the overview is longer than the terminal is wide."""
    done = shown(run_dir)
    assert done.exit_code == 0, done.stderr
    assert "span" in done.stdout.lower() and max(map(len, done.stdout.splitlines())) <= 80


def test_an_attack_shows_its_leaks_first(run_dir: Path) -> None:
    """The attempts with a leak event stand above the others, and all are counted."""
    title, first, second, third, *_ = shown(run_dir, "attack", "span").stdout.splitlines()
    assert title == "attack span: 20 attempts, 2 with a leak event"
    assert "exact_sentence" in first and "exact_sentence" in second and third.endswith("no leak event")


def test_a_step_is_named_by_its_number(run_dir: Path) -> None:
    """`step N` shows the attempts of that step and no others."""
    [record] = json.loads(shown(run_dir, "step", audit(2, 18).steps[0].step, "--json").stdout)["attempts"]
    assert record["step"] == audit(2, 18).steps[0].id


def test_a_rule_is_shown_with_its_word(run_dir: Path) -> None:
    """The first line has the word of the rule in the verdict, and its id."""
    rule = json.loads(shown(run_dir, "--json").stdout)["verdict"]["rules"][0]["id"]
    assert shown(run_dir, "rule", rule).stdout.splitlines()[0].endswith(rule)


@pytest.mark.parametrize("part", ["rule", "step", "attack"])
def test_an_unknown_name_lists_the_known_ones(part: str, run_dir: Path) -> None:
    """The message says what the audit has, and the exit code is that of a usage error."""
    done = shown(run_dir, part, "999999")
    assert done.exit_code == 2 and f"this audit has no {part} '999999'; it has " in done.stderr


def test_the_matrix_is_in_the_data(run_dir: Path) -> None:
    """`--json` has each attack under each defence with its state and its scores."""
    [cell] = json.loads(shown(run_dir, "--json").stdout)["matrix"]
    assert (cell["attack"], cell["defense"], cell["state"]) == ("span", "none", "text leaked")
    assert cell["summary"]["steps"] == 20 and "scores" in cell["summary"]


def test_attempts_have_their_scores_in_the_data(run_dir: Path) -> None:
    """`--json` has what the terminal leaves out."""
    records = json.loads(shown(run_dir, "attack", "span", "--json").stdout)["attempts"]
    assert len(records) == 20 and all("scores" in record for record in records)


def test_long_names_are_cut_and_the_cut_is_said(tmp_path: Path) -> None:
    """Each attempt has one line of 80 columns with its whole outcome."""
    long = "gaussian-noise(clip=1.0, scale=0.001, kind=a-very-long-name-of-a-kind)"
    found = audit(2, 18)
    attempts = tuple(one.model_copy(update={"defense": long}) for one in found.attempts)
    battery = found.run.battery.model_copy(update={"defenses": (long,)})
    run = found.run.model_copy(update={"battery": battery})
    changed = with_digest(found.model_copy(update={"attempts": attempts, "run": run}))
    (tmp_path / "results.json").write_text(json.dumps(to_json(changed)), encoding="utf-8")
    lines = shown(tmp_path, "attack", "span").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "exact_sentence" in lines[1] and "span under gaussian-noise(" in lines[1] and "…" in lines[1]
    assert lines[-1] == "… stands for a part of a long name; --json has the whole"


def test_results_that_cannot_be_read_end_with_five(tmp_path: Path) -> None:
    """A damaged file is no usage error."""
    (tmp_path / "results.json").write_text("{", encoding="utf-8")
    done = shown(tmp_path)
    assert done.exit_code == 5 and "results.json" in done.stderr
