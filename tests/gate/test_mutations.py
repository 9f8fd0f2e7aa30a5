"""No edit of results, policy, waivers or baseline makes the gate pass.

The edits come from the grammar of the models (`tests/support/edits.py`). `docs/decisions/false_pass.md` says which edits no check can find.
"""

from __future__ import annotations

import copy
import json
import random
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from leakaudit.errors import ConfigError, ResultsError
from leakaudit.files.strict_json import walk
from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import Policy, load_policy
from leakaudit.gate.policy_parts import MAX_DAYS
from leakaudit.gate.verdict import Status, Verdict
from leakaudit.gate.verdict import to_json as verdict_json
from leakaudit.gate.waivers import Waivers, parse_waivers
from leakaudit.history import baseline as baselines
from leakaudit.results.files import digest_of, read_results, to_json
from leakaudit.results.schema import Results
from tests.support.edits import Edit, Edits, described, hot
from tests.support.factories import NOW, policy, step_id
from tests.support.leaking import CASES, LEAKS
from tests.support.undecided import FAILING, UNDECIDED, Case

SEED = 27
EDITS = 100
"""Edits of each of the 18 audits in the suite: 1,800, and 600 of policies, waivers and baselines."""
MANY = 1_200
"""Edits of each audit with `-m integrations`: 21,600."""

Data = dict[str, Any]

STATED_ONCE = {
    "few steps": (),
    "blind": ("controls*",),
    "wrong scores": ("controls*",),
    "old": ("run.finished",),
    "unverifiable": ("steps.*.verification*", "steps.*.snapshot"),
    "words not kept": ("steps.*.words_not_kept", "steps.*.snapshot"),
    "crashed": ("run.interrupted", "coverage.skipped_snapshots"),
    "out of time": ("attempts.*",),
    "not applicable": ("attempts.*",),
    "beyond": ("steps.*.beyond_hidden", "steps.*.snapshot", "catalogue.attacks*", "run.battery*"),
}
"""Undecided audit -> the fields that a forger has to change to make it pass. The file states these facts once, so nothing contradicts the edit."""


def verdict_of(folder: Path, text: str, rules: Policy) -> Verdict | None:
    """Judge a results.json as `leakaudit gate` does; None if it cannot be read."""
    path = folder / "results.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        found, sha256 = read_results(path)
    except ResultsError as error:
        return None if "\n" not in str(error) else pytest.fail(f"more than one line: {error}")
    verdict = gate.evaluate(found, rules, now=NOW, results_sha256=sha256)
    json.dumps(verdict_json(verdict), allow_nan=False)
    return verdict


def judge(folder: Path, text: str, case: str) -> Status:
    verdict = verdict_of(folder, text, FAILING[case][1])
    return Status.ERROR if verdict is None else verdict.verdict


def written(case: str) -> Data:
    return copy.deepcopy(to_json(FAILING[case][0]))


def resealed(data: Any, indent: int | None = None) -> str:
    """Return the text of edited results whose digest fits again.

    `results.json` has the indent 1.
    """
    if isinstance(data, dict) and "digest" in data:
        data["digest"] = digest_of(data)
    return json.dumps(data, indent=indent)


def edits_of(found: Case, step: int, seed: int) -> Edits:
    """Return the edits of an audit, half of them on one of its steps."""
    base = to_json(found[0])
    return Edits(Results, base, seed, hot(base, step_id(step)))


def passing(folder: Path, found: Case, step: int, many: int, seed: int) -> list[tuple[str, list[Edit]]]:
    """Return the edits after which an audit passes, with names to repeat them."""
    passed = []
    for number, (chosen, data) in enumerate(edits_of(found, step, seed).many(many)):
        verdict = verdict_of(folder, resealed(data), found[1])
        if verdict is not None and verdict.verdict is Status.PASS:
            passed.append((f"seed {seed}, edit {number}: {described(chosen)}", chosen))
    return passed


def unexplained(case: str, passed: list[tuple[str, list[Edit]]]) -> list[str]:
    """Return the edits that pass and change no fact that the file states once."""
    known = STATED_ONCE[case]
    return [
        name
        for name, chosen in passed
        if not any(fnmatch(edit.name.split(": ")[0], one) for one in known for edit in chosen)
    ]


@pytest.mark.parametrize("case", CASES)
def test_results_as_written_fail(tmp_path: Path, case: str) -> None:
    """The starting point of every edit, and edits that change nothing of the matter."""
    assert judge(tmp_path, json.dumps(written(case)), case) is Status.FAIL
    data = written(case)
    data["run"]["command"], data["steps"][0]["verification"]["note"] = "leakaudit run", "as declared"
    data["coverage"]["skipped_snapshots"] = 3
    assert judge(tmp_path, resealed(data), case) is Status.FAIL


