"""JUnit XML: each rule and each control is a test.

Jenkins, GitLab and Azure read it. The elements are those that all of them know: `testsuites`, `testsuite`, `properties`, `testcase`, `failure`,
`error` and `system-out`. GitLab shows the text of a failure and not its `message`, and drops tests of the same name, so the text says everything
and names are unique.
"""

from __future__ import annotations

from xml.etree import ElementTree

from leakaudit.gate.verdict import ControlVerdict, RuleVerdict, Status, Verdict
from leakaudit.reports.escaping import plain
from leakaudit.reports.wording import meaning, policy_changed, run_in_words

ALLOWED = "undecided, which is allowed here"
"""Why a test is skipped."""


def junit_xml(verdict: Verdict) -> str:
    """Return a verdict as JUnit XML.

    A rule that fails is a `failure` of type `FAIL`, and one that cannot be decided a `failure` of type `INCONCLUSIVE`: a pipeline that counts
    failures must not go on. A control that did not run or recover anything is the latter. A waived rule is skipped, and so is an undecided one
    where the caller allows it. A rule at level warn is never a failure. Evidence that
    cannot be judged is an `error`.
    """
    suite = ElementTree.Element("testsuite", name=plain(verdict.policy), timestamp=verdict.evaluated_at, time="0")
    _properties(suite, verdict)
    for rule in verdict.rules:
        _rule(suite, rule, allowed=verdict.allowed)
    for control in verdict.controls:
        _control(suite, control, allowed=verdict.allowed)
    if verdict.problems or verdict.verdict is Status.ERROR:
        _error(suite, verdict)
    if not verdict.rules and verdict.verdict in (Status.FAIL, Status.INCONCLUSIVE):
        _failure(_case(suite, "leakaudit", "verdict"), verdict.verdict.value, verdict.sentence)
    counts = {
        "tests": len(suite.findall("testcase")),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
        "skipped": len(suite.findall("testcase/skipped")),
    }
    root = ElementTree.Element("testsuites", name="leakaudit", time="0")
    for name, count in counts.items():
        suite.set(name, str(count))
        if name != "skipped":  # the schema of Jenkins has it at a suite only
            root.set(name, str(count))
    root.append(suite)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _properties(suite: ElementTree.Element, verdict: Verdict) -> None:
    found = {
        "verdict": verdict.verdict.value,
        "meaning": meaning(verdict),
        "run": verdict.run,
        "policy digest": verdict.policy_digest,
        "policy changed since the run began": policy_changed(verdict),
        "results digest": verdict.results_digest or verdict.results_sha256 or "",
        "valid until": verdict.valid_until or "",
    }
    if verdict.runs:
        found["runs"] = "; ".join(map(run_in_words, verdict.runs))
    inside = ElementTree.SubElement(suite, "properties")
    for name, value in found.items():
        ElementTree.SubElement(inside, "property", name=name, value=plain(value))


def _case(suite: ElementTree.Element, group: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=group, name=plain(name), time="0")


def _failure(case: ElementTree.Element, kind: str, text: str) -> None:
    said = plain(text)
    ElementTree.SubElement(case, "failure", type=kind, message=said).text = f"{kind}: {said}"


def _rule(suite: ElementTree.Element, rule: RuleVerdict, *, allowed: bool) -> None:
    case = _case(suite, "leakaudit.rules", rule.id)
    text = " ".join([rule.sentence, *rule.reasons])
    undecided = allowed and rule.level == "error" and rule.status is Status.INCONCLUSIVE
    if rule.waived or undecided:
        ElementTree.SubElement(case, "skipped", message=plain(rule.waived or ALLOWED))
        ElementTree.SubElement(case, "system-out").text = f"{rule.word}: {plain(text)}"
    elif rule.level == "warn" or rule.status is Status.PASS:
        ElementTree.SubElement(case, "system-out").text = f"{rule.word}: {plain(text)}"
    else:
        _failure(case, rule.status.value, text)


def _control(suite: ElementTree.Element, control: ControlVerdict, *, allowed: bool) -> None:
    case = _case(suite, "leakaudit.controls", " ".join(filter(None, [control.name, control.kind])))
    if control.state == "ok":
        ElementTree.SubElement(case, "system-out").text = plain(control.sentence)
    elif allowed:
        ElementTree.SubElement(case, "skipped", message=ALLOWED)
        ElementTree.SubElement(case, "system-out").text = plain(control.sentence)
    else:
        _failure(case, Status.INCONCLUSIVE.value, control.sentence)


def _error(suite: ElementTree.Element, verdict: Verdict) -> None:
    case = _case(suite, "leakaudit", "evidence")
    said = plain("; ".join(verdict.problems) or verdict.sentence)
    ElementTree.SubElement(case, "error", type="ERROR", message=said).text = f"ERROR: {said}"
