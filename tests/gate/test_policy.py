"""The policy: what YAML may say, which names it may use, and the built-in one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from leakaudit import registry
from leakaudit.config.described import described
from leakaudit.errors import ConfigError
from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import Policy, default_policy, load_policy
from leakaudit.gate.verdict import Status
from leakaudit.plugins import names as plugin_names
from leakaudit.results.schema import Attempt, AttemptStatus, Score, StepRecord
from tests.gate.test_evidence import reached
from tests.support.factories import NOW, attempt, audit, results, step
from tests.support.judging import RED_LINE, judge


def test_the_default_policy_fails_on_one_sentence_and_says_what_a_pass_takes() -> None:
    """Used where no policy is given."""
    default = default_policy()
    assert gate.evaluate(audit(1, 2), default, now=NOW).verdict is Status.FAIL
    assert gate.evaluate(audit(0, 3), default, now=NOW).verdict is Status.INCONCLUSIVE
    told = [reached(i, passes=False) for i in range(59)]
    assert gate.evaluate(results([step(i) for i in range(59)], told), default, now=NOW).verdict is Status.PASS
    untold = gate.evaluate(audit(0, 59), default, now=NOW)
    assert untold.verdict is Status.INCONCLUSIVE
    assert "no attack that finished can tell what was in reach of its search" in untold.sentence


def of_eight(done: Attempt) -> Attempt:
    """Return an attempt with its text eight times."""
    if not done.sequences:
        return done
    texts = [done.sequences[0].model_copy(update={"id": f"sq-{i}"}) for i in range(8)]
    means = {name: Score(value=found.value, n=8) for name, found in done.scores.items() if isinstance(found, Score)}
    precise = texts[0].token_precision
    means |= {} if precise is None else {"token_precision": Score(value=precise, n=8)}
    return done.model_copy(update={"sequences": tuple(texts), "scores": dict(done.scores) | means})


def words(number: int) -> list[Attempt]:
    """Build three attempts on eight texts: a bag, labels, and an empty search."""
    bag = attempt(number, "rows", kind="bag", recall=1.0, events=("all_words", "most_words"))
    labels = attempt(number, "llg", kind="labels", leaks=True)
    return [of_eight(bag), of_eight(labels), of_eight(attempt(number, "span", recall=0.0))]


def eight(number: int) -> StepRecord:
    """Build a step of eight texts."""
    return step(number, n_sequences=8).model_copy(update={"n_tokens_bucket": "65-128"})


def test_the_headline_says_what_came_back_beside_the_rule_that_decides() -> None:
    """Every word of eight texts and all labels are named, though no sentence is."""
    found = results([eight(0)], words(0))
    verdict = gate.evaluate(found, default_policy(), now=NOW)
    assert verdict.sentence.startswith("1 client step audited: no sentence of 8+ tokens was recovered exactly")
    assert "But every word of 8 of 8 texts and all labels came back." in verdict.sentence
    assert "leak seen" not in verdict.sentence
    assert "But" not in judge(audit(0, 60), RED_LINE).sentence  # nothing came back
    assert "But" not in judge(audit(3, 60), RED_LINE).sentence  # the rule itself says what did


def test_the_built_in_policy_judges_words_overlap_and_reach_at_level_error() -> None:
    """Sixty steps that lose words, most of a text or a text in reach do not pass."""
    default = default_policy()
    steps = [step(i) for i in range(60)]

    def verdict(attempts: list[Attempt], steps: list[StepRecord] = steps) -> tuple[Status, set[str]]:
        found = gate.evaluate(results(steps, attempts), default, now=NOW)
        return found.verdict, {r.id for r in found.rules if r.status is Status.FAIL and r.level == "error"}

    worded = verdict([a for i in range(60) for a in words(i)], [eight(i) for i in range(60)])
    assert worded == (Status.FAIL, {"all-words-rate", "most-words-rate"})
    most = [attempt(i, recall=11 / 12) for i in range(60)]
    assert verdict(most)[0] is Status.FAIL and "overlap" in verdict(most)[1]
    told = [a.model_copy(update={"events": ("most_words",)}) for a in most]
    assert verdict(told) == (Status.FAIL, {"overlap", "most-words-rate"})
    open_search = [reached(i, passes=True, status=AttemptStatus.BUDGET_EXHAUSTED) for i in range(60)]
    assert verdict(open_search) == (Status.FAIL, {"in-reach-rate"})
    gave_up = [reached(i, passes=True) for i in range(60)]
    assert verdict(gave_up) == (Status.FAIL, {"in-reach-rate"})
    assert verdict([reached(i, passes=False) for i in range(60)]) == (Status.PASS, set())


def test_a_chance_overlap_in_one_step_does_not_fail_the_built_in_policy() -> None:
    """Short unrelated texts share half of their words sometimes."""
    attempts = [reached(i, passes=False, recall=0.6 if i == 0 else 0.1, long_enough=i > 0) for i in range(100)]
    found = gate.evaluate(results([step(i) for i in range(100)], attempts), default_policy(), now=NOW)
    assert found.verdict is Status.PASS


POLICY = """\
schema: leakaudit.policy/1
name: clinical-notes-release
owner: privacy-office
evidence: {min_steps: 60, max_age: 7d}
controls:
  positive: {steps: 29, rate_lower: 0.90}
rules:
  - id: no-verbatim
    severity: critical
    event: exact_sentence
    max_count: 0
  - id: overlap
    level: warn
    scope: {defense: shipped, attack: [tag, span]}
    metric: rougeL
    statistic: p95
    max_value: 35e-2
