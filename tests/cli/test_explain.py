"""`leakaudit explain`: everything has a text, and the numbers in it are right."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from leakaudit import registry
from leakaudit.cli import main
from leakaudit.exit_codes import EXPLAINED, ExitCode
from leakaudit.explanation import COLUMNS
from leakaudit.gate import evaluate as gate
from leakaudit.gate.events import EVENTS
from leakaudit.gate.explained import WORDS
from leakaudit.gate.policy import Policy, default_policy, load_policy, round_policy
from leakaudit.gate.steps_needed import steps_of_rule
from leakaudit.gate.verdict import ControlVerdict, Status
from leakaudit.history.baseline import baseline_of, save
from leakaudit.plugins.described import Described, described
from leakaudit.reports import print_verdict
from leakaudit.results.explained import STAMPS, STATUSES
from leakaudit.results.files import to_json, with_digest
from leakaudit.results.schema import AttackEntry, AttemptStatus, Results, VerificationStatus
from tests.gate.test_regression import marked
from tests.support.factories import NOW, attempt, audit, policy, results, step

MOST_LINES = 13
"""Most lines of one explanation without a run."""

OWN = "leakaudit."


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge the results of the factories two hours after they were made."""
    judged = gate.evaluate
    monkeypatch.setattr(gate, "evaluate", lambda found, rules, **given: judged(found, rules, **given | {"now": NOW}))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, arguments)], catch_exceptions=False)


def said(*arguments: object) -> str:
    """Return what the command prints, without its line breaks."""
    done = run(*arguments)
    assert done.exit_code == 0, done.stderr
    return " ".join(done.stdout.split())


def kept(folder: Path, found: Results) -> Path:
    (folder / "results.json").write_text(json.dumps(to_json(found)), encoding="utf-8")
    return folder


def own_plugins() -> list[tuple[str, str, type]]:
    """Return kind, name and class of every plugin of this package."""
    kinds = {"attack": registry.attacks, "defense": registry.defenses, "metric": registry.metrics}
    return [
        (kind, name, plugin)
        for kind, plugins in kinds.items()
        for name, plugin in plugins
        if plugin.__module__.startswith(OWN)
    ]


def everything() -> list[str]:
    """Return every name of the registries, tables and enums."""
    return [
        *(name for _, name, _ in own_plugins()),
        *EVENTS,
        *(str(code.value) for code in ExitCode),
        *(code.name for code in ExitCode),
        *(status.value for status in (*Status, *AttemptStatus, *VerificationStatus)),
        *(rule.id for rules in (default_policy(), round_policy()) for rule in rules.rules),
        *WORDS,
    ]


def test_whatever_a_user_may_meet_is_explained_on_a_screen_of_80_columns() -> None:
    """A new plugin, event, code or status without a text is found here."""
    for word in everything():
        done = run(word)
        assert done.exit_code == 0, f"{word}: {done.stderr}"
        for text in done.stdout.split("\n\n"):
            lines = text.strip().splitlines()
            assert 5 <= len(lines) <= MOST_LINES, f"{word}: {len(lines)} lines"
            assert max(map(len, lines)) <= COLUMNS, word


def test_each_table_has_an_entry_for_each_member() -> None:
    """A member without a text would be unknown to the command."""
    assert {*EXPLAINED} == {*ExitCode}
    assert {*STATUSES} == {*AttemptStatus}
    assert {*STAMPS} == {*VerificationStatus}
    controls = {f"{name}-control" for name in get_args(ControlVerdict.model_fields["name"].annotation)}
    assert controls <= {*WORDS} and {"warn", "waived"} <= {*WORDS}


def test_what_is_read_from_a_plugins_source_is_what_the_plugin_says() -> None:
    """An inherited or composed text that is read wrongly would be printed as its own."""
    for kind, name, plugin in own_plugins():
        read = described(kind, name)
        fields = [field for field in Described.__dataclass_fields__ if field not in ("kind", "name")]
        said_itself = {field: getattr(plugin, field) for field in fields if hasattr(plugin, field)}
        assert {field: getattr(read, field) for field in said_itself} == said_itself, name
        assert read.label and read.meaning and read.source, name


def test_a_word_with_two_meanings_gets_both_and_a_kind_chooses() -> None:
    """`label-counts` is a rule of the built-in policy and an event."""
    both = said("label-counts")
    assert "an event of the gate" in both and "a rule of the policy" in both
    assert "a rule of the policy 'built" not in said("event", "label_counts")
    assert "an event" not in said("rule", "label_counts")
    assert said("4") == said("exit-code", "4") == said("inconclusive") == said("exit code 4")
    assert said("ROUGE-L") == said("rougeL") and said("prune(share=0.9)") == said("prune")
    assert "how an attempt ended" in said("error") and "exit code 5" in said("error")
    assert said("143") == said("137") != said("130")
    assert said("exact-match rate") == said("exact"), "a label names its plugin"
    assert said("clip-difference") == said("clip-noise"), "a former name is read as that of today"


