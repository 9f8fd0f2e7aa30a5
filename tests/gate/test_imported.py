"""Results of memaudit as further rules of the same verdict.

`memaudit_0_2_0.json` was written by memaudit 0.2.0: `python -m memaudit demo` trained a tiny model on random canaries, and memaudit's own
`write_report` wrote the keys of its report that are not prose. It holds no text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from leakaudit.cli import main
from leakaudit.errors import ConfigError, ResultsError
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.imported import Imported, Share, judge_imported, load_imported, memaudit_digest
from leakaudit.gate.policy import ImportedRule, Policy, load_policy, rule_lines
from leakaudit.gate.verdict import RuleVerdict, Status, Verdict, to_json
from leakaudit.results.files import to_json as results_json
from leakaudit.results.files import with_digest
from tests.support.factories import FINISHED, NOW, audit, policy

WRITTEN = Path(__file__).parent / "memaudit_0_2_0.json"
THAT_DAY = datetime(2026, 11, 28, tzinfo=UTC)


def with_rule(measure: str = "regurgitation_rate", max_value: float = 0.05, **more: Any) -> Policy:
    """Return the policy of the tests with a rule on results of memaudit."""
    rule = {"id": "model", "import": "memaudit", "measure": measure, "max_value": max_value, **more}
    return policy().model_copy(update={"imported": (ImportedRule.model_validate(rule),)})


def found(k: int, n: int, **more: Any) -> Imported:
    """Return results in which k of n canaries came back in both measures."""
    given = {
        "tool_version": "0.2.0", "report_schema": "1.2.0", "created_at": FINISHED, "sha256": "0" * 64,
        "membership": Share(k=k, n=n), "regurgitation": Share(k=k, n=n), "controls": 100, "controls_regurgitated": 0.0,
    }  # fmt: skip
    return Imported.model_validate(given | more)


def judged(rules: Policy, results: Imported | None, now: datetime = NOW) -> RuleVerdict:
    (verdict,) = judge_imported(rules, results, now)
    return verdict


def verdict_with(rules: Policy, results: Imported | None) -> Verdict:
    return evaluate(with_digest(audit(0, 60)), rules, now=NOW, imported=results)


def edited(change: Callable[[Any], object], folder: Path, *, sealed: bool = True) -> Path:
    """Return the report of memaudit with a change, by default with its new digest."""
    data = json.loads(WRITTEN.read_text())
    change(data)
    if sealed:
        data["report_sha256"] = memaudit_digest(data)
    (folder / "report.json").write_text(json.dumps(data))
    return folder / "report.json"


def test_what_memaudit_wrote_is_read_with_its_own_numbers() -> None:
    """16 of 16 canaries were detected and 15 of 16 completed, of 100 controls none."""
    read = load_imported(WRITTEN)
    assert (read.membership, read.regurgitation) == (Share(k=16, n=16), Share(k=15, n=16))
    assert (read.controls, read.controls_regurgitated, read.tool_version) == (100, 0.0, "0.2.0")
    rule = judged(with_rule(), read, THAT_DAY)
    assert rule.status is Status.FAIL and (rule.n, rule.k) == (16, None)
    assert rule.lower == pytest.approx(0.7360, abs=1e-4)  # scipy.stats.beta.ppf(0.05, 15, 2)
    assert "15 of 16 canaries" in rule.sentence and "Nobody checked" in rule.sentence


@pytest.mark.parametrize(
    ("k", "n", "status"), [(0, 59, Status.PASS), (0, 58, Status.INCONCLUSIVE), (59, 59, Status.FAIL)]
)
@pytest.mark.parametrize("measure", ["regurgitation_rate", "membership_tpr"])
def test_the_upper_bound_passes_and_the_lower_one_fails(k: int, n: int, status: Status, measure: str) -> None:
    """59 clean canaries bound the share by 1 - 0.05 ** (1 / 59) < 5 %, and 58 do not."""
    assert judged(with_rule(measure), found(k, n)).status is status


def test_results_that_were_not_given_never_pass() -> None:
    """Neither the rule nor the verdict; with them both do."""
    assert verdict_with(with_rule(), found(0, 60)).verdict is Status.PASS
    without = verdict_with(with_rule(), None)
    assert without.verdict is Status.INCONCLUSIVE and "--memaudit FILE" in without.sentence
    assert without.imports == ()


def test_a_leak_of_the_model_fails_the_verdict_and_is_in_it() -> None:
    """With the digest of the file that says so."""
    verdict = verdict_with(with_rule(), found(60, 60))
    assert (verdict.verdict, verdict.deciding_rule) == (Status.FAIL, "model")
    assert verdict.imports[0].digest == found(60, 60).digest != found(59, 60).digest
    assert Verdict.model_validate(to_json(verdict)) == verdict
    warned = verdict_with(with_rule(level="warn"), found(60, 60))
    assert warned.verdict is Status.PASS


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (found(0, 60, controls_regurgitated=0.11), "never saw"),
        (found(0, 60, controls=0), "no negative control"),
        (found(0, 60, controls_regurgitated=None), "no negative control"),
        (found(0, 60, created_at="2026-10-01T00:00:00Z"), "days old"),
        (found(0, 60, created_at="2027-01-01T00:00:00Z"), "not known how old"),
    ],
)
def test_results_that_cannot_be_trusted_do_not_pass(results: Imported, said: str) -> None:
    """The reason is said."""
    rule = judged(with_rule(), results)
    assert rule.status is Status.INCONCLUSIVE and said in " ".join(rule.reasons)


def test_a_leak_is_a_leak_even_if_old_but_not_if_the_controls_leak_too() -> None:
    """Where canaries come back that the model never saw, the measure shows nothing."""
    assert judged(with_rule(), found(60, 60, created_at="2026-10-01T00:00:00Z")).status is Status.FAIL
    assert judged(with_rule(), found(60, 60, controls_regurgitated=0.9)).status is Status.INCONCLUSIVE


def test_the_older_evidence_says_until_when_a_verdict_is_valid() -> None:
    """A pass ends when a report that rules ask for is too old."""
    old = found(0, 100, created_at=(NOW - timedelta(days=6)).isoformat())
    assert verdict_with(with_rule(), old).valid_until == (NOW + timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert verdict_with(policy(), old).valid_until == verdict_with(policy(), None).valid_until


def test_generation_that_was_skipped_is_no_clean_model(tmp_path: Path) -> None:
    """memaudit then writes 0 of n."""

    def skip(data: Any) -> None:
        data["provenance"]["resolved_config"]["skip_generation"] = True
        data["regurgitation"]["overall"] = {"n": 100, "n_regurgitated": 0, "rate": 0.0}

    rule = judged(with_rule(), load_imported(edited(skip, tmp_path)), THAT_DAY)
    assert (rule.status, rule.n) == (Status.INCONCLUSIVE, 0) and "did not ask" in rule.sentence


@pytest.mark.parametrize("change", [{"headline_valid": False}, {"target_fpr": 0.05}, {"n_controls": 99}])
def test_a_membership_without_enough_controls_is_no_evidence(change: dict[str, Any], tmp_path: Path) -> None:
    """A rate of false alarms of 1 % needs 100 of them."""
    report = edited(lambda data: data["membership"].update(change), tmp_path)
    rule = judged(with_rule("membership_tpr", 0.5), load_imported(report), THAT_DAY)
    assert rule.status is Status.INCONCLUSIVE and rule.n == 0


@pytest.mark.parametrize(
    ("change", "sealed", "said"),
    [
        (lambda d: d.update(schema_version="1.3.0"), True, "schema 1.2.0"),
        (lambda d: d.pop("schema_version"), True, "schema 1.2.0"),
        (lambda d: d["regurgitation"]["overall"].update(n_regurgitated=0, rate=0.0), False, "was changed after"),
        (lambda d: d["regurgitation"]["overall"].update(n_regurgitated=0), True, "contradicts itself"),
        (lambda d: d["membership"].update(n_detected=17, tpr_at_1pct_fpr=17 / 16), True, "contradicts itself"),
        (lambda d: d["membership"].update(n_members=True), True, "n_members is no count"),
        (lambda d: d["negative_controls"].update(regurgitation_rate=-1.0), True, "does not fit"),
        (lambda d: d.pop("regurgitation"), True, "lacks regurgitation"),
        (lambda d: d.update(created_at="<img src=x>"), True, "does not fit"),
    ],
)
def test_a_report_that_is_wrong_is_refused(
    change: Callable[[Any], object], sealed: bool, said: str, tmp_path: Path
) -> None:
    """With what is wrong, and without its content."""
    with pytest.raises(ResultsError, match=said) as error:
        load_imported(edited(change, tmp_path, sealed=sealed))
    assert "img" not in str(error.value)


def test_what_was_kept_reads_as_itself(tmp_path: Path) -> None:
    """A bundle holds it instead of the report."""
    kept = load_imported(WRITTEN)
    (tmp_path / "kept.json").write_text(kept.model_dump_json(by_alias=True))
    assert load_imported(tmp_path / "kept.json") == kept


POLICY = (
    "schema: leakaudit.policy/1\nname: both\nevidence: {max_age: 9000d}\nrules:\n"
    "  - {id: rate, event: exact_sentence, max_rate: 0.05}\nimported:\n"
    "  - {id: model, import: memaudit, measure: membership_tpr, max_value: 0.2}\n"
)


def test_a_policy_names_each_rule_once_and_keeps_its_digest(tmp_path: Path) -> None:
    """A policy with an empty list has the digest of one without the key."""
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY.replace("id: model", "id: rate"))
    with pytest.raises(ConfigError, match=r"policy.yaml:7.*two rules are called 'rate'"):
        load_policy(file)
    file.write_text(POLICY)
    assert rule_lines(POLICY) == {"rate": 5, "model": 7}
    plain = policy()
    assert with_rule().digest != plain.digest
    assert plain.digest == policy(imported=()).digest


def test_the_gate_reads_the_file(tmp_path: Path) -> None:
    """The exit code follows from the file; one that no rule asks for is refused."""
    (tmp_path / "results.json").write_text(json.dumps(results_json(audit(0, 60))))
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "broken.json").write_text("{}")

    def gate(*more: str | Path) -> Any:
        return CliRunner().invoke(main, ["gate", str(tmp_path), *map(str, more)])

    rules = ("--policy", tmp_path / "policy.yaml")
    assert gate(*rules, "--memaudit", WRITTEN).exit_code == 3
    document = json.loads((tmp_path / "verdict.json").read_text())
    assert document["imports"][0]["tool"] == "memaudit" and document["rules"][0]["imported"] == "memaudit"
    assert gate(*rules).exit_code == 4
    broken = gate(*rules, "--memaudit", tmp_path / "broken.json")
    assert broken.exit_code == 5 and json.loads((tmp_path / "verdict.json").read_text())["verdict"] == "ERROR"
    unasked = gate("--memaudit", WRITTEN)
    assert unasked.exit_code == 2 and "no rule under `imported:`" in unasked.output
