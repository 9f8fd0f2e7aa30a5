"""SARIF, in-toto and CycloneDX: other people's schemas read what the gate writes."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf.json_format import Parse, ParseDict
from in_toto_attestation.predicates.test_result.v0.test_result_pb2 import TestResult as Predicate
from in_toto_attestation.v1.resource_descriptor_pb2 import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as Sarif

from leakaudit.cli.gate import gate as gate_command
from leakaudit.gate.evaluate import unreadable
from leakaudit.gate.verdict import Status, Verdict, WaiverVerdict
from leakaudit.reports import outputs
from leakaudit.results.files import to_json, with_digest
from leakaudit.results.schema import Artifact
from tests.reports.test_outputs import HOSTILE, SITUATIONS, hostile, verdict_of
from tests.support.factories import NOW, policy

WEIGHTS = Artifact(name="out/model.safetensors", sha256=hashlib.sha256(b"weights").hexdigest())
POLICY = (
    "schema: leakaudit.policy/1\nname: clinic\nrules:\n"
    "  - id: rate\n    event: exact_sentence\n    max_rate: 0.05\n"
    "  - {id: none, event: exact_sentence, max_count: 0}\n"
    "  - {id: words, event: all_words, max_rate: 0.05, level: warn}\n"
)

VERDICTS: dict[str, Verdict] = {
    "FAIL": verdict_of(SITUATIONS["leaks"]),
    "PASS": verdict_of(SITUATIONS["clean"]),
    "INCONCLUSIVE": verdict_of(SITUATIONS["too few"]),
    "ERROR": unreadable("results.json: no such file", policy(), now=NOW),
    "hostile FAIL": hostile(verdict_of(SITUATIONS["leaks"])),
    "hostile ERROR": unreadable(HOSTILE, policy(), now=NOW).model_copy(update={"policy": HOSTILE, "run": HOSTILE}),
}


def waived() -> Verdict:
    """Return a PASS whose failing rule is waived."""
    rule = VERDICTS["FAIL"].rules[0].model_copy(update={"waived": "until 2026-12-15 by ann: known"})
    return VERDICTS["PASS"].model_copy(update={"rules": (rule,)})


def warned() -> Verdict:
    """Return a PASS with a rule at level warn that fails."""
    passes, fails = VERDICTS["PASS"], VERDICTS["FAIL"].rules[0]
    warning = fails.model_copy(update={"id": "only-warns", "level": "warn"})
    return passes.model_copy(update={"rules": (*passes.rules, warning)})


ALL = pytest.mark.parametrize("name", [*VERDICTS, "warned"])


def named(name: str) -> Verdict:
    return warned() if name == "warned" else VERDICTS[name]


def sarif_run(verdict: Verdict, *more: Any) -> Any:
    """Return the run of a SARIF document, after the published schema has read it."""
    text = outputs.sarif(verdict, *more)
    Sarif.model_validate_json(text)
    (run,) = json.loads(text)["runs"]
    return run


def statement(verdict: Verdict, *artifacts: Artifact) -> Any:
    """Return a statement that the published messages can read."""
    text = outputs.attestation(verdict, artifacts or [WEIGHTS])
    found = json.loads(text)
    validated(text)
    Parse(json.dumps(found["predicate"]), Predicate())
    return found


def validated(text: str) -> None:
    """Read a statement with the messages of in-toto, which check its subject."""
    Statement.copy_from_pb(Parse(text.replace('"_type"', '"type"'), StatementMessage())).validate()


def bill(verdict: Verdict, *artifacts: Artifact) -> Any:
    """Return a bill of materials, after the published schema has read it."""
    text = outputs.cyclonedx(verdict, artifacts or [WEIGHTS])
    assert (wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is None, wrong
    return json.loads(text)


def test_the_situations_are_what_they_are_called() -> None:
    """Each verdict is tested below, and a warning beside a PASS."""
    for name, verdict in VERDICTS.items():
        assert verdict.verdict.value == name.removeprefix("hostile ")


def test_the_schemas_refuse_what_is_wrong() -> None:
    """The checks of this file can fail."""
    text = outputs.sarif(VERDICTS["FAIL"])
    for wrong in (
        text.replace('"2.1.0"', '"2.2"'),
        text.replace('"ruleId"', '"rule"'),
        text.replace('"error"', '"bad"'),
    ):
        with pytest.raises(ValueError, match="validation error"):
            Sarif.model_validate_json(wrong)
    wrong = outputs.cyclonedx(VERDICTS["FAIL"], [WEIGHTS]).replace('"modelCard"', '"card"')
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(wrong) is not None
    with pytest.raises(Exception, match='no field named "failed"'):
        Parse('{"failed": []}', Predicate())


# ----------------------------------------------------------------------------------------------------------------- SARIF
@ALL
def test_each_open_rule_is_one_result_of_sarif(name: str) -> None:
    """Levels follow the policy, and only a PASS is without an error."""
    verdict = named(name)
    run = sarif_run(verdict)
    results = {one["ruleId"]: one for one in run["results"]}
    open_rules = {rule.id: rule for rule in verdict.rules if rule.status is not Status.PASS}
    assert {*results} - {"leakaudit/evidence"} == {*open_rules}
    for rule in open_rules.values():
        assert results[rule.id]["level"] == ("warning" if rule.level == "warn" else "error")
        assert results[rule.id]["message"]["text"].startswith(f"{rule.word}: ")
        assert results[rule.id]["locations"] == []
    for one in run["results"]:
        assert run["tool"]["driver"]["rules"][one["ruleIndex"]]["id"] == one["ruleId"]
    assert any(one["level"] == "error" for one in run["results"]) == (verdict.verdict is not Status.PASS)
    assert run["invocations"][0]["executionSuccessful"] == (verdict.verdict is not Status.ERROR)
    assert {rule.id for rule in verdict.rules} <= {one["id"] for one in run["tool"]["driver"]["rules"]}


def test_a_result_points_at_its_rule_and_keeps_its_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another run, another line and another outcome it is the same alert."""
    monkeypatch.chdir(tmp_path)
    verdict = VERDICTS["FAIL"]
    (rule,) = verdict.rules
    at_4, at_9 = (
        sarif_run(found, Path("ci/my policy.yaml"), {rule.id: line})["results"][0]
        for found, line in ((verdict, 4), (verdict_of(SITUATIONS["too few"]), 9))
    )
    place = at_4["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "ci/my%20policy.yaml", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 4}
    assert at_9["locations"][0]["physicalLocation"]["region"] == {"startLine": 9}
    assert at_4["partialFingerprints"] == at_9["partialFingerprints"]
    other = verdict.model_copy(update={"rules": (rule.model_copy(update={"id": "other"}),)})
    assert sarif_run(other)["results"][0]["partialFingerprints"] != at_4["partialFingerprints"]


def test_a_folder_outside_the_sources_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path says who works on which machine."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for file in (tmp_path / "ann" / "policy.yaml", Path("../ann/policy.yaml")):
        (found,) = sarif_run(VERDICTS["FAIL"], file)["results"]
        assert found["locations"][0]["physicalLocation"] == {"artifactLocation": {"uri": "policy.yaml"}}


# --------------------------------------------------------------------------------------------------------------- in-toto
RESULTS = {"PASS": "PASSED", "warned": "WARNED"}


@ALL
def test_a_statement_is_about_the_artefacts(name: str) -> None:
    """Each rule is in one of its lists."""
    verdict = named(name)
    found = statement(verdict)
    assert (found["_type"], found["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://in-toto.io/attestation/test-result/v0.1",
    )
    assert found["subject"] == [{"name": WEIGHTS.name, "digest": {"sha256": WEIGHTS.sha256}}]
    predicate = found["predicate"]
    assert predicate["result"] == RESULTS.get(name, "FAILED")
    lists = [predicate[key] for key in ("passedTests", "warnedTests", "failedTests")]
    tests = [test.removeprefix("inconclusive:") for one in lists for test in one]
    assert sorted(set(tests) - {"leakaudit/evidence"}) == sorted(rule.id for rule in verdict.rules)
    assert bool(predicate["failedTests"]) == (verdict.verdict is not Status.PASS)
    policy_digest, *results_digest = [one["digest"]["sha256"] for one in predicate["configuration"]]
    assert f"sha256:{policy_digest}" == verdict.policy_digest
    assert results_digest == ([verdict.results_sha256] if verdict.results_sha256 else [])


def test_what_was_not_decided_is_marked_as_such() -> None:
    """A policy that reads names can tell a leak from too little evidence."""
    (rule,) = VERDICTS["INCONCLUSIVE"].rules
    assert statement(VERDICTS["INCONCLUSIVE"])["predicate"]["failedTests"] == [f"inconclusive:{rule.id}"]
    assert statement(VERDICTS["ERROR"])["predicate"]["failedTests"] == ["inconclusive:leakaudit/evidence"]
    assert statement(VERDICTS["FAIL"])["predicate"]["failedTests"] == [rule.id]
    assert statement(warned())["predicate"]["warnedTests"] == ["only-warns"]


def about(verdict: Verdict, *named: Artifact) -> Verdict:
    """Return a verdict of a run that names the artefacts of the release."""
    return verdict.model_copy(update={"about": verdict.about.model_copy(update={"compared": named})})


def verification(verdict: Verdict) -> Any:
    """Return a verification result that the messages of in-toto can read.

    in-toto publishes no message of the predicate, so its fields are compared with the specification (svr v0.2).
    """
    text = outputs.svr(about(verdict, WEIGHTS), [WEIGHTS])
    validated(text)
    found = json.loads(text)
    assert found["predicateType"] == "https://in-toto.io/attestation/svr/v0.2"
    assert {*found["predicate"]} == {"verifier", "timeCreated", "properties"}
    assert {*found["predicate"]["verifier"]} == {"id", "policies"}
    for one in found["predicate"]["verifier"]["policies"]:
        ParseDict(one, ResourceDescriptor())
    return found["predicate"]


def test_a_verification_result_names_what_was_shown() -> None:
    """Evidence of two hours ago is valid for 7 days, so for 6 whole days more."""
    found = verification(VERDICTS["PASS"])
    assert found["properties"] == ["LEAKAUDIT_POLICY_PASS_6D", "LEAKAUDIT_EXACT_SENTENCE_RATE_LE_5PCT_95_6D"]
    assert found["verifier"]["policies"][0]["digest"]["sha256"] == VERDICTS["PASS"].policy_digest[7:]
    assert found["timeCreated"] == VERDICTS["PASS"].evaluated_at


def test_a_verification_result_names_nothing_that_was_not_shown() -> None:
    """No failed warning, no waived rule, no defence that is not shipped."""
    assert len(verification(warned())["properties"]) == 2
    assert verification(waived())["properties"] == ["LEAKAUDIT_POLICY_PASS_WITH_WAIVERS_6D"]
    (rule,) = VERDICTS["PASS"].rules
    other = rule.model_copy(update={"defense": "prune(share=0.9)"})
    unshipped = VERDICTS["PASS"].model_copy(update={"rules": (other,)})
    assert verification(unshipped)["properties"] == ["LEAKAUDIT_POLICY_PASS_6D"]
    for name in ("FAIL", "INCONCLUSIVE", "ERROR"):
        with pytest.raises(ValueError, match=f"the verdict is {name}"):
            outputs.svr(about(VERDICTS[name], WEIGHTS), [WEIGHTS])
    allowed = VERDICTS["INCONCLUSIVE"].allowing_inconclusive()
    with pytest.raises(ValueError, match="the verdict is INCONCLUSIVE"):
        outputs.svr(about(allowed, WEIGHTS), [WEIGHTS])
    another = Artifact(name="other.safetensors", sha256=hashlib.sha256(b"other").hexdigest())
    for verdict, given in ((VERDICTS["PASS"], [WEIGHTS]), (about(VERDICTS["PASS"], WEIGHTS), [WEIGHTS, another])):
        with pytest.raises(ValueError, match=f"does not name {given[-1].name}"):
            outputs.svr(verdict, given)


def test_a_pass_with_waivers_holds_no_longer_than_they_do() -> None:
    """The evidence is young enough for 6 days more; the waiver ends tomorrow."""
    tomorrow = (NOW + timedelta(days=1)).date()
    waiver = WaiverVerdict(
        id="W-1",
        rule="rate",
        owner="ann",
        reason="known",
        ticket="",
        expires=str(tomorrow),
        state="applies",
        sentence=".",
    )
    verdict = waived().model_copy(update={"waivers": (waiver,)})
    assert verification(verdict)["properties"] == ["LEAKAUDIT_POLICY_PASS_WITH_WAIVERS_1D"]
    unused = verdict.model_copy(update={"waivers": (waiver.model_copy(update={"state": "unused"}),)})
    assert verification(unused)["properties"] == ["LEAKAUDIT_POLICY_PASS_WITH_WAIVERS_6D"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"kind": "max_count", "threshold": 0.0, "min_tokens": 3}, "EXACT_SENTENCE_3TOK_COUNT_LE_0"),
        ({"kind": "max_value", "threshold": 0.5, "subject": "p95 rougeL"}, "P95_ROUGEL_LE_0P5_95"),
        ({"kind": "max_value", "threshold": 0.5, "subject": "max rougeL"}, "MAX_ROUGEL_LE_0P5"),
        ({"kind": "versus_baseline", "threshold": 0.1}, "EXACT_SENTENCE_RATE_INCREASE_SINCE_BASELINE_LE_10PCT_95"),
        (
            {"kind": "claimed_epsilon", "threshold": 8.0, "subject": "claimed epsilon", "confidence": 1.0},
            "CLAIMED_EPSILON_LE_8",
        ),
        ({"scope": ("span", "tag")}, "EXACT_SENTENCE_BY_SPAN_TAG_RATE_LE_5PCT_95"),
        (
            {
                "kind": "max_value",
                "subject": "membership TPR at 1% FPR",
                "imported": "memaudit",
                "defense": "trained model",
            },
            "MEMAUDIT_MEMBERSHIP_TPR_AT_1PCT_FPR_LE_0P05_95",
        ),
    ],
)
def test_the_name_of_a_property_holds_all_that_limits_it(change: dict[str, Any], name: str) -> None:
    """A name that leaves something out would claim more than was shown."""
    rule = VERDICTS["PASS"].rules[0].model_copy(update=change)
    verdict = VERDICTS["PASS"].model_copy(update={"rules": (rule,)})
    assert verification(verdict)["properties"][1] == f"LEAKAUDIT_{name}_6D"


