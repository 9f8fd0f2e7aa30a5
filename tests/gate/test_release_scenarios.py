"""Release scenarios: the same verdict in every output of one command.

A scenario is one entry of `SCENARIOS`; `docs/release_scenarios.md` lists them for readers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner

from leakaudit.cli import main
from leakaudit.gate.verdict import Status
from leakaudit.results.files import to_json, with_digest
from leakaudit.results.not_audited import NOT_AUDITED, NotAudited
from leakaudit.results.schema import Artifact, Results, TakenPolicy
from tests.gate.test_regression import marked
from tests.support.factories import audit

RATE = {"id": "rate", "event": "exact_sentence", "max_rate": 0.1}
LOOSE = RATE | {"max_rate": 0.9}
NO_WORSE = {"id": "no-worse", "event": "exact_sentence", "versus_baseline": {"margin": 0.1}}
PAGE = Path(__file__).parents[2] / "docs" / "release_scenarios.md"


def _hours_ago(hours: float) -> str:
    return (datetime.now(UTC) - timedelta(hours=hours)).isoformat(timespec="seconds")


def _audit(leaks: int, clean: int, *, age: float = 1, blind: bool = False) -> Results:
    positive = (0, 3) if blind else (3, 3)
    found = audit(leaks, clean, positive=positive, negative=(0, 3), finished=_hours_ago(age))
    run = found.run.model_copy(update={"started": _hours_ago(age + 1)})
    return with_digest(found.model_copy(update={"run": run}))


def _named(found: Results, run: str) -> Results:
    """Return an audit with a name of its own, whose steps can be paired."""
    return with_digest(marked(found, run))


def _bound(found: Results) -> Results:
    """Return an audit of a run that made another model."""
    other = Artifact(name="model.bin", sha256=hashlib.sha256(b"other weights").hexdigest())
    return with_digest(found.model_copy(update={"subject": found.subject.model_copy(update={"artifacts": (other,)})}))


def _begun_with_another_policy(found: Results) -> Results:
    taken = TakenPolicy(name="release", digest=f"sha256:{'0' * 64}", taken_at=found.run.started)
    return with_digest(found.model_copy(update={"run": found.run.model_copy(update={"policy": taken})}))


def _with_more_time(found: Results) -> Results:
    battery = found.run.battery.model_copy(update={"budget_s": 999.0})
    return with_digest(found.model_copy(update={"run": found.run.model_copy(update={"battery": battery})}))


def _waiver(first: int, last: int) -> dict[str, Any]:
    today = datetime.now(UTC).date()
    days = {"created": str(today + timedelta(days=first)), "expires": str(today + timedelta(days=last))}
    return {"id": "W-1", "rule": "rate", "reason": "public texts", "owner": "j.doe"} | days


@dataclass(frozen=True)
class Scenario:
    """What lies in the folder of a release, and what the gate must say."""

    results: Callable[[], Results]
    verdict: Status
    says: str
    waivers: tuple[dict[str, Any], ...] = ()
    refused: bool = False
    """Whether the latest run of the folder was not audited."""
    rules: tuple[dict[str, Any], ...] = (RATE,)
    subject: dict[str, Any] = field(default_factory=dict)
    """What the policy binds the audit to."""
    base: Callable[[], Results] | None = None
    """The audit of the last release; None for no baseline."""
    shown: bool = True
    """Whether the report says the same; it compares no artefact."""


SCENARIOS: dict[str, Scenario] = {
    "leak": Scenario(lambda: _audit(60, 0), Status.FAIL, "In 60 of 60 audited client steps"),
    "no leak": Scenario(lambda: _audit(0, 60), Status.PASS, "In none of 60 audited client steps"),
    "too few steps": Scenario(
        lambda: _audit(0, 20), Status.INCONCLUSIVE, "asks for 59 steps of evidence; there are 20"
    ),
    "blind control": Scenario(lambda: _audit(0, 60, blind=True), Status.INCONCLUSIVE, "in 0 of 3 control steps"),
    "stale evidence": Scenario(
        lambda: _audit(0, 60, age=24 * 30), Status.INCONCLUSIVE, "The evidence is 30.0 days old"
    ),
    "waived": Scenario(lambda: _audit(60, 0), Status.PASS, "rate fails and is waived.", waivers=(_waiver(-1, 9),)),
    "expired waiver": Scenario(
        lambda: _audit(60, 0), Status.FAIL, "In 60 of 60 audited client steps", waivers=(_waiver(-9, -1),)
    ),
    "refused run": Scenario(lambda: _audit(0, 60), Status.ERROR, "this run was not audited", refused=True),
    "wrong artefact": Scenario(
        lambda: _bound(_audit(0, 60)), Status.ERROR, "The evidence is not about this artefact", shown=False
    ),
    "changed policy": Scenario(
        lambda: _begun_with_another_policy(_audit(0, 60)),
        Status.INCONCLUSIVE,
        "The policy was changed after the run began",
        subject={"require_policy_of_run": True},
    ),
    "regression": Scenario(
        lambda: _named(_audit(30, 30), "run-2"),
        Status.FAIL,
        "baseline",
        rules=(NO_WORSE, LOOSE),
        base=lambda: _named(_audit(3, 57), "run-1"),
    ),
    "incomparable baseline": Scenario(
        lambda: _named(_audit(3, 57), "run-2"),
        Status.INCONCLUSIVE,
        "they differ in",
        rules=(NO_WORSE, LOOSE),
        base=lambda: _with_more_time(_named(_audit(3, 57), "run-1")),
    ),
}
"""Name -> scenario."""

OUTPUTS = {"summary": "summary.md", "junit": "leak.xml", "sarif": "leak.sarif", "attestation": "leak.intoto.json"}


def _prepared(folder: Path, scenario: Scenario) -> list[str]:
    """Write the files of a scenario; return the options that name them."""
    (folder / "run").mkdir()
    (folder / "run" / "results.json").write_text(json.dumps(to_json(scenario.results())))
    (folder / "model.bin").write_bytes(b"weights")
    rules = {"schema": "leakaudit.policy/1", "name": "release", "rules": [dict(rule) for rule in scenario.rules]}
    (folder / "policy.yaml").write_text(
        yaml.safe_dump(rules | ({"subject": scenario.subject} if scenario.subject else {}))
    )
    options = [str(folder / "run"), "--policy", str(folder / "policy.yaml")]
    if scenario.refused:
        said = NotAudited(because="the update could not be read", when="2026-11-02T10:00:00Z")
        (folder / "run" / NOT_AUDITED).write_text(said.model_dump_json(by_alias=True))
    if scenario.base is not None:
        (folder / "last").mkdir()
        (folder / "last" / "results.json").write_text(json.dumps(to_json(scenario.base())))
        done = CliRunner().invoke(main, ["baseline", "set", str(folder / "last"), *options[1:]])
        assert done.exit_code == 0, done.output
    if scenario.waivers:
        document = {"schema": "leakaudit.waivers/1", "waivers": list(scenario.waivers)}
        (folder / "waivers.yaml").write_text(yaml.safe_dump(document))
        options += ["--waivers", str(folder / "waivers.yaml")]
    return options


def _of_junit(text: str) -> Status:
    root = ElementTree.fromstring(text)
    kinds = {str(failure.get("type")) for failure in root.iter("failure")}
    if next(root.iter("error"), None) is not None:
        return Status.ERROR
    return Status.FAIL if "FAIL" in kinds else Status.INCONCLUSIVE if "INCONCLUSIVE" in kinds else Status.PASS


def _of_sarif(text: str) -> Status:
    [run] = json.loads(text)["runs"]
    open_ones = [one for one in run["results"] if one["level"] == "error" and not one.get("suppressions")]
    found = {Status(one["properties"]["status"]) for one in open_ones}
    return next((one for one in (Status.ERROR, Status.FAIL, Status.INCONCLUSIVE) if one in found), Status.PASS)


def _of_attestation(text: str) -> set[Status]:
    """Return the verdicts that a statement allows; it has one word for three of them."""
    predicate = json.loads(text)["predicate"]
    if predicate["result"] != "FAILED":
        return {Status.PASS}
    undecided = all(name.startswith("inconclusive:") for name in predicate["failedTests"])
    return {Status.INCONCLUSIVE, Status.ERROR} if undecided else {Status.FAIL}


def _report(folder: Path, options: list[str]) -> tuple[int, str, str]:
    """Return exit code, page and messages of `leakaudit report`."""
    page = folder / "report.html"
    done = CliRunner().invoke(main, ["report", *options, "-o", str(page)])
    return done.exit_code, page.read_text() if page.exists() else "", done.output


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_release_scenario_ends_as_it_must_in_every_output(name: str, tmp_path: Path) -> None:
    """One command; nine places say the same verdict."""
    scenario = SCENARIOS[name]
    options = _prepared(tmp_path, scenario)
    made = {output: tmp_path / file for output, file in OUTPUTS.items()}
    asked = [word for output, file in made.items() for word in (f"--{output}", str(file))]
    done = CliRunner().invoke(main, ["gate", *options, *asked, "--artifact", str(tmp_path / "model.bin")])
    want = scenario.verdict
    assert done.exit_code == want.exit_code, done.output
    assert done.stdout.split()[0] == want and scenario.says in " ".join(done.stdout.split())
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["exit_code"]) == (want, want.exit_code)
    assert scenario.says in verdict["sentence"]
    written = {output: file.read_text() for output, file in made.items()}
    first = written["summary"].splitlines()[0]
    assert f"{want} (exit {want.exit_code:d})" in first and scenario.says in written["summary"]
    assert _of_junit(written["junit"]) is want
    assert _of_sarif(written["sarif"]) is want
    assert want in _of_attestation(written["attestation"])
    if not scenario.shown:
        return
    code, page, said = _report(tmp_path, options)
    if want is Status.ERROR:
        assert code == want.exit_code and page == "" and scenario.says in said
        return
    head = page.split("</header>")[0]
    [shown] = re.findall(r"<h1[^>]*>.*?<span>(\w+)</span></h1>", head, re.DOTALL)
    assert code == 0 and shown == want and scenario.says in head


def test_the_page_of_scenarios_lists_each_of_them() -> None:
    """A new scenario has a row with its exit code."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for name, scenario in SCENARIOS.items():
        mine = [row for row in rows if row.startswith(f"| {name} |")]
        assert len(mine) == 1 and f"{scenario.verdict} ({scenario.verdict.exit_code:d})" in mine[0], name
