"""Two audits side by side: compared rightly, or refused with the key that differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leakaudit.history.compare import Counted, compare, compare_counts
from leakaudit.history.keys import keys_of
from leakaudit.history.rates import rates_of
from leakaudit.results.differences import difference_of_rates
from leakaudit.results.schema import Results
from tests.support.factories import audit, changed, policy
from tests.support.judging import RATE


def marked(found: Results, first: int = 0, pairing: str = "aa" * 8) -> Results:
    """Give every step a mark of its batch."""
    steps = tuple(step.model_copy(update={"batch": f"{first + step.step:016x}"}) for step in found.steps)
    return changed(found, steps=steps, run=found.run.model_copy(update={"pairing": pairing}))


def test_shared_batches_are_compared_in_pairs() -> None:
    """Ten leaks that stop are enough; the same counts on other batches are not paired."""
    base, new = marked(audit(10, 10)), marked(audit(0, 20))
    [found] = compare(base, new, policy(RATE)).differences
    assert (found.paired, found.answer, found.base, found.new) == (True, "better", (10, 20), (0, 20))
    assert found.p_value == pytest.approx(0.5**10)
    [other] = compare(base, marked(audit(0, 20), first=100), policy(RATE)).differences
    assert not other.paired and other.answer == "better"
    [apart] = compare(base, marked(audit(0, 20), pairing="bb" * 8), policy(RATE)).differences
    assert not apart.paired, "marks under another key say nothing"


def test_a_worse_audit_is_worse() -> None:
    """And one more leak of twenty is no difference."""
    worse = compare(audit(0, 20), audit(20, 0), policy(RATE))
    assert worse.worse and worse.differences[0].answer == "worse"
    same = compare(audit(0, 20), audit(1, 19), policy(RATE))
    assert not same.worse and same.differences[0].answer == "no difference shown"


def _regime(found: Results, **fields: Any) -> Results:
    return changed(found, regime=found.regime.model_copy(update=fields))


def _run(found: Results, **fields: Any) -> Results:
    return changed(found, run=found.run.model_copy(update=fields))


def _battery(found: Results, **fields: Any) -> Results:
    return _run(found, battery=found.run.battery.model_copy(update=fields))


ONE_KEY: dict[str, tuple[str, Callable[[Results], Results]]] = {
    "another model": ("model", lambda r: changed(r, subject=r.subject.model_copy(update={"model": "GPT2LMHeadModel"}))),
    "another size": (
        "model",
        lambda r: changed(r, subject=r.subject.model_copy(update={"config_digest": "sha256:00"})),
    ),
    "another attack": ("attacks", lambda r: _battery(r, attacks=("tag",))),
    "another option": ("attacks", lambda r: _battery(r, attacks=("span(top=9)",))),
    "another version": ("attacks", lambda r: _run(r, tool="9.0")),
    "granted": (
        "granted",
        lambda r: changed(r, threat_model=r.threat_model.model_copy(update={"granted": ("labels",)})),
    ),
    "active server": (
        "granted",
        lambda r: changed(r, threat_model=r.threat_model.model_copy(update={"adversary": "an active server"})),
    ),
    "defences": ("defenses", lambda r: _battery(r, defenses=("none", "prune(share=0.9)"))),
    "another defence": ("shipped", lambda r: _regime(r, declared=("prune(share=0.9)",))),
    "batch size": ("batch", lambda r: _regime(r, batch_size=8)),
    "mode": ("batch", lambda r: _regime(r, training_mode=False)),
    "dropout": ("batch", lambda r: _regime(r, dropout=0.5)),
    "dtype": ("batch", lambda r: _regime(r, dtype="bfloat16")),
    "update": ("update", lambda r: _regime(r, update="difference of weights after 10 steps of AdamW")),
    "frozen parts": ("update", lambda r: _regime(r, trainable="frozen: embeddings")),
    "accumulation": ("update", lambda r: _regime(r, accumulation=4)),
    "time limit": ("budget", lambda r: _battery(r, budget_s=600.0)),
    "device": ("hardware", lambda r: _run(r, environment={"device": "cuda (H100)"})),
}


@pytest.mark.parametrize("case", ONE_KEY)
def test_audits_that_differ_in_one_key_are_refused_and_the_key_is_named(case: str) -> None:
    """They are compared if the user says so, and the comparison says it."""
    key, change = ONE_KEY[case]
    base = audit(5, 15)
    new = change(audit(5, 15))
    refused = compare(base, new, policy(RATE))
    assert refused.changed == (key,) and f"--despite {key}" in refused.refused and refused.differences == ()
    asked = compare(base, new, policy(RATE), despite=[key])
    assert not asked.refused and "Compared although" in asked.notes[0]


def test_a_declared_defence_that_is_gone_is_compared_and_not_excused() -> None:
    """The run declares the same as before, and sends something else."""
    base = _regime(audit(0, 20), declared=("gaussian-noise(scale=1)",))
    gone = tuple(step.model_copy(update={"shipped_defense": "none"}) for step in audit(20, 0).steps)
    new = _regime(changed(audit(20, 0), steps=gone), declared=("gaussian-noise(scale=1)",))
    found = compare(base, new, policy(RATE))
    assert not found.refused
    assert found.worse


def test_another_data_set_is_refused() -> None:
    """Its name is given by the caller."""
    refused = compare(audit(5, 15), audit(5, 15), policy(RATE), data=("notes", "mail"))
    assert refused.changed == ("data",)


def test_nothing_judged_cannot_be_compared() -> None:
    """Rather than a difference from zero."""
    [found] = compare(audit(0, 20), audit(0, 0), policy(RATE), despite=["attacks", "defenses", "shipped"]).differences
    assert found.answer == "cannot be compared" and found.lower is None


def counted(found: Results) -> Counted:
    """Return what a record of an audit holds."""
    return Counted(found.run.id, keys_of(found, policy(RATE)), rates_of(found, policy(RATE)))


@pytest.mark.parametrize("new", [(0, 20), (9, 11), (20, 0)])
def test_counts_are_compared_as_results_are(new: tuple[int, int]) -> None:
    """Where no batch is shared the two have the same answer, and refuse alike."""
    base, other = audit(5, 15), audit(*new)
    by_results, by_counts = (
        compare(base, other, policy(RATE)),
        compare_counts(counted(base), counted(other), policy(RATE)),
    )
    assert by_counts == by_results
    far = _run(other, environment={"device": "cuda (H100)"})
    assert compare_counts(counted(base), counted(far), policy(RATE)).refused == compare(base, far, policy(RATE)).refused


def test_an_event_without_a_count_cannot_be_compared() -> None:
    """It is not a rate of zero."""
    none = Counted("run", keys_of(audit(5, 15), policy(RATE)), ())
    found = compare_counts(none, counted(audit(5, 15)), policy(RATE))
    assert (found.differences[0].answer, found.answer) == ("cannot be compared", "cannot be compared")
    assert found.differences[0].sentence == "No step could be judged in the first audit."


def test_no_worse_needs_every_event_that_was_judged() -> None:
    """Only one that warns may lack in both audits; nothing judged is no answer."""
    error = {"id": "words", "event": "all_words", "max_rate": 0.05}
    words = error | {"level": "warn"}
    base, same = counted(audit(0, 20)), counted(audit(0, 20))
    both = policy(RATE, words)
    assert compare_counts(base, same, both).answer == "no worse"
    half = Counted(same.run, same.keys, [*same.rates, same.rates[0].model_copy(update={"event": "all_words"})])
    assert compare_counts(base, half, both).answer == "cannot be compared"
    assert compare_counts(base, same, policy(RATE, error)).answer == "cannot be compared"
    assert compare_counts(base, same, policy(RATE, words, error | {"id": "again"})).answer == "cannot be compared"
    assert compare_counts(base, same, policy(error)).answer == "cannot be compared"


def test_the_interval_of_a_difference_is_that_of_newcombe() -> None:
    """By hand: Clopper-Pearson gives 7 of 60 0.0561 to 0.2094, 0 of 60 up to 0.0487."""
    lower, upper = difference_of_rates((0, 60), (7, 60))
    assert lower == pytest.approx(7 / 60 - ((7 / 60 - 0.0561) ** 2 + 0.0487**2) ** 0.5, abs=2e-3)
    assert upper == pytest.approx(0.2094, abs=2e-2)
