"""A verdict in the forms that pipelines read: the same answer in each of them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from xmlschema import XMLSchema

from leakaudit.cli.gate import gate as gate_command
from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import rule_lines
from leakaudit.gate.verdict import Status, Verdict
from leakaudit.reports import outputs
from leakaudit.reports.outputs.markdown import MOST_BYTES
from leakaudit.results.files import to_json, with_digest
from leakaudit.results.schema import Results
from tests.support.factories import NOW, audit, policy

HOSTILE = "a|b`c`<img src=x>\x1b[31m@octocat ]]> &amp; \u202eevil\n::error::x"
"""Text with a meaning for Markdown, XML, HTML, terminals and workflow commands."""


def leaking(steps: int = 60) -> Results:
    """Return an audit in which every step leaks."""
    return audit(steps, 0)


SITUATIONS: dict[str, Results] = {"leaks": leaking(), "clean": audit(0, 60), "too few": audit(0, 3)}


def verdict_of(found: Results) -> Verdict:
    """Return the verdict by the policy of the tests."""
    return gate.evaluate(found, policy(), now=NOW)


def hostile(verdict: Verdict) -> Verdict:
    """Return a verdict whose free texts are hostile."""
    rules = tuple(rule.model_copy(update={"sentence": HOSTILE, "reasons": (HOSTILE,)}) for rule in verdict.rules)
    return verdict.model_copy(
        update={"sentence": HOSTILE, "policy": HOSTILE, "run": HOSTILE, "rules": rules, "problems": (HOSTILE,)}
    )


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_rule_and_control_is_one_test_of_junit(name: str) -> None:
    """Failures are counted, and an undecided rule is one, with a type of its own."""
    verdict = verdict_of(SITUATIONS[name])
    root = ElementTree.fromstring(outputs.junit_xml(verdict))
    (suite,) = root
    cases = suite.findall("testcase")
    names = [(case.get("classname"), case.get("name")) for case in cases]
    assert len(set(names)) == len(names) >= len(verdict.rules) + len(verdict.controls)
    for rule in verdict.rules:
        (case,) = [one for one in cases if one.get("name") == rule.id]
        failure = case.find("failure")
        if rule.level == "error" and rule.status is not Status.PASS:
            assert failure is not None and failure.get("type") == rule.status.value
            assert rule.sentence in str(failure.text) and rule.sentence in str(failure.get("message"))
        else:
            assert failure is None
    for count, path in (("tests", "testcase"), ("failures", "testcase/failure"), ("errors", "testcase/error")):
        assert suite.get(count) == root.get(count) == str(len(suite.findall(path)))
    passes = verdict.verdict is Status.PASS
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0") or not passes


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_summary_says_verdict_meaning_and_next_step_first(name: str) -> None:
    """A reader of the first five lines knows what to do."""
    verdict = verdict_of(SITUATIONS[name])
    lines = outputs.summary(verdict).splitlines()
    assert lines[0].startswith(f"### leakaudit: {verdict.verdict} (exit {verdict.exit_code})")
    assert "**Next:** " in "\n".join(lines[:6])
    for rule in verdict.rules:
        assert any(line.startswith("| ") and rule.word in line and rule.id in line for line in lines)
    assert "No training text is in this summary" in lines[-1]


def test_a_summary_of_many_rules_says_how_many_are_left_out() -> None:
    """GitHub drops a summary that is too large as a whole."""
    verdict = verdict_of(leaking())
    rules = tuple(verdict.rules[0].model_copy(update={"id": f"rule-{number}"}) for number in range(5000))
    text = outputs.summary(verdict.model_copy(update={"rules": rules}))
    assert len(text.encode()) <= MOST_BYTES
    shown = len(re.findall(r"^\| rule-", text, re.MULTILINE))
    assert f"and {5000 - shown:,} more rules" in text or f"and {5000 - shown} more rules" in text


def test_github_shows_the_line_of_each_open_rule(tmp_path: Path) -> None:
    """Rules at level warn are warnings; at most ten of a kind are shown."""
    verdict = verdict_of(leaking())
    lines = outputs.workflow_commands(verdict, Path("policy.yaml"), {rule.id: 7 for rule in verdict.rules})
    failing = [rule for rule in verdict.rules if rule.level == "error" and rule.status is not Status.PASS]
    assert failing and sum(line.startswith("::error file=policy.yaml,line=7,title=") for line in lines) == len(failing)
    file = tmp_path / "policy.yaml"
    file.write_text(
        "schema: leakaudit.policy/1\nname: n\nrules:\n  - id: one\n    event: exact_sentence\n    max_count: 0\n"
        "  - {id: two, event: exact_sentence, max_count: 0}\n"
    )
    assert rule_lines(file.read_text()) == {"one": 4, "two": 7}
    many = verdict.model_copy(update={"rules": tuple(failing[0].model_copy(update={"id": f"r{i}"}) for i in range(50))})
    assert len(outputs.workflow_commands(many)) == 10


def test_hostile_text_has_no_effect_in_any_output() -> None:
    """Texts of a policy or a plugin reach the outputs, and stay texts."""
    verdict = hostile(verdict_of(leaking()))
    xml, text = outputs.junit_xml(verdict), outputs.summary(verdict)
    ElementTree.fromstring(xml)
    for made in (xml, text, outputs.badge(verdict), outputs.job_outputs(verdict)):
        assert not {"\x1b", "\u202e"} & set(made)
    assert "<img" not in xml and "<img" not in text.replace(r"\<img", "") and "@octocat" not in text.replace(r"\@", "")
    assert all(line.count(" | ") == 4 for line in text.splitlines() if line.startswith("| ") and "---" not in line)
    for line in outputs.workflow_commands(verdict, Path("a,b:c.yaml")):
        assert (
            ("\n" not in line and line.startswith("::error") and "file=a%2Cb%3Ac.yaml" in line)
            or "problem" in line
            or "evidence" in line
        )
    assert len(outputs.job_outputs(verdict).splitlines()) == 6


def test_a_badge_is_red_where_texts_came_back() -> None:
    """Whatever the verdict says of the rate."""
    verdict = verdict_of(leaking(2))
    found = json.loads(outputs.badge(verdict.model_copy(update={"texts_back": 3})))
    assert (found["schemaVersion"], found["color"], found["isError"]) == (1, "red", True)
    assert json.loads(outputs.badge(verdict_of(audit(0, 60))))["label"] == "leakaudit"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder with the results of a leaking run."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(to_json(with_digest(leaking()))))
    return folder


def called(*arguments: Any, **environment: str) -> Any:
    """Call `leakaudit gate`."""
    return CliRunner().invoke(gate_command, [str(one) for one in arguments], env=environment)


def test_one_call_writes_every_output_and_the_exit_code_stays(run: Path, tmp_path: Path) -> None:
    """A summary is appended, as GitHub's own steps do."""
    (tmp_path / "summary.md").write_text("before\n")
    done = called(
        run, "--junit", tmp_path / "junit.xml", "--summary", tmp_path / "summary.md", "--badge", tmp_path / "badge.json",
        "--github", GITHUB_OUTPUT=str(tmp_path / "out"),
    )  # fmt: skip
    assert done.exit_code == 3, done.output
    assert "::error title=leakaudit%3A FAIL" in done.output
    assert (tmp_path / "summary.md").read_text().startswith("before\n### leakaudit: FAIL (exit 3)")
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().tag == "testsuites"
    assert "verdict=FAIL\nexit-code=3\n" in (tmp_path / "out").read_text()
    assert json.loads((tmp_path / "badge.json").read_text())["message"].startswith("FAIL")


