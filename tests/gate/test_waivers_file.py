"""`waivers` in a policy: its file and limits, and that no floor is waived."""

from __future__ import annotations

import json
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from leakaudit.audit.publish import publish
from leakaudit.cli import main
from leakaudit.cli.auditing import check_policy
from leakaudit.config.audit import AuditConfig
from leakaudit.errors import ConfigError
from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import load_policy
from leakaudit.gate.verdict import Status
from leakaudit.gate.waivers import Waivers
from leakaudit.results.files import to_json, with_digest
from tests.support.factories import NOW, audit, policy

TODAY = NOW.astimezone(UTC).date()
LEAKS = audit(60, 0)


def waiver(days: int = 30, **fields: Any) -> dict[str, Any]:
    """Return a waiver of the one rule that holds from today for so many days."""
    end = str(TODAY + timedelta(days=days))
    made = {"id": "W-1", "rule": "sentence-rate", "reason": "public", "owner": "DPO", "created": str(TODAY)}
    return {**made, "expires": end, **fields}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a leaking run, and waivers beside the policy."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text(json.dumps(to_json(with_digest(LEAKS))))
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "waivers.yaml").write_text(json.dumps({"waivers": [waiver()]}))
    return tmp_path


def write(folder: Path, waivers: str) -> Path:
    """Write a policy with this value of `waivers`."""
    path = folder / "gate" / "policy.yaml"
    path.write_text(
        "schema: leakaudit.policy/1\nname: n\nevidence: {max_age: 90000d}\n"
        f"waivers: {waivers}\nrules: [{{id: sentence-rate, event: exact_sentence, max_rate: 0.05}}]\n"
    )
    return path


def run(folder: Path, rules: Path, *more: object) -> Result:
    arguments = ["gate", folder / "run", "--policy", rules, "--at", NOW.isoformat(), *more]
    return CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize("named", ["waivers.yaml", "{file: waivers.yaml}", "../gate/waivers.yaml"])
def test_the_gate_reads_the_waivers_that_the_policy_names(folder: Path, named: str) -> None:
    """The file lies relative to the policy, whatever the working folder is."""
    done = run(folder, write(folder, named))
    assert done.exit_code == 0 and "WAIVED" in done.output
    assert json.loads((folder / "run" / "verdict.json").read_text())["waivers_digest"].startswith("sha256:")


def test_the_report_reads_them_too(folder: Path) -> None:
    """Report and gate have one verdict."""
    rules = write(folder, "waivers.yaml")
    done = CliRunner().invoke(main, ["report", str(folder / "run"), "--policy", str(rules)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "W-1" in (folder / "run" / "report.html").read_text()


def test_the_audit_and_the_model_card_read_them_too(folder: Path) -> None:
    """The first verdict of an audit is that of a later gate."""
    rules = write(folder, "waivers.yaml")
    publish(folder / "run", LEAKS, AuditConfig(policy=rules))
    verdict = json.loads((folder / "run" / "verdict.json").read_text())
    assert verdict["waivers_digest"].startswith("sha256:")
    lost = write(folder, "lost.yaml")
    with pytest.raises(ConfigError, match=r"lost\.yaml"):
        check_policy(lost)
    done = CliRunner().invoke(main, ["export", "model-card", str(folder / "run"), "--policy", str(lost)])
    assert done.exit_code == 2 and "lost.yaml" in done.output


def test_an_option_names_other_waivers_in_their_place(folder: Path) -> None:
    """An empty file waives nothing."""
    other = folder / "other.yaml"
    other.write_text("waivers: []\n")
    assert run(folder, write(folder, "waivers.yaml"), "--waivers", other).exit_code == 3


@pytest.mark.parametrize("named", ["lost.yaml", "{file: lost.yaml}"])
def test_a_file_that_is_not_there_is_refused(folder: Path, named: str) -> None:
    """Exit code 2, and no earlier verdict stays."""
    assert run(folder, write(folder, "waivers.yaml")).exit_code == 0
    done = run(folder, write(folder, named))
    assert done.exit_code == 2 and "lost.yaml" in done.output
    assert not (folder / "run" / "verdict.json").exists()


def test_an_earlier_verdict_does_not_outlive_wrong_waivers(folder: Path) -> None:
    """A verdict that was made without them is not that of this call."""
    rules, wrong = write(folder, "waivers.yaml"), folder / "wrong.yaml"
    wrong.write_text("waivers: [{id: W-1}]\n")
    assert run(folder, rules).exit_code == 0
    assert run(folder, rules, "--waivers", wrong).exit_code == 2
    assert not (folder / "run" / "verdict.json").exists()


def test_the_limits_of_the_policy_hold_for_every_file(folder: Path) -> None:
    """A life of 30 days is too long for 29, also in a file of `--waivers`."""
    rules = write(folder, "{file: waivers.yaml, max_days: 29}")
    for more in ((), ("--waivers", folder / "gate" / "waivers.yaml")):
        done = run(folder, rules, *more)
        said = f"lives longer than the 29 days of the policy; the last day allowed is {TODAY + timedelta(days=29)}"
        assert done.exit_code == 2 and said in " ".join(done.output.split())
    assert run(folder, write(folder, "{file: waivers.yaml, max_days: 30}")).exit_code == 0


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("{file: w.yaml, max_days: 91}", "less than or equal to 90"),
        ("{max_days: 10}", "key 'file' is missing in waivers"),
        ("{file: w.yaml, warn_before: soon}", "is not a length of time"),
        ("''", "must not be empty"),
        ("{file: w.yaml, max_day: 3}", "unknown key 'max_day'; did you mean 'max_days'?"),
    ],
)
def test_a_policy_can_only_make_the_limits_stricter(folder: Path, named: str, said: str) -> None:
    """No policy lengthens the 90 days."""
    with pytest.raises(ConfigError) as caught:
        load_policy(write(folder, named))
    assert said in str(caught.value), str(caught.value)


@pytest.mark.parametrize(("before", "announced"), [("30d", True), ("29d", False)])
def test_the_end_of_a_waiver_is_announced_as_early_as_the_policy_says(before: str, announced: bool) -> None:
    """Its last day is 30 days away."""
    rules = policy(waivers={"file": "w.yaml", "warn_before": before})
    verdict = gate.evaluate(LEAKS, rules, now=NOW, waivers=Waivers.model_validate({"waivers": [waiver()]}))
    assert ("it ends in 30 days" in verdict.waivers[0].sentence) == announced


@pytest.mark.parametrize(
    "asked",
    [
        {"evidence": {"min_texts": 100}},
        {"evidence": {"min_steps_per_phase": {"late": 1}}},
        {"requires": {"defenses": ["prune"]}},
        {"requires": {"attacks": ["tag"], "attacks_share": 0.5}},
        {"requires": {"kinds": ["labels"]}},
        {"requires": {"threat_model": {"adversary": "active server"}}},
    ],
)
def test_floors_and_requirements_are_not_waived(asked: dict[str, Any]) -> None:
    """A waiver needs a rule that fails; what is not known cannot be accepted."""
    given = Waivers.model_validate({"waivers": [waiver()]})
    verdict = gate.evaluate(audit(0, 60), policy(**asked), now=NOW, waivers=given)
    assert (verdict.verdict, verdict.waivers[0].state) == (Status.INCONCLUSIVE, "undecided")
    assert not verdict.rules[0].waived