def test_evidence_near_its_end_is_named_in_hours() -> None:
    """And evidence past its end is valid for no hour."""
    for until, left in (("2026-11-02T17:30:00Z", "5H"), ("2026-11-02T11:00:00Z", "0H")):
        late = VERDICTS["PASS"].model_copy(update={"valid_until": until})
        assert verification(late)["properties"][0] == f"LEAKAUDIT_POLICY_PASS_{left}"


# ------------------------------------------------------------------------------------------------------------- CycloneDX
@ALL
def test_each_artefact_is_a_model_with_the_verdict_in_its_card(name: str) -> None:
    """Figures of every rule with evidence, and a risk for each that is open."""
    verdict = named(name)
    twin = Artifact(name="copy.safetensors", sha256=WEIGHTS.sha256)
    found = bill(verdict, WEIGHTS, twin)
    assert [one["name"] for one in found["components"]] == [WEIGHTS.name, twin.name]
    for one in found["components"]:
        assert one["type"] == "machine-learning-model"
        assert one["hashes"] == [{"alg": "SHA-256", "content": WEIGHTS.sha256}]
        card = one["modelCard"]
        metrics = card["quantitativeAnalysis"]["performanceMetrics"]
        assert len(metrics) == sum(rule.observed is not None for rule in verdict.rules)
        risks = card["considerations"].get("ethicalConsiderations", [])
        assert bool(risks) == (verdict.verdict is not Status.PASS or name == "warned")
        assert card["considerations"]["technicalLimitations"]
        assert {"name": "leakaudit:verdict", "value": verdict.verdict.value} in card["properties"]