@pytest.mark.parametrize("case", FAILING)
def test_no_edit_of_a_failing_audit_passes(tmp_path: Path, case: str) -> None:
    """Somebody changed one thing or two and computed the digest again."""
    assert [name for name, _ in passing(tmp_path, FAILING[case], LEAKS, EDITS, SEED)] == []


@pytest.mark.integrations
@pytest.mark.parametrize("case", FAILING)
def test_no_edit_of_many_makes_a_failing_audit_pass(tmp_path: Path, case: str) -> None:
    """The same with ten times as many edits."""
    assert [name for name, _ in passing(tmp_path, FAILING[case], LEAKS, MANY, SEED + 1)] == []


@pytest.mark.parametrize("case", UNDECIDED)
def test_only_a_fact_that_is_stated_once_makes_an_undecided_audit_pass(tmp_path: Path, case: str) -> None:
    """A gap in the evidence is not closed by an edit of anything else."""
    found = UNDECIDED[case]
    last = len(found[0].steps) - 1
    assert unexplained(case, passing(tmp_path, found, last, EDITS, SEED)) == []


@pytest.mark.integrations
@pytest.mark.parametrize("case", UNDECIDED)
def test_only_such_a_fact_makes_an_undecided_audit_pass_in_many_edits(tmp_path: Path, case: str) -> None:
    """The same with ten times as many edits."""
    found = UNDECIDED[case]
    last = len(found[0].steps) - 1
    assert unexplained(case, passing(tmp_path, found, last, MANY, SEED + 1)) == []


@pytest.mark.parametrize("case", UNDECIDED)
def test_an_undecided_audit_lacks_one_thing_only(tmp_path: Path, case: str) -> None:
    """Otherwise no edit could make it pass, and the fuzzer would show nothing."""
    verdict = verdict_of(tmp_path, json.dumps(to_json(UNDECIDED[case][0])), UNDECIDED[case][1])
    assert verdict is not None and verdict.verdict is Status.INCONCLUSIVE
    assert len({reason for rule in verdict.rules for reason in rule.reasons}) <= 2, verdict.sentence


@pytest.mark.parametrize("case", FAILING)
def test_an_edit_without_a_fitting_digest_is_an_error(tmp_path: Path, case: str) -> None:
    """An accident: whatever was changed, the file is not the one that was written."""
    before = digest_of(written(case))
    for chosen, data in edits_of(FAILING[case], LEAKS, SEED + 2).many(25):
        if isinstance(data, dict) and (digest_of(data) != before or data.get("digest") != before):
            assert judge(tmp_path, json.dumps(data), case) is Status.ERROR, described(chosen)


# -------------------------------------------------------------------------------------------- policy, waivers, baseline

RED_LINE = {"id": "red-line", "event": "exact_sentence", "max_count": 0, "severity": "critical"}
RATE = {"id": "rate", "event": "exact_sentence", "max_rate": 0.05}
OVERLAP = {"id": "overlap", "metric": "rougeL", "statistic": "max", "max_value": 0.5}


FORGERIES: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "blind": (("controls",), to_json(UNDECIDED["few steps"][0])["controls"]),
    "wrong scores": (("controls", "negative", "k"), 0),
    "old": (("run", "finished"), NOW.isoformat()),
    "unverifiable": (("steps", -1, "verification", "status"), "verified"),
    "words not kept": (("steps", -1, "words_not_kept"), False),
    "beyond": (("steps", -1, "beyond_hidden"), False),
}
"""Undecided audit -> the place and the value of an edit that makes it pass."""


@pytest.mark.parametrize("case", FORGERIES)
def test_a_fact_that_is_stated_once_can_be_forged(tmp_path: Path, case: str) -> None:
    """The edits that the written argument admits do pass, so the fuzzer can see them."""
    (found, rules), (place, value) = UNDECIDED[case], FORGERIES[case]
    data = copy.deepcopy(to_json(found))
    container: Any = data
    for part in place[:-1]:
        container = container[part]
    container[place[-1]] = value
    verdict = verdict_of(tmp_path, resealed(data), rules)
    assert verdict is not None and verdict.verdict is Status.PASS, verdict