def test_an_output_that_cannot_be_written_is_said_and_never_a_pass(run: Path, tmp_path: Path) -> None:
    """Without the file a pipeline would show nothing."""
    nowhere = tmp_path / "missing" / "junit.xml"
    assert called(run, "--soft-fail", "--junit", nowhere).exit_code == 5
    done = called(run, "--junit", nowhere)
    assert done.exit_code == 3 and "was not written" in done.output


def test_json_and_lines_are_not_printed_together(run: Path) -> None:
    """`--json` prints exactly one document."""
    assert called(run, "--json", "--github").exit_code == 2


SCHEMA = XMLSchema(Path(__file__).with_name("junit.xsd"))
"""Our own schema of JUnit XML, after the format that Jenkins' xUnit plugin documents. We found no maintained Python package with a published one."""

CHANGES: dict[str, Callable[[Verdict], dict[str, Any]]] = {
    "as judged": lambda verdict: {},
    "allowed": lambda verdict: {"allowed": True},
    "warned": lambda verdict: {"rules": tuple(rule.model_copy(update={"level": "warn"}) for rule in verdict.rules)},
    "waived": lambda verdict: {
        "rules": tuple(rule.model_copy(update={"waived": "until then"}) for rule in verdict.rules)
    },
    "error": lambda verdict: {"verdict": Status.ERROR, "problems": ("odd",)},
    "no rule": lambda verdict: {"verdict": Status.INCONCLUSIVE, "rules": (), "controls": ()},
    "hostile": lambda verdict: hostile(verdict).model_dump(include={"sentence", "policy", "run", "problems"}),
}
"""Name -> what is changed in a verdict."""


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_junit_is_valid_by_the_schema(name: str, change: str) -> None:
    """Strict readers refuse an attribute or an order that they do not know."""
    verdict = verdict_of(SITUATIONS[name])
    SCHEMA.validate(outputs.junit_xml(verdict.model_copy(update=CHANGES[change](verdict))))


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_schema_of_junit_holds_each_attribute_and_element(name: str) -> None:
    """Whatever else stands in the document, or is taken away, it is refused."""
    text = outputs.junit_xml(verdict_of(SITUATIONS[name]))
    optional = {"testcase"}  # the schema does not know how many rules there are
    for number, element in enumerate(ElementTree.fromstring(text).iter()):
        for changed in (*(["delete", key] for key in element.attrib), ["add", "odd"], ["child", "odd"], ["twice", ""]):
            root = ElementTree.fromstring(text)
            place = [*root.iter()][number]
            _change(root, place, *changed)
            assert not SCHEMA.is_valid(ElementTree.tostring(root, encoding="unicode")), (element.tag, changed)
        if element.tag not in {*optional, "testsuites", "property"}:
            root = ElementTree.fromstring(text)
            place = [*root.iter()][number]
            next(one for one in root.iter() if place in [*one]).remove(place)
            assert not SCHEMA.is_valid(ElementTree.tostring(root, encoding="unicode")), element.tag


def _change(root: ElementTree.Element, place: ElementTree.Element, what: str, name: str) -> None:
    """Change one element of a document in a way that its schema must see."""
    if what == "delete":
        del place.attrib[name]
    elif what == "add":
        place.set(name, "1")
    elif what == "child":
        ElementTree.SubElement(place, name)
    elif place is root:
        place.tag = "odd"
    else:
        next(one for one in root.iter() if place in [*one]).append(copy.deepcopy(place))
