"""Waivers: who lets a rule fail, for how long, and what never passes by them."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from leakaudit.cli.gate import gate as gate_command
from leakaudit.errors import ConfigError
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.verdict import Status, Verdict
from leakaudit.gate.waivers import Waivers, parse_waivers
from leakaudit.reports import outputs, redact, render_html
from leakaudit.reports.wording import NOT_BY_ATTACKS, meaning
from leakaudit.results.files import to_json, with_digest
from leakaudit.results.schema import Privacy, Results
from tests.gate.test_imported import found as imported
from tests.support.factories import NOW, audit, policy

TODAY = NOW.astimezone(UTC).date()
RULES: tuple[dict[str, Any], ...] = (
    {"id": "sentence-rate", "event": "exact_sentence", "max_rate": 0.05},
    {"id": "verbatim", "event": "exact_sentence", "max_count": 0, "severity": "critical"},
    {"id": "shown", "event": "exact_sentence", "max_rate": 0.05, "level": "warn"},
)
RATE, RED_LINE, WARNED = RULES
COUNT = RED_LINE | {"severity": "high"}


def waiver(**fields: Any) -> dict[str, Any]:
    """Return a waiver that holds today."""
    return {
        "id": "W-1",
        "rule": "sentence-rate",
        "reason": "the sentences are public",
        "owner": "j.doe (DPO)",
        "created": str(TODAY - timedelta(days=5)),
        "expires": str(TODAY + timedelta(days=30)),
        **fields,
    }


def judged(
    found: Results, *waivers: dict[str, Any], rules: tuple[dict[str, Any], ...] = (RATE,), at: datetime = NOW
) -> Verdict:
    """Return the verdict with waivers."""
    given = Waivers.model_validate({"waivers": list(waivers)})
    return evaluate(found, policy(*rules), now=at, waivers=given)


LEAKS, CLEAN, FEW = audit(60, 0), audit(0, 60), audit(0, 3)


def test_a_waived_rule_has_no_part_in_the_verdict_and_stays_in_sight() -> None:
    """It is named first, with its end, owner and reason."""
    verdict = judged(LEAKS, waiver())
    (rule,) = verdict.rules
    assert (verdict.verdict, verdict.exit_code, rule.status, rule.word) == (Status.PASS, 0, Status.FAIL, "WAIVED")
    assert verdict.sentence.startswith("Rule sentence-rate fails and is waived.")
    assert f"until {TODAY + timedelta(days=30)} by j.doe (DPO) (W-1): the sentences are public" in rule.waived
    (said,) = verdict.waivers
    assert said.state == "applies" and verdict.waivers_digest.startswith("sha256:")


@pytest.mark.parametrize(
    ("found", "rules", "fields", "state"),
    [
        (
            LEAKS,
            (RATE,),
            {"created": str(TODAY - timedelta(days=60)), "expires": str(TODAY - timedelta(days=1))},
            "expired",
        ),
        (LEAKS, (RATE,), {"created": str(TODAY + timedelta(days=1))}, "not yet"),
        (LEAKS, (RATE,), {"ceiling": 0.5}, "over its ceiling"),
        (LEAKS, (RATE,), {"ceiling": 1}, "over its ceiling"),
        (LEAKS, (COUNT,), {"rule": "verbatim", "ceiling": 59}, "over its ceiling"),
        (LEAKS, (RATE,), {"scope": {"defense": "dp-sgd"}}, "no such rule"),
        (LEAKS, (RATE,), {"scope": {"run": "another"}}, "no such rule"),
        (LEAKS, (RATE,), {"rule": "sentence-rates"}, "no such rule"),
        (LEAKS, (RED_LINE,), {"rule": "verbatim"}, "critical"),
        (FEW, (RATE,), {}, "undecided"),
    ],
)
def test_what_a_waiver_cannot_let_through(
    found: Results, rules: tuple[dict[str, Any], ...], fields: dict[str, Any], state: str
) -> None:
    """The verdict is that without it, and the output says why."""
    verdict, without = judged(found, waiver(**fields), rules=rules), judged(found, rules=rules)
    assert verdict.verdict is without.verdict is not Status.PASS
    (said,) = verdict.waivers
    assert said.state == state and "W-1" in said.sentence
    assert not any(rule.waived for rule in verdict.rules)


@pytest.mark.parametrize(
    ("found", "rules", "rule"), [(CLEAN, (RATE,), "sentence-rate"), (CLEAN, (RATE, WARNED), "shown")]
)
def test_a_waiver_that_nothing_needs_is_a_warning(found: Results, rules: tuple[dict[str, Any], ...], rule: str) -> None:
    """It never changes a verdict."""
    verdict = judged(found, waiver(rule=rule), rules=rules)
    assert (verdict.verdict, verdict.waivers[0].state) == (Status.PASS, "unused")


def test_the_last_day_counts_and_the_next_does_not() -> None:
    """Days are those of UTC."""
    last = datetime.combine(TODAY + timedelta(days=1), datetime.min.time(), UTC)
    given = waiver(expires=str(TODAY))
    assert judged(LEAKS, given, at=NOW).verdict is Status.PASS
    assert judged(LEAKS, given, at=last).verdict is Status.FAIL


def test_evidence_that_is_too_old_is_not_waived_with_the_rule() -> None:
    """Where every rule is waived, the age of the audit still counts."""
    late = NOW + timedelta(days=20)
    verdict = judged(LEAKS, waiver(), at=late)
    assert verdict.rules[0].waived and verdict.waivers[0].state == "applies"
    assert verdict.verdict is Status.INCONCLUSIVE and "old" in verdict.sentence


def test_one_waived_rule_leaves_the_others_binding() -> None:
    """A red line beside it decides."""
    verdict = judged(LEAKS, waiver(), rules=(RATE, RED_LINE))
    assert (verdict.verdict, verdict.deciding_rule) == (Status.FAIL, "verbatim")
    assert [rule.word for rule in verdict.rules] == ["FAIL", "WAIVED"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"reason": "  "}, "is blank"),
        ({"owner": ""}, "owner"),
        ({"expires": "2020-01-01"}, "before it is created"),
        ({"expires": str(TODAY + timedelta(days=400))}, "longer than 90 days"),
        ({"ceiling": -1}, "ceiling"),
        ({"ceiling": 60}, r"would hold however much leaks; write a share such as 0\.6"),
        ({"ceiling": 1.0}, "would hold however much leaks"),
        ({"scope": {"run": "6 runs"}}, "is no id of a run"),
        ({"approved": True}, "approved"),
    ],
)
def test_a_waiver_that_says_too_little_is_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    """With file and line."""
    file = tmp_path / "waivers.yaml"
    file.write_text(json.dumps({"schema": "leakaudit.waivers/1", "waivers": [waiver(**fields)]}))
    with pytest.raises(ConfigError, match=said):
        parse_waivers(file.read_text(), str(file), policy(RATE))


def test_a_ceiling_of_a_count_is_a_count() -> None:
    """A rule that counts 60 steps may be waived up to 60, a rate never up to 1."""
    assert judged(LEAKS, waiver(rule="verbatim", ceiling=60), rules=(COUNT,)).verdict is Status.PASS
    said = judged(LEAKS, waiver(rule="verbatim", ceiling=59), rules=(COUNT,)).waivers[0].sentence
    assert "reached 60 steps, above the ceiling of 59 steps" in said


def test_two_waivers_of_one_name_are_refused(tmp_path: Path) -> None:
    """Outputs name them."""
    file = tmp_path / "waivers.yaml"
    file.write_text(json.dumps({"schema": "leakaudit.waivers/1", "waivers": [waiver(), waiver()]}))
    with pytest.raises(ConfigError, match="two waivers are named 'W-1'"):
        parse_waivers(file.read_text(), str(file))


def test_every_output_says_that_a_rule_is_waived() -> None:
    """JUnit skips it, GitHub warns of it, Markdown and the report list it."""
    verdict = judged(LEAKS, waiver())
    suite = ElementTree.fromstring(outputs.junit_xml(verdict))[0]
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    assert all(line.startswith("::warning") for line in outputs.workflow_commands(verdict))
    text = outputs.summary(verdict)
    assert "| WAIVED |" in text and "j.doe (DPO) accepts it until" in text
    assert "open-rules=\n" in outputs.job_outputs(verdict)
    page = render_html(redact(LEAKS, [], verdict))
    assert "WAIVED" in page and "by j.doe (DPO) (W-1): the sentences are public" in page


def test_the_command_reads_waivers_and_rehearses_their_end(tmp_path: Path) -> None:
    """`--at` judges as at another time."""
    (tmp_path / "results.json").write_text(json.dumps(to_json(with_digest(LEAKS))))
    (tmp_path / "policy.yaml").write_text(
        "schema: leakaudit.policy/1\nname: n\nevidence: {max_age: 400d}\n"
        "rules: [{id: sentence-rate, event: exact_sentence, max_rate: 0.05}]\n"
    )
    (tmp_path / "waivers.yaml").write_text(
        "schema: leakaudit.waivers/1\nwaivers:\n  - id: W-1\n    rule: sentence-rate\n    reason: public\n    owner: DPO\n"
        f"    created: {TODAY}\n    expires: {TODAY + timedelta(days=30)}\n"
    )
    common = [
        str(tmp_path),
        "--policy",
        str(tmp_path / "policy.yaml"),
        "--waivers",
        str(tmp_path / "waivers.yaml"),
        "--at",
    ]
    on_time = CliRunner().invoke(gate_command, [*common, str(TODAY + timedelta(days=30))])
    assert on_time.exit_code == 0 and "WAIVED" in on_time.output, on_time.output
    late = CliRunner().invoke(gate_command, [*common, str(TODAY + timedelta(days=31))])
    assert late.exit_code == 3 and "it expired on" in late.output
    assert date.fromisoformat(json.loads((tmp_path / "verdict.json").read_text())["waivers"][0]["expires"]) > TODAY
    assert CliRunner().invoke(gate_command, [*common, "tomorrow"]).exit_code == 2
    assert not (tmp_path / "verdict.json").exists()  # it would be that of another call


def test_an_undecided_verdict_may_be_allowed_and_stays_undecided(tmp_path: Path) -> None:
    """The exit code is 0, and every output says why."""
    (tmp_path / "results.json").write_text(json.dumps(to_json(with_digest(FEW))))
    junit = tmp_path / "junit.xml"
    common = [str(tmp_path), "--at", NOW.isoformat(), "--junit", str(junit)]
    assert CliRunner().invoke(gate_command, common).exit_code == 4
    done = CliRunner().invoke(gate_command, [*common, "--allow", "inconclusive"])
    assert (
        done.exit_code == 0
        and "INCONCLUSIVE" in done.output
        and "The caller allows an undecided verdict" in " ".join(done.output.split())
    )
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["exit_code"], verdict["allowed"]) == ("INCONCLUSIVE", 0, True)
    suite = ElementTree.parse(junit).getroot()[0]
    assert suite.get("failures") == "0" and suite.get("skipped") != "0"


@pytest.mark.parametrize("found", [LEAKS, CLEAN, audit(1, 2)])
def test_allowing_an_undecided_verdict_never_lets_a_leak_through(found: Results) -> None:
    """Nothing changes for FAIL, for PASS, and where texts came back."""
    verdict = judged(found)
    if verdict.verdict is Status.INCONCLUSIVE:
        assert verdict.texts_back
    assert verdict.allowing_inconclusive() == verdict


def test_a_gap_keeps_results_of_others_from_passing_a_waived_audit() -> None:
    """Wrong: PASS by another report alone, although the audit is too old."""
    rules = policy(
        RATE,
        imported=[{"id": "model", "import": "memaudit", "measure": "regurgitation_rate", "max_value": 0.5}],
        evidence={"max_age": "1h"},
    )
    given = Waivers.model_validate({"waivers": [waiver()]})
    stated = imported(0, 200, created_at=NOW.strftime("%Y-%m-%dT%H:%M:%SZ"))
    verdict = evaluate(LEAKS, rules, now=NOW, waivers=given, imported=stated)
    assert {rule.id: rule.word for rule in verdict.rules} == {"sentence-rate": "WAIVED", "model": "PASS"}
    assert verdict.verdict is Status.INCONCLUSIVE and "the policy allows 1h" in verdict.sentence


def test_an_epsilon_above_a_ceiling_is_no_share() -> None:
    """Wrong: `the rule reached 310%`."""
    told = Privacy(epsilon=3.1, delta=1e-5, accountant="opacus rdp", origin="accountant", steps=4)
    verdict = judged(
        audit(0, 60, privacy=(told,)),
        waiver(rule="epsilon", ceiling=0.5),
        rules=(RATE, {"id": "epsilon", "claimed_epsilon": {"max": 1}}),
    )
    assert "reached epsilon 3.1, above the ceiling of epsilon 0.5" in verdict.waivers[0].sentence
    assert meaning(verdict) == NOT_BY_ATTACKS, "nothing was read out of the updates"
