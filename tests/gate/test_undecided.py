"""`on_inconclusive`: until a day, a policy accepts that nothing is decided."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from leakaudit.cli.gate import gate as gate_command
from leakaudit.errors import ConfigError
from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import load_policy
from leakaudit.gate.verdict import Status, Verdict
from leakaudit.reports import outputs
from leakaudit.results.files import to_json, with_digest
from leakaudit.results.schema import Artifact, Results
from tests.support.factories import NOW, audit, policy

TODAY = NOW.astimezone(UTC).date()
FEW, CLEAN, LEAKS = audit(0, 3), audit(0, 60), audit(60, 0)


def allowance(**fields: Any) -> dict[str, Any]:
    """Return an allowance that holds today."""
    return {
        "since": str(TODAY - timedelta(days=10)),
        "until": str(TODAY + timedelta(days=30)),
        "owner": "j.doe (DPO)",
        "reason": "the first runs are short",
        **fields,
    }


def judged(found: Results, at: datetime = NOW, **fields: Any) -> Verdict:
    return gate.evaluate(found, policy(on_inconclusive=allowance(**fields)), now=at)


def midnight(days: int) -> datetime:
    return datetime.combine(TODAY + timedelta(days=days), datetime.min.time(), UTC)


def test_an_undecided_verdict_is_allowed_and_stays_undecided(tmp_path: Path) -> None:
    """The sentence says until when, by whom and why, and the outputs follow."""
    verdict = judged(FEW)
    assert (verdict.verdict, verdict.exit_code, verdict.allowed) == (Status.INCONCLUSIVE, 0, True)
    until = TODAY + timedelta(days=30)
    assert verdict.sentence.endswith(
        f"The policy allows an undecided verdict until {until}, by j.doe (DPO): the first runs are short."
    )
    assert "INCONCLUSIVE" in outputs.summary(verdict) and "that is allowed here" in outputs.summary(verdict)
    assert verdict.allowing_inconclusive() == verdict  # the caller has nothing to add
    statement = json.loads(outputs.attestation(verdict, [Artifact(name="model.safetensors", sha256="0" * 64)]))
    assert statement["predicate"]["result"] == "FAILED"  # a statement is kept longer than an allowance


@pytest.mark.parametrize(
    ("at", "fields", "code", "said"),
    [
        (midnight(31) - timedelta(seconds=1), {}, 0, "(it ends in 0 days)"),
        (midnight(31), {}, 4, "allowed an undecided verdict until"),
        (NOW, {"until": str(TODAY + timedelta(days=14))}, 0, "(it ends in 14 days)"),
        (NOW, {"since": str(TODAY), "until": str(TODAY)}, 0, "(it ends in 0 days)"),
        (NOW, {"since": str(TODAY + timedelta(days=1))}, 4, "on, and not yet."),
    ],
)
def test_the_last_day_counts_and_the_next_does_not(at: datetime, fields: dict[str, Any], code: int, said: str) -> None:
    """Days are those of UTC, and the sentence names them."""
    verdict = judged(FEW, at, **fields)
    assert (verdict.verdict, verdict.exit_code, verdict.allowed) == (Status.INCONCLUSIVE, code, code == 0)
    assert said in verdict.sentence


@pytest.mark.parametrize("found", [LEAKS, CLEAN, audit(0, 3, finished="2026-12-02T10:00:00Z")])
def test_only_missing_evidence_is_allowed(found: Results) -> None:
    """FAIL, PASS and ERROR stay as they are, to the letter."""
    without = gate.evaluate(found, policy(), now=NOW)
    assert without.verdict is not Status.INCONCLUSIVE
    verdict = judged(found)
    assert verdict == without.model_copy(update={"policy_digest": verdict.policy_digest})


def test_a_text_that_came_back_is_never_allowed() -> None:
    """One text of three steps does not decide a rate, and does not pass."""
    verdict = judged(audit(1, 2))
    assert verdict.verdict is Status.INCONCLUSIVE and verdict.texts_back
    assert (verdict.exit_code, verdict.allowed) == (4, False)
    assert "only where no text comes back" in verdict.sentence


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("pass", "on_inconclusive: expected keys and values, found 'pass'"),
        ("{until: 2026-12-31, owner: o, reason: r}", "key 'since' is missing"),
        ("{since: 2026-12-01, owner: o, reason: r}", "key 'until' is missing"),
        ("{since: 2026-12-01, until: 2026-12-31, reason: r}", "key 'owner' is missing"),
        ("{since: 2026-12-01, until: 2026-12-31, owner: o, reason: ' '}", "is blank; say it in words"),
        ("{since: 2026-12-01, until: 2027-03-02, owner: o, reason: r}", "the last day allowed is 2027-03-01"),
        ("{since: 2026-12-01, until: 2026-11-30, owner: o, reason: r}", "before it begins on 2026-12-01"),
        ("{since: 2026-12-01, until: never, owner: o, reason: r}", "until"),
    ],
)
def test_a_policy_that_allows_it_always_is_refused(tmp_path: Path, written: str, said: str) -> None:
    """An allowance begins, ends within 90 days, and names who gives it and why."""
    path = tmp_path / "policy.yaml"
    path.write_text(
        "schema: leakaudit.policy/1\nname: n\nrules: [{id: r, event: exact_sequence, max_count: 0}]\n"
        f"on_inconclusive: {written}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    assert said in str(caught.value) and f"{path}:4" in str(caught.value), str(caught.value)


def test_the_command_ends_with_0_until_that_day(tmp_path: Path) -> None:
    """`--at` rehearses the day after."""
    (tmp_path / "results.json").write_text(json.dumps(to_json(with_digest(FEW))))
    rules = tmp_path / "policy.yaml"
    rules.write_text(
        "schema: leakaudit.policy/1\nname: n\nevidence: {max_age: 400d}\n"
        f"on_inconclusive: {{since: {TODAY}, until: {TODAY + timedelta(days=30)}, owner: DPO, reason: short runs}}\n"
        "rules: [{id: sentence-rate, event: exact_sentence, max_rate: 0.05}]\n"
    )
    common = [str(tmp_path), "--policy", str(rules), "--at"]
    on_time = CliRunner().invoke(gate_command, [*common, str(TODAY + timedelta(days=30))])
    assert on_time.exit_code == 0 and "INCONCLUSIVE" in on_time.output
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["exit_code"], verdict["allowed"]) == ("INCONCLUSIVE", 0, True)
    late = CliRunner().invoke(gate_command, [*common, str(TODAY + timedelta(days=31))])
    assert late.exit_code == 4 and "it counts again" in " ".join(late.output.split())