def test_an_unknown_word_gets_the_nearest_ones_and_exit_code_2() -> None:
    """With --json as one document on standard output."""
    done = run("spam")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "did you mean span" in done.stderr and "--policy FILE" in done.stderr
    done = run("(", "--json")
    assert done.exit_code == 2 and json.loads(done.stdout)["exit"] == 2


def test_without_a_word_every_name_is_listed_on_one_screen() -> None:
    """Forty lines; JSON has the same names by kind."""
    done = run()
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and len(lines) <= 40 and max(map(len, lines)) <= COLUMNS
    listed = {name for names in json.loads(run("--json").stdout).values() for name in names}
    assert {name for name in everything() if not name.isdigit()} <= {*listed}
    words = done.stdout.replace(",", " ").split()
    assert {name for name in listed} <= {*words}


def test_json_has_the_same_texts() -> None:
    """For editors and chat bots."""
    found = json.loads(run("4", "--json").stdout)
    [topic] = found["topics"]
    assert (topic["kind"], topic["name"]) == ("exit code", "INCONCLUSIVE")
    text = " ".join([topic["title"], *(f"{heading}: {text}" for heading, text in topic["parts"])])
    assert text == said("4")


@pytest.mark.parametrize(
    ("rule", "fewest"),
    [
        ({"event": "exact_sentence", "max_rate": 0.05}, 59),
        ({"event": "exact_sentence", "max_rate": 0.2}, 14),
        ({"event": "exact_sentence", "max_count": 0}, 3),
        ({"metric": "rougeL", "statistic": "p95", "max_value": 0.5}, 59),
        ({"metric": "rougeL", "statistic": "mean", "max_value": 0.5}, 30),
        ({"metric": "rougeL", "statistic": "max", "max_value": 0.5}, 3),
    ],
)
def test_as_many_clean_steps_as_it_says_pass_and_one_less_does_not(rule: dict[str, object], fewest: int) -> None:
    """The number comes from the gate's own verdict."""
    rules = policy({"id": "one", **rule}, evidence={"min_steps": 3})
    assert steps_of_rule(rules.rules[0], rules) == fewest
    assert gate.evaluate(audit(0, fewest), rules, now=NOW).verdict is Status.PASS
    assert gate.evaluate(audit(0, fewest - 1), rules, now=NOW).verdict is Status.INCONCLUSIVE


POLICY = """schema: leakaudit.policy/1
name: ours
rules:
  - id: short-texts
    event: exact_sequence
    min_tokens: 3
    max_count: 2
    scope: {defense: prune, attack: [span, tag]}
  - id: rate
    event: exact_sentence
    max_rate: 0.05
  - id: best
    level: warn
    metric: best_rl
    statistic: mean
    max_value: 0.3
"""


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    (tmp_path / "policy.yaml").write_text(POLICY)
    return tmp_path / "policy.yaml"


def test_a_rule_of_ones_own_policy_in_words(ours: Path) -> None:
    """Event, length, defence, attacks, limit and weight."""
    text = said("short-texts", "--policy", ours)
    assert "the number of client steps in which at least one whole text of 3+ tokens was recovered exactly" in text
    assert "under the defence prune; of attacks, only span, tag" in text
    assert "Allowed: 2 steps." in text and "more than 2 steps have it" in text and "59 steps" in text
    text = said("best", "--policy", ours)
    assert "the mean of best_rl over client steps, on the update as the run ships it" in text
    assert "never changes the verdict" in text and "30" not in text.partition("Allowed")[0]
    assert run("sentence-rate", "--policy", ours).exit_code == 2, "the built-in policy is not the one that was given"
    assert "rules: short-texts, rate, best" in run("--policy", ours).stdout


def test_what_a_rule_saw_and_what_to_do(ours: Path, tmp_path: Path) -> None:
    """The number of further steps that it names is enough."""
    few = said("rate", "--policy", ours, "--run", kept(tmp_path, audit(0, 12)))
    assert "In this run: INCONCLUSIVE. In none of 12 audited client steps" in few
    assert "Audit 47 more steps at the least" in few and "other reasons" not in few
    rules = policy()
    assert gate.evaluate(audit(0, 12 + 47), rules, now=NOW).verdict is Status.PASS
    leaky = said("rate", "--policy", ours, "--run", kept(tmp_path, audit(9, 51)))
    assert "In this run: FAIL." in leaky and "Do not ship. Look first at step st-0" in leaky
    assert "Audit defences as well" in leaky
    assert "Nothing about this rule" in said("rate", "--policy", ours, "--run", kept(tmp_path, audit(0, 60)))
    untested = said("short-texts", "--policy", ours, "--run", tmp_path / "results.json")
    assert "Not tested is not a pass" in untested and "Audit with an attack that can show this" in untested