report: {text: masked, top_samples: 50}
"""


def test_a_policy_is_read_from_yaml(tmp_path: Path) -> None:
    """The digest depends on the content, not on the layout."""
    path = tmp_path / "gate.yaml"
    path.write_text(POLICY)
    found = load_policy(path)
    assert found.rules[1].scope.attacks == ("tag", "span")
    assert found.rules[1].max_value == 0.35
    path.write_text("# a comment\n" + POLICY.replace("{min_steps: 60, max_age: 7d}", "{max_age: 7d, min_steps: 60}"))
    assert load_policy(path).digest == found.digest
    path.write_text(POLICY.replace("min_steps: 60", "min_steps: 61"))
    assert load_policy(path).digest != found.digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_count: 0", "max_rogue: 0", r"gate\.yaml:11: unknown key 'max_rogue'; did you mean 'max_rate'\?"),
        ("max_count: 0", "max_rate: 0", r"gate\.yaml:11: rules\[0\]\.max_rate: input should be greater than 0"),
        ("    max_count: 0\n", "", r"gate\.yaml:8: .*'no-verbatim' needs exactly one of max_rate, .*found none"),
        (
            "statistic: p95",
            "event: exact_sentence",
            r"'overlap': max_value goes with metric and statistic; found event",
        ),
        ("exact_sentence", "exact_sentense", r"gate\.yaml:10: rules\[0\]\.event: input should be 'exact_sentence'"),
        ("id: overlap", "id: no-verbatim", "two rules are called 'no-verbatim'"),
        ("max_age: 7d", "max_age: a week", r"gate\.yaml:4: .*write a number and d, h, m or s, such as 7d"),
        ("leakaudit.policy/1", "leakaudit.policy/2", r"gate\.yaml:1: schema: input should be 'leakaudit\.policy/1'"),
        (
            "    severity: critical\n",
            "    level: warn\n",
            "every rule is at level warn, so the policy could never fail",
        ),
        ("attack: [tag, span]", "attack: []", "an empty list of attacks would switch the rule off"),
    ],
)
def test_a_mistake_in_a_policy_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    """A typo must not switch a rule off."""
    path = tmp_path / "gate.yaml"
    path.write_text(POLICY.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        load_policy(path)


@pytest.mark.parametrize(
    ("old", "new", "problems"),
    [
        (
            "exact_sentence",
            "exact_sentense",
            ["10: rules[0].event: input should be 'exact_sentence', ...; did you mean 'exact_sentence'?"],
        ),
        (
            "id: overlap",
            "id: no-verbatim",
            ["12: rules[1].id: two rules are called 'no-verbatim'; each needs its own id"],
        ),
        (
            "    severity: critical\n",
            "    level: warn\n",
            [
                "7: rules: every rule is at level warn, so the policy could never fail; set at least one rule to level: error"
            ],
        ),
        (
            "[tag, span]",
            "[tag, spam]",
            ["14: rules[1].scope.attack: rule 'overlap': the attack 'spam' is unknown; did you mean 'span'?"],
        ),
        (
            "[tag, span]",
            "spam",
            ["14: rules[1].scope.attack: rule 'overlap': the attack 'spam' is unknown; did you mean 'span'?"],
        ),
        (
            "shipped",
            "shiped",
            ["14: rules[1].scope.defense: rule 'overlap': the defence 'shiped' is unknown; did you mean 'shipped'?"],
        ),
        (
            "shipped",
            "prun(share=0.9)",
            [
                "14: rules[1].scope.defense: rule 'overlap': the defence 'prun(share=0.9)' is unknown; did you mean 'prune'?"
            ],
        ),
        (
            "metric: rougeL",
            "metric: rouge",
            ["15: rules[1].metric: rule 'overlap': the metric 'rouge' is unknown; did you mean 'rougeL'?"],
        ),
    ],
)
def test_a_wrong_name_is_one_error_with_its_line(tmp_path: Path, old: str, new: str, problems: list[str]) -> None:
    """Nothing else is reported for it, and above all no verdict."""
    path = tmp_path / "gate.yaml"
    path.write_text(POLICY.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_policy(path, plugin_names.names_for(audit(0, 1)))
    said = re.sub(r"('exact_sentence'), .*;", r"\1, ...;", str(caught.value))
    assert said.splitlines() == [f"{path}:{problem}" for problem in problems]


def test_a_name_may_be_one_of_ours_of_the_results_or_of_another_package(tmp_path: Path) -> None:
    """Known names are ours and those in the results, without options."""
    path = tmp_path / "gate.yaml"
    path.write_text(POLICY.replace("[tag, span]", "[dlg, theirs]").replace("shipped", "prune(share=0.99)"))
    theirs = results([step(0)], [attempt(0, "theirs")])
    assert load_policy(path, plugin_names.names_for(theirs)).rules[1].scope.attacks == ("dlg", "theirs")
    with pytest.raises(ConfigError, match="the attack 'theirs' is unknown; known: "):
        load_policy(path, plugin_names.own_names())


def test_every_registered_name_is_known_without_importing_it() -> None:
    """The names stand in the source; this imports the plugins and compares.

    Old names of ours are known as well, because older results hold them.
    """
    own = plugin_names.own_names()
    for kind in ("attacks", "defenses", "metrics"):
        plugins = getattr(registry, kind)
        registered = {n for n, plugin in plugins if plugin.__module__.startswith("leakaudit.")}
        assert getattr(own, kind) == registered | plugins.renamed.keys()


def test_every_key_of_a_policy_has_a_description() -> None:
    """`leakaudit schema policy` is the reference; a part has that of its class."""
    schema = described(Policy).model_json_schema()
    parts = {"": schema, **schema["$defs"]}
    keys = {f"{part}.{name}": key for part, model in parts.items() for name, key in model.get("properties", {}).items()}
    assert [name for name, key in keys.items() if not {"description", "$ref"} & set(key)] == []