def test_a_metric_is_a_share_with_its_bounds() -> None:
    """60 of 60 steps leak: the lower Clopper-Pearson bound is 0.05 ** (1 / 60)."""
    (metric,) = bill(VERDICTS["FAIL"])["components"][0]["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    assert float(metric["value"]) == 1.0
    assert float(metric["confidenceInterval"]["lowerBound"]) == pytest.approx(0.05 ** (1 / 60), abs=1e-3)


# --------------------------------------------------------------------------------------------------------------- all
@pytest.mark.parametrize("name", ["hostile FAIL", "hostile ERROR"])
def test_hostile_text_stays_text(name: str) -> None:
    """No control character, link or placeholder reaches a reader.

    The names of files are hostile, too.
    """
    verdict, odd = VERDICTS[name], WEIGHTS.model_copy(update={"name": HOSTILE + "\udcff"})
    for made in (sarif_run(verdict, Path(HOSTILE)), statement(verdict, odd), bill(verdict, odd)):
        text = json.dumps(made, ensure_ascii=False)
        text.encode()
        assert not {"\x1b", "\u202e", "\n", "\udcff"} & set(text) and "\\u001b" not in text
    linked = verdict.model_copy(update={"problems": ("[click](https://evil.example) {0}",)})
    said = sarif_run(linked)["results"][-1]["message"]["text"]
    assert "](" not in said and "{{0}}" in said


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with results, a policy and an artefact, and work in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps(to_json(with_digest(SITUATIONS["leaks"]))))
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "model.bin").write_bytes(b"weights")
    return tmp_path