def test_a_changed_policy_that_passes_has_another_digest(tmp_path: Path) -> None:
    """A looser policy may pass what the first one failed, but never under its digest."""
    rules = policy(RED_LINE, RATE, OVERLAP, evidence={"min_steps": 5})
    found = FAILING["sentence"][0]
    file = tmp_path / "policy.yaml"
    for chosen, data in Edits(Policy, rules.model_dump(mode="json", by_alias=True), SEED).many(200):
        file.write_text(yaml.safe_dump(data))
        try:
            changed = load_policy(file)
        except ConfigError:
            continue
        verdict = gate.evaluate(found, changed, now=NOW)
        assert verdict.policy_digest == changed.digest
        if verdict.verdict is not Status.FAIL:
            assert changed.digest != rules.digest, f"seed {SEED}: {described(chosen)}"


TODAY = NOW.date()


def waiver(name: str, rule: str, first: int, last: int) -> Data:
    """Return a waiver that holds for some days, counted from today."""
    return {
        "id": name,
        "rule": rule,
        "scope": {"defense": "shipped", "run": "any"},
        "reason": "the texts are public",
        "owner": "j.doe",
        "ticket": "",
        "created": str(TODAY + timedelta(days=first)),
        "expires": str(TODAY + timedelta(days=last)),
        "ceiling": None,
    }


def test_no_changed_waiver_lets_through_what_cannot_be_waived(tmp_path: Path) -> None:
    """Not a critical rule, not an undecided one, and not a rule whose waiver is over."""
    rules = policy(RED_LINE, {**RED_LINE, "id": "verbatim", "severity": "high"}, RATE, evidence={"min_steps": 5})
    found = FAILING["sentence"][0]
    base = {
        "schema": "leakaudit.waivers/1",
        "waivers": [
            waiver("W-1", "red-line", -5, 20),
            waiver("W-2", "rate", -5, 20),
            waiver("W-3", "verbatim", -60, -1),
        ],
    }
    bare = {rule.id: rule.status for rule in gate.evaluate(found, rules, now=NOW).rules}
    assert bare == {"red-line": Status.FAIL, "verbatim": Status.FAIL, "rate": Status.INCONCLUSIVE}
    file, accepted = tmp_path / "waivers.yaml", 0
    for chosen, data in Edits(Waivers, base, SEED).many(250, pairs=0.5):
        file.write_text(yaml.safe_dump(data))
        try:
            exceptions = parse_waivers(file.read_text(), str(file))
        except ConfigError:
            continue
        accepted += 1
        verdict = gate.evaluate(found, rules, now=NOW, waivers=exceptions)
        assert verdict.verdict is Status.FAIL, f"seed {SEED}: {described(chosen)}"
        let = {rule.id for rule in verdict.rules if rule.waived}
        valid = [
            w for w in exceptions.waivers if w.created <= TODAY <= w.expires <= w.created + timedelta(days=MAX_DAYS)
        ]
        assert let <= {"verbatim"} & {one.rule for one in valid}, f"seed {SEED}: {described(chosen)}"
    assert accepted > 30


def test_a_changed_baseline_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """No edit of its file ends in a traceback."""
    rules = policy(RATE)
    found = FAILING["sentence"][0]
    saved = baselines.baseline_of(found, rules, gate.evaluate(found, rules, now=NOW), "notes")
    file = tmp_path / baselines.FILE
    for _, data in Edits(baselines.SavedBaseline, saved.model_dump(mode="json", by_alias=True), SEED).many(150):
        file.write_text(json.dumps(data))
        problem = ""
        try:
            read = baselines.load(file)
        except ResultsError as error:
            problem = str(error)
        assert "\n" not in problem
        assert problem or (read is not None and read.counts())


@pytest.mark.parametrize("case", CASES)
def test_a_key_that_stands_twice_hides_nothing(tmp_path: Path, case: str) -> None:
    """Readers differ in which of two keys they take, so neither is taken."""
    text, draw = json.dumps(written(case)), random.Random(17)
    keys = sorted({key for _, value in walk(written(case)) if isinstance(value, dict) for key in value})
    for key in draw.sample(keys, 15):
        twice = text.replace(f'"{key}": ', f'"{key}": [], "{key}": ', 1)
        assert judge(tmp_path, twice, case) is Status.ERROR, key
    assert judge(tmp_path, f'{text[:-1]}, "attempts": []}}', case) is Status.ERROR


@pytest.mark.parametrize("case", CASES)
def test_a_torn_file_is_an_error(tmp_path: Path, case: str) -> None:
    """Cut anywhere, or with a byte changed."""
    text, draw = json.dumps(written(case)), random.Random(18)
    for _ in range(10):
        cut = draw.randrange(len(text))
        assert judge(tmp_path, text[:cut], case) is Status.ERROR
        swapped = text[:cut] + draw.choice('"{}[]:,\\') + text[cut + 1 :]
        assert swapped == text or judge(tmp_path, swapped, case) is Status.ERROR