def test_a_failed_rule_names_the_defence_that_passes(ours: Path, tmp_path: Path) -> None:
    """Of those that the audit compared."""
    attempts = [
        attempt(i, defense=defense, leaks=defense == "none")
        for i in range(60)
        for defense in ("none", "prune(share=0.9)")
    ]
    found = results([step(i) for i in range(60)], attempts)
    assert "It passes under prune(share=0.9)." in said("rate", "--policy", ours, "--run", kept(tmp_path, found))


def test_results_that_cannot_be_judged_point_to_their_exit_code(ours: Path, tmp_path: Path) -> None:
    """Without rules in the verdict there is nothing that the rule saw."""
    found = audit(0, 60)
    broken = found.model_copy(update={"run": found.run.model_copy(update={"finished": "2027-01-01T00:00:00Z"})})
    text = said("rate", "--policy", ours, "--run", kept(tmp_path, with_digest(broken)))
    assert "In this run: ERROR." in text and "leakaudit explain exit-code 5" in text


def test_a_run_explains_plugins_of_other_packages_and_nothing_else(tmp_path: Path) -> None:
    """`--run` beside an exit code would be ignored without a word."""
    found = audit(0, 3)
    entry = AttackEntry(label="theirs", meaning="Reads tea leaves.", source="", goal="text", threat_model="")
    taken = found.catalogue.model_copy(update={"attacks": {"tea": entry}})
    kept(tmp_path, with_digest(found.model_copy(update={"catalogue": taken})))
    assert "Reads tea leaves." in said("tea", "--run", tmp_path)
    assert run("tea").exit_code == 2
    done = run("4", "--run", tmp_path)
    assert done.exit_code == 2 and "leave --run out" in done.stderr


def test_the_gate_names_the_command_where_it_does_not_pass() -> None:
    """A rule of one's own policy needs the file; a pass needs nothing."""

    def last_line(found: Results, rules: Policy | None = None) -> str:
        out = io.StringIO()
        verdict = gate.evaluate(found, rules or default_policy(), now=NOW)
        print_verdict(verdict, console=Console(file=out, width=100, no_color=True))
        return out.getvalue().splitlines()[-1]

    assert last_line(audit(9, 51)) == "`leakaudit explain no-sentence-verbatim` says what this rule asks."
    assert (
        last_line(audit(0, 12), policy()) == "`leakaudit explain sentence-rate --policy FILE` says what this rule asks."
    )
    assert "explain" not in last_line(audit(0, 60), policy())
    found = audit(0, 60)
    broken = found.model_copy(update={"run": found.run.model_copy(update={"finished": "2027-01-01T00:00:00Z"})})
    assert last_line(broken) == "`leakaudit explain exit-code 5` says what this means and what to do."


def test_rules_on_numbers_of_others_are_explained_as_such(tmp_path: Path) -> None:
    """Wrong: an unknown word, or more attacks where an accountant is missing."""
    rules = "  - {id: epsilon, claimed_epsilon: {max: 8}}\nimported:\n  - {id: model, import: memaudit, measure: regurgitation_rate, max_value: 0.1}\n"
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY + rules)
    folder = kept(tmp_path, audit(0, 60))
    epsilon = said("epsilon", "--policy", file, "--run", folder)
    assert "needs an accountant" in epsilon and "Correct what the reasons name" in epsilon and "attack" not in epsilon
    model = said("model", "--policy", file, "--run", folder)
    assert "regurgitation rate of the trained model" in model and "--memaudit FILE" in model
    assert "model" in run("--policy", file).stdout


def test_a_difference_is_explained_with_the_baseline_of_the_policy(tmp_path: Path) -> None:
    """Wrong: `no baseline is set` where there is one."""
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY + "  - {id: worse, event: exact_sentence, versus_baseline: {margin: 0.1}}\n")
    rules, base = load_policy(file), marked(audit(0, 60), "old")
    verdict = gate.evaluate(base, rules, now=NOW)
    save(baseline_of(base, rules, verdict), tmp_path / "leakaudit.baseline.json")
    text = said("worse", "--policy", file, "--run", kept(tmp_path, marked(audit(0, 60), "new")))
    assert "In this run: PASS. 0 of 60" in text and "0 of 60 in the baseline old" in " ".join(text.split())
