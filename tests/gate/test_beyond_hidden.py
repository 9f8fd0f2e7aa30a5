"""As many tokens as the hidden size is no protection, and no evidence of one."""

from __future__ import annotations

import pytest

from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.policy import default_policy, round_policy
from leakaudit.gate.verdict import Status
from leakaudit.results.regime import regime_in_words
from leakaudit.results.schema import AttackEntry, Attempt, AttemptStatus, Regime, Results
from tests.support.factories import NOW, attempt, changed, results, step
from tests.support.judging import RATE, RED_LINE, judge

STEPS = 60
LIMITED = {"span": True, "tag": False, "rows": False}
"""Attack -> whether it ends where a step has as many tokens as the hidden size."""


def _audit(*attempts: Attempt, beyond: bool | None = True) -> Results:
    """Build an audit whose steps have at least as many tokens as the hidden size."""
    steps = [step(i).model_copy(update={"beyond_hidden": beyond}) for i in range(STEPS)]
    found = results(steps, attempts)
    entries = {
        name: AttackEntry(
            label=name,
            meaning="",
            source="",
            goal="words" if name == "rows" else "text",
            threat_model="",
            token_limit=limit,
        )
        for name, limit in LIMITED.items()
        if name in found.run.battery.attacks
    }
    return changed(
        found,
        catalogue=found.catalogue.model_copy(update={"attacks": entries}),
        regime=found.regime.model_copy(update={"tokens": "9-16", "hidden": 12}),
    )


def _refused(number: int) -> Attempt:
    return attempt(number, status=AttemptStatus.NOT_APPLICABLE)


@pytest.mark.parametrize("policy", [default_policy(), round_policy()])
def test_an_attack_that_ends_at_the_hidden_size_makes_nothing_pass(policy: object) -> None:
    """Span alone, not applicable on every step: there is no evidence at all."""
    verdict = evaluate(_audit(*map(_refused, range(STEPS))), policy, now=NOW)  # type: ignore[arg-type]
    assert verdict.verdict is Status.INCONCLUSIVE
    assert Status.PASS not in {rule.status for rule in verdict.rules}
    assert (
        "60 steps have as many tokens as the hidden size or more, about which span can say nothing" in verdict.sentence
    )
    assert "that is no protection" in verdict.sentence


def test_such_an_attack_that_ran_and_found_nothing_is_no_evidence_either() -> None:
    """On a difference of weights it runs, and still cannot tell tokens apart."""
    clean = [attempt(i) for i in range(STEPS)]
    assert judge(_audit(*clean), RED_LINE).verdict is Status.INCONCLUSIVE
    assert judge(_audit(*clean), RED_LINE).rules[0].n == 0
    assert judge(_audit(*clean, beyond=False), RED_LINE).verdict is Status.PASS
    assert judge(_audit(*clean, beyond=None), RED_LINE).rules[0].n == 0  # not said, and 9-16 tokens may be the 12


def test_what_it_finds_there_is_proof_all_the_same() -> None:
    """Success proves, whatever the size of the batch."""
    leaked = [attempt(i, leaks=i == 7) for i in range(STEPS)]
    verdict = judge(_audit(*leaked), RED_LINE)
    assert (verdict.verdict, verdict.rules[0].k, verdict.rules[0].n) == (Status.FAIL, 1, 1)
    metric = {"id": "m", "metric": "rougeL", "statistic": "max", "max_value": 0.5}
    assert judge(_audit(*leaked), metric).verdict is Status.FAIL


def test_a_pass_by_other_attacks_says_whose_evidence_it_is() -> None:
    """The sentence names the attack without the limit that found nothing."""
    both = [one for i in range(STEPS) for one in (_refused(i), attempt(i, "tag"))]
    verdict = judge(_audit(*both), RATE)
    assert (verdict.verdict, verdict.rules[0].n) == (Status.PASS, STEPS)
    assert "60 steps without such a leak have as many tokens as the hidden size or more." in verdict.sentence
    assert "That is no protection: span can say nothing there; what counts is that tag found none." in verdict.sentence
    assert "protection" not in judge(_audit(*both, beyond=False), RATE).sentence


def test_words_do_not_stand_in_for_sentences() -> None:
    """A bag of words cannot show a sentence, so it closes no gap that span leaves."""
    both = [one for i in range(STEPS) for one in (_refused(i), attempt(i, "rows", kind="bag"))]
    assert judge(_audit(*both), RED_LINE).rules[0].n == 0


@pytest.mark.parametrize(
    "rule",
    [
        {"id": "counts", "event": "label_counts", "max_rate": 0.2},
        {"id": "labels", "metric": "label_accuracy", "statistic": "max", "max_value": 0.9},
    ],
)
def test_a_rule_on_labels_does_not_speak_of_texts(rule: dict[str, object]) -> None:
    """The hidden size says nothing about labels."""
    both = [one for i in range(STEPS) for one in (_refused(i), attempt(i, "tag", kind="labels"))]
    verdict = judge(_audit(*both), rule)
    assert verdict.rules[0].n == STEPS and "hidden size" not in verdict.sentence


def test_the_regime_says_who_reads_beyond_the_hidden_size() -> None:
    """By the property in the catalogue, and only attacks that ran there."""
    both = [one for i in range(STEPS) for one in (_refused(i), attempt(i, "tag"), attempt(i, "rows", kind="bag"))]
    said = regime_in_words(_audit(*both))
    assert " ".join(said) == (
        "The largest step has 9-16 tokens, and the hidden size of the model is 12. 60 of 60 steps have as many or more. That is no "
        "protection. There span can say nothing. tag (texts) and rows (words only) do not end there and ran."
    )
    assert "so they were not tested" in regime_in_words(_audit(*map(_refused, range(STEPS))))[0]
    small = regime_in_words(_audit(*both, beyond=False))
    assert small[0].endswith("Larger batches were not tested, and they are no protection.")
    assert regime_in_words(_audit(*both, beyond=None)) == []


@pytest.mark.parametrize(
    ("regime", "said"),
    [
        ({"embeddings": "trained", "head": "trained"}, "their rows name the words of a batch of any size"),
        ({"embeddings": "trained", "head": "tied"}, "rows of words of the batch stand out in batches of any size"),
        ({"embeddings": "frozen", "head": "frozen"}, "other layers still tell texts"),
        ({"adapters_rank": 16}, "Only adapters of rank 16"),
        ({"adapters_rank": 0}, "Only adapters, and parts"),
    ],
)
def test_the_regime_says_which_parts_are_trained(regime: dict[str, object], said: str) -> None:
    """And what their updates give away."""
    found = results([step(0)], [attempt(0)])
    known = Regime.model_validate(found.regime.model_dump() | regime)
    assert said in " ".join(regime_in_words(changed(found, regime=known)))