def called(*arguments: Any) -> Any:
    """Call `leakaudit gate`."""
    return CliRunner().invoke(gate_command, [str(one) for one in arguments])


def test_one_call_writes_all_three(run: Path) -> None:
    """The digests are those of the files, and lines those of the policy."""
    done = called(
        ".", "--policy", "policy.yaml", "--artifact", "model.bin", "--sarif", "a.sarif", "--attestation", "b.json",
        "--cyclonedx", "c.json",
    )  # fmt: skip
    assert done.exit_code == 3, done.output
    text = Path("a.sarif").read_text()
    Sarif.model_validate_json(text)
    places = {
        one["ruleId"]: one["locations"][0]["physicalLocation"]["region"]["startLine"]
        for one in json.loads(text)["runs"][0]["results"]
    }
    assert places == {"rate": 4, "none": 7, "words": 8} and "words" in places
    predicate = json.loads(Path("b.json").read_text())
    assert predicate["subject"] == [{"name": "model.bin", "digest": {"sha256": WEIGHTS.sha256}}]
    digests = [one["digest"]["sha256"] for one in predicate["predicate"]["configuration"]]
    assert digests[1] == hashlib.sha256(Path("results.json").read_bytes()).hexdigest()
    assert json.loads(Path("c.json").read_text())["components"][0]["hashes"][0]["content"] == WEIGHTS.sha256


