"""Wrong policies: each message says where, what was found and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from leakaudit.errors import ConfigError, WrongFileError
from leakaudit.gate.policy import Rule, load_policy
from leakaudit.plugins.names import own_names

HEAD = "schema: leakaudit.policy/1\nname: p\nrules:\n"
RULE = "  - id: a\n    event: exact_sentence\n    max_count: 0\n"
METRIC = "  - id: a\n    metric: rougeL\n    statistic: p95\n    max_value: 0.5\n"
EVENTS = "'exact_sentence', 'exact_sequence', 'all_words', 'most_words', 'in_reach' or 'label_counts'"


def changed(old: str, new: str, text: str = RULE) -> str:
    """Return a policy with another text in its rule."""
    assert old in text
    return HEAD + text.replace(old, new)


WRONG = {
    "no schema": (f"name: p\nrules:\n{RULE}", "1: key 'schema' is missing"),
    "another file": (
        (HEAD + RULE).replace("policy/1", "waivers/1"),
        "1: schema: input should be 'leakaudit.policy/1'",
    ),
    "no name": ((HEAD + RULE).replace("name: p", 'name: ""'), "2: name: must not be empty"),
    "rules left empty": (HEAD, "3: rules: expected a list, found nothing"),
    "rules by name": (
        HEAD + "  a: {event: all_words, max_count: 0}\n",
        "3: rules: expected a list, found keys and values; begin each item with a hyphen",
    ),
    "no id": (changed("id: a\n    ", ""), "4: key 'id' is missing in rules[0]"),
    "id with capitals": (
        changed("id: a", "id: No_Text"),
        "4: rules[0].id: 'No_Text' does not have the form ^[a-z0-9][a-z0-9-]{0,63}$; did you mean 'no-text'?",
    ),
    "event misspelt": (
        changed("exact_sentence", "exact-sentance"),
        f"5: rules[0].event: input should be {EVENTS}; did you mean 'exact_sentence'?",
    ),
    "key misspelt": (changed("max_count", "max_cuont"), "6: unknown key 'max_cuont'; did you mean 'max_count'?"),
    "percent as number": (
        changed("max_count: 0", "max_rate: 5"),
        "6: rules[0].max_rate: input should be less than or equal to 0.99, found 5: it is a share from 0 to 1; did you mean 0.05?",
    ),
    "percent sign": (
        changed("max_count: 0", "max_rate: 5 %"),
        "6: rules[0].max_rate: input should be a valid number, found '5 %'; write 0.05",
    ),
    "decimal comma": (
        changed("max_count: 0", "max_rate: 0,05"),
        "6: rules[0].max_rate: input should be a valid number, found '0,05'; write 0.05",
    ),
    "number in quotes": (
        changed("max_count: 0", 'max_rate: "0.05"'),
        "6: rules[0].max_rate: input should be a valid number, found '0.05'; write 0.05 without quotes",
    ),
    "rate of 1": (
        changed("max_count: 0", "max_rate: 1"),
        "6: rules[0].max_rate: input should be less than or equal to 0.99, found 1: it is a share from 0 to 1",
    ),
    "rate of 0": (
        changed("max_count: 0", "max_rate: 0"),
        "6: rules[0].max_rate: input should be greater than 0, found 0",
    ),
    "no finite rate": (changed("max_count: 0", "max_rate: .nan"), "6: rules[0].max_rate: .nan is not a finite number"),
    "yes for a count": (
        changed("max_count: 0", "max_count: yes"),
        "6: rules[0].max_count: input should be a valid integer, found yes",
    ),
    "part of a step": (
        changed("max_count: 0", "max_count: 0.5"),
        "6: rules[0].max_count: input should be a valid integer, found 0.5",
    ),
    "key twice": (
        HEAD + RULE + "    max_count: 3\n",
        "7: duplicate key 'max_count'; line 6 has it already",
    ),
    "two limits": (
        HEAD + RULE + "    max_rate: 0.05\n",
        "4: rules[0]: rule 'a' needs exactly one of max_rate, max_count, max_value, versus_baseline, claimed_epsilon, membership; found max_rate and max_count",
    ),
    "metric without statistic": (
        changed("    statistic: p95\n", "", METRIC),
        "4: rules[0]: rule 'a': max_value goes with metric and statistic; found metric",
    ),
    "metric misspelt": (
        changed("rougeL", "rouge-l", METRIC),
        "5: rules[0].metric: rule 'a': the metric 'rouge-l' is unknown; did you mean 'rougeL'?",
    ),
    "statistic misspelt": (
        changed("p95", "p90", METRIC),
        "6: rules[0].statistic: input should be 'mean', 'p95' or 'max'; did you mean 'p95'?",
    ),
    "score of 50": (
        changed("0.5", "50", METRIC),
        "7: rules[0].max_value: input should be less than or equal to 0.99, found 50: it is a share from 0 to 1; did you mean 0.5?",
    ),
    "level misspelt": (
        HEAD + RULE + "    level: warning\n",
        "7: rules[0].level: input should be 'error' or 'warn'; did you mean 'warn'?",
    ),
    "rule switched off": (
        HEAD + RULE + "    enabled: false\n",
        f"7: unknown key 'enabled'; known keys: {', '.join(sorted(Rule.model_fields))}",
    ),
    "scope as a word": (
        HEAD + RULE + "    scope: shipped\n",
        "7: rules[0].scope: expected keys and values, found 'shipped'; keys: attack, defense",
    ),
    "scope key misspelt": (
        HEAD + RULE + "    scope: {defence: shipped}\n",
        "7: unknown key 'defence'; did you mean 'defense'?",
    ),
    "attack misspelt": (
        HEAD + RULE + "    scope: {attack: [span, tagg]}\n",
        "7: rules[0].scope.attack: rule 'a': the attack 'tagg' is unknown; did you mean 'tag'?",
    ),
    "key one level too high": (HEAD + RULE + "min_steps: 59\n", "7: unknown key 'min_steps'; it belongs in evidence"),
    "key of two homes": (
        HEAD + RULE + "controls: {steps: 3}\n",
        "7: unknown key 'steps'; it belongs in controls.positive or controls.negative",
    ),
    "share of 20": (
        HEAD + RULE + "evidence: {max_censored: 20}\n",
        "7: evidence.max_censored: input should be less than or equal to 1, found 20: it is a share from 0 to 1; did you mean 0.2?",
    ),
    "age without unit": (
        HEAD + RULE + "evidence: {max_age: 7}\n",
        "7: evidence.max_age: 7 has no unit; write a number and d, h, m or s, such as 7d",
    ),
    "confidence in percent": (
        HEAD + RULE + "statistics: {confidence: 95}\n",
        "7: statistics.confidence: input should be less than 1, found 95: it is a share from 0 to 1; did you mean 0.95?",
    ),
    "attack for a list": (
        HEAD + RULE + "requires: {attacks: span}\n",
        "7: requires.attacks: expected a list, found 'span'; write [span]",
    ),
    "grant misspelt": (
        HEAD + RULE + "requires: {granted: [label]}\n",
        "7: requires.granted[0]: input should be 'labels', 'lengths', 'words', 'longest' or 'counts'; did you mean 'labels'?",
    ),
    "neither yes nor no": (
        HEAD + RULE + "requires: {adaptive: maybe}\n",
        "7: requires.adaptive: expected true or false, found 'maybe'",
    ),
    "half a prior": (HEAD + RULE + "nights: {prior: [1]}\n", "7: nights.prior: item 2 is missing"),
}
"""What is wrong -> the policy, and the only line that is said after the file's name."""


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_policy_is_told_by_line_key_and_what_to_write(what: str, tmp_path: Path) -> None:
    """One mistake is one line; a typo never switches a rule off."""
    text, said = WRONG[what]
    path = tmp_path / "p.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_policy(path, own_names())
    assert str(caught.value).splitlines() == [f"{path}:{said}"]
    assert isinstance(caught.value, WrongFileError)
    [problem] = caught.value.problems
    assert said == f"{problem.line}: {problem.message}"
