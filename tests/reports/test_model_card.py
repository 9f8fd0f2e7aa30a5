"""The section for a model's card: figures with their limits, and no promise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from leakaudit.cli import main
from leakaudit.errors import ResultsError
from leakaudit.gate.evaluate import unreadable
from leakaudit.gate.verdict import Status
from leakaudit.reports import outputs
from leakaudit.results.files import to_json
from leakaudit.results.schema import Coverage, NotTested, Results
from tests.reports.test_outputs import HOSTILE, SITUATIONS, hostile, verdict_of
from tests.support.factories import NOW, attempt, audit, changed, policy, results, step

DEFENCE = "gaussian-noise(scale=0.1)"


def card(found: Results) -> dict[str, str]:
    """Return the lines of a card by their names."""
    text = outputs.model_card(found, verdict_of(found))
    return dict(re.findall(r"^- \*\*(.+?):\*\* (.*)$", text, re.MULTILINE))


def sent_and_produced() -> Results:
    """Return an audit whose updates leaked until something changed them."""
    made = [attempt(i, leaks=True) for i in range(60)]
    steps = [step(i).model_copy(update={"sent": step(i).verification}) for i in range(60)]
    return results(steps, [*made, *(attempt(i, defense="as-sent") for i in range(60))])


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_card_has_eleven_lines_and_promises_nothing(name: str) -> None:
    """It says which verdict, by which policy, and what was not tested."""
    verdict = verdict_of(SITUATIONS[name])
    text = outputs.model_card(SITUATIONS[name], verdict)
    lines = [line for line in text.splitlines() if line]
    assert 6 <= len(lines) <= 11 and lines[0].startswith("### ")
    said = card(SITUATIONS[name])
    assert said["Verdict"].startswith(f"{verdict.verdict} by the policy test policy")
    assert "attacks that are not named here" in said["Not tested"]
    assert str(verdict.results_digest) in said["Dated"] and "2026-11-02" in said["Dated"]
    assert "honest-but-curious server" in said["Adversary"]
    assert not re.search(r"\b(is|are) (private|safe|secure|protected)|anonym|guarantee", text)
    assert "It proves no privacy" in lines[-1]


def test_the_bound_is_that_of_the_update_that_is_sent() -> None:
    """60 clean steps bound the rate by 1 - 0.05 ** (1 / 60) = 4.87 %."""
    assert card(SITUATIONS["clean"])["Worst bound"].startswith(
        "up to 4.9% of the steps (95% upper bound), by rule sent"
    )
    assert card(SITUATIONS["clean"])["Came back"].startswith("nothing of 60 texts, from the update that is sent")
    assert card(SITUATIONS["leaks"])["Came back"].startswith("60 of 60 texts word for word")
    assert card(SITUATIONS["too few"])["Worst bound"].startswith("up to 63.2% of the steps")
    assert "60 client steps" in card(SITUATIONS["clean"])["Attacked"]


def test_without_evidence_there_is_no_bound() -> None:
    """A rule without evidence is not left out: nothing is known of it."""
    found = audit(0, 60)
    verdict = verdict_of(found)
    silent = verdict.rules[0].model_copy(update={"id": "silent", "n": 0})
    with_both = verdict.model_copy(update={"rules": (*verdict.rules, silent)})
    assert "No evidence for silent." in outputs.model_card(found, with_both)
    alone = outputs.model_card(found, verdict.model_copy(update={"rules": (silent,)}))
    assert "**Worst bound:** none, because there is no evidence." in alone


def test_the_contrast_is_named_for_what_it_is() -> None:
    """A figure without a defence is given only where one was measured."""
    assert "no defence is shipped" in card(SITUATIONS["clean"])["For contrast"]
    defended = results([step(i, shipped=DEFENCE) for i in range(60)], [attempt(i) for i in range(60)])
    assert "was not attacked" in card(defended)["For contrast"]
    assert DEFENCE in card(defended)["Came back"]
    both = card(sent_and_produced())
    assert both["For contrast"] == "before it was changed for sending, 60 of 60 texts word for word."
    assert both["Came back"].startswith("nothing of 60 texts")


def test_what_was_not_tested_is_named_and_counted() -> None:
    """Six names, then a number."""
    names = tuple(NotTested(what=f"part {number}", why="") for number in range(9))
    found = changed(SITUATIONS["clean"], coverage=Coverage(not_tested=names, audited_steps=60))
    said = card(found)["Not tested"]
    assert "part 5, 3 more and attacks" in said and "part 6" not in said


def test_evidence_that_cannot_be_judged_has_no_card() -> None:
    """Its figures would mislead."""
    with pytest.raises(ResultsError, match="no card: the evidence cannot be judged: odd"):
        outputs.model_card(SITUATIONS["clean"], unreadable("odd", policy(), now=NOW))


def test_hostile_text_stays_text() -> None:
    """No markup, no mention, no further line."""
    found = changed(
        SITUATIONS["leaks"], coverage=Coverage(not_tested=(NotTested(what=HOSTILE, why=""),), audited_steps=60)
    )
    for status in (Status.FAIL, Status.INCONCLUSIVE, Status.PASS):
        verdict = hostile(verdict_of(found)).model_copy(update={"verdict": status})
        text = outputs.model_card(found, verdict)
        assert not {"\x1b", "\u202e"} & set(text) and len(text.splitlines()) == 12
        assert "<img" not in text.replace(r"\<img", "") and "@octocat" not in text.replace(r"\@", "")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder with the results of a leaking run."""
    (tmp_path / "results.json").write_text(json.dumps(to_json(SITUATIONS["leaks"])))
    return tmp_path


def called(*arguments: Any) -> Any:
    """Call `leakaudit export`."""
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


def test_the_command_prints_or_writes_the_section(run: Path) -> None:
    """It ends with 0: the gate's exit code is the gate's."""
    printed = called("model-card", run)
    assert printed.exit_code == 0 and printed.output.startswith("### Privacy audit")
    assert "FAIL by the policy built-in default" in printed.output
    written = called("model-card", run, "-o", run / "card.md")
    assert written.exit_code == 0 and (run / "card.md").read_text().startswith("### Privacy audit")
    assert called("model-card", run, "-o", run / "missing" / "card.md").exit_code == 5
    (run / "results.json").write_text("{")
    assert called("model-card", run).exit_code == 5