def test_evidence_that_cannot_be_read_reaches_every_output(run: Path) -> None:
    """Exit 5, and no output that looks clean."""
    Path("results.json").write_text("{")
    done = called(".", "--artifact", "model.bin", "--sarif", "a.sarif", "--attestation", "b.json", "--cyclonedx", "c")
    assert done.exit_code == 5, done.output
    assert json.loads(Path("a.sarif").read_text())["runs"][0]["results"][0]["level"] == "error"
    assert json.loads(Path("b.json").read_text())["predicate"]["result"] == "FAILED"
    assert "ERROR" in Path("c").read_text()


def test_a_verification_result_is_written_on_pass_only(run: Path) -> None:
    """One of an earlier PASS is removed, because a release would read it."""
    now = datetime.now(UTC)
    fresh = SITUATIONS["clean"].run.model_copy(update={"started": now.isoformat(), "finished": now.isoformat()})
    clean = SITUATIONS["clean"].model_copy(update={"run": fresh})
    Path("results.json").write_text(json.dumps(to_json(with_digest(clean))))
    asked = (".", "--policy", "policy.yaml", "--artifact", "model.bin", "--svr", "svr.json")
    done = called(*asked)
    assert done.exit_code == 5 and not Path("svr.json").exists(), "nothing ties the audit to this file"
    assert "the run does not name model.bin (`leakaudit bind RUN FILE` does)" in done.output
    assert json.loads(Path("verdict.json").read_text())["verdict"] == "PASS"
    subject = clean.subject.model_copy(update={"artifacts": (WEIGHTS,)})
    Path("results.json").write_text(json.dumps(to_json(with_digest(clean.model_copy(update={"subject": subject})))))
    done = called(*asked)
    assert done.exit_code == 0, done.output
    assert json.loads(Path("svr.json").read_text())["subject"][0]["digest"] == {"sha256": WEIGHTS.sha256}
    Path("results.json").write_text(json.dumps(to_json(with_digest(SITUATIONS["leaks"]))))
    done = called(*asked)
    assert done.exit_code == 3 and not Path("svr.json").exists() and "the verdict is FAIL" in done.output
    Path("svr.json").write_text("of an earlier PASS")
    Path("policy.yaml").write_text("rules: 5")
    assert called(*asked).exit_code == 2 and not Path("svr.json").exists(), "a wrong policy is no PASS either"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--svr", "a.json"), "name each with --artifact"),
        (("--svr", "a.json", "--artifact", "model.bin", "--at", "2026-11-03"), "choose one"),
        (("--attestation", "a.json"), "name each with --artifact"),
        (("--cyclonedx", "a.json"), "name each with --artifact"),
        (("--attestation", "a.json", "--artifact", "model.bin", "--at", "2026-11-03"), "choose one"),
        (("--attestation", "a.json", "--artifact", "missing.bin"), "does not exist"),
        (
            ("--attestation", "a.json", "--artifact", "model.bin", "--artifact", "./model.bin"),
            "two artefacts are called",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(run: Path, options: tuple[str, ...], said: str) -> None:
    """Before anything is judged or written."""
    done = called(".", *options)
    assert done.exit_code == 2 and said in done.output
    assert not Path("a.json").exists() and not Path("verdict.json").exists()


def test_a_waived_rule_is_shown_and_does_not_bind() -> None:
    """SARIF suppresses it, the statement warns, and the bill says until when."""
    verdict = waived()
    (rule,) = verdict.rules
    (result,) = sarif_run(verdict)["results"]
    assert result["level"] == "warning" and result["message"]["text"].startswith("WAIVED: ")
    assert result["suppressions"] == [{"kind": "external", "justification": rule.waived}]
    predicate = statement(verdict)["predicate"]
    assert (predicate["result"], predicate["warnedTests"], predicate["failedTests"]) == ("WARNED", [rule.id], [])
    (risk,) = bill(verdict)["components"][0]["modelCard"]["considerations"]["ethicalConsiderations"]
    assert risk["name"].startswith("WAIVED") and rule.waived in risk["mitigationStrategy"]
    assert f"Waived: {rule.id}." in outputs.model_card(SITUATIONS["leaks"], verdict)


def test_what_a_caller_allows_is_a_warning_now_and_no_pass_later() -> None:
    """A statement is kept and signed, so it says what was found."""
    verdict = VERDICTS["INCONCLUSIVE"].allowing_inconclusive()
    assert [one["level"] for one in sarif_run(verdict)["results"]] == ["warning"]
    assert statement(verdict)["predicate"]["result"] == "FAILED"
