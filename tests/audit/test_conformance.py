"""Planted mistakes of DP-SGD are named, and correct trainings are not accused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from leakaudit.audit.conformance.assumptions import composition, sampling
from leakaudit.audit.conformance.judge import DEFAULT_LEVEL, TEST_FAMILIES, judge
from leakaudit.audit.conformance.measure import measure
from leakaudit.audit.conformance.measured import StepMeasured
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.step import ClientStep
from leakaudit.errors import SnapshotError
from leakaudit.results.conformance import ConformanceCheck
from leakaudit.results.schema import Privacy
from tests.support import private_training, tiny

pytest.importorskip("opacus")

from tests.benchmarks.conformance import (
    CORRECT,
    MISTAKES,
    OF_RUNS,
    TEXTS,
    checks,
    checks_of_run,
    checks_of_two,
    noisy_steps,
)

SAID = {
    "no noise on one layer": ("noise", "No noise is on bert.encoder.layer.1.output.dense.weight."),
    "no noise on the embedding": ("noise", "No noise is on bert.embeddings.word_embeddings.weight."),
    "one seed for all steps": ("independence", "as if the random generator had started from the same seed"),
    "bound after averaging": ("clipping", "The bound is applied after the gradients are averaged"),
    "bound on each micro-batch": ("clipping", "The bound is applied to the mean of each micro-batch"),
    "real batch size as divisor": ("denominator", "divided by the real number of examples"),
    "clipping by parameter counted as flat": (
        "clipping",
        "Each of 40 parameters is clipped to the whole bound by itself",
    ),
    "no clipping": ("clipping", "The gradients of the examples are not clipped"),
    "float16 noise": ("distribution", "Small draws may have been rounded to zero, as in float16"),
    "noise on each example, averaged": ("noise", "0.354 times as large as declared: each example adds 1/8"),
}
"""Name of a mistake -> what the check is about, and words of its sentence."""


def contradicted(found: Sequence[ConformanceCheck]) -> dict[str, str]:
    """Return subject -> sentence of the contradicted checks."""
    return {one.about: one.sentence for one in found if one.outcome == "contradicted"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named(name: str) -> None:
    """Wrong: no finding, or one about something else."""
    mistake, options = MISTAKES[name]
    about, words = SAID[name]
    found = contradicted(checks(mistake, **options))
    assert words in found[about]
    assert set(found) <= {about, *_FOLLOWS.get(about, ())}


_FOLLOWS = {"clipping": ("sensitivity",), "distribution": ("noise",)}
"""What a mistake changes besides."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_training_is_not_accused(name: str) -> None:
    """Wrong: a finding, or a check that did not run."""
    found = checks(seed=5, **CORRECT[name])
    assert not contradicted(found)
    tested = {one.about for one in found if one.outcome == "not contradicted"}
    assert tested >= {"noise", "clipping", "distribution", "independence", "sensitivity"}


OTHERS = {
    "twice the bound": ("clipping", "times the one that the declared clipping gives"),
    "bound on shares of the mean": ("clipping", "to each example's share of the mean loss"),
    "only one example clipped": ("clipping", "no usual mistake explains it"),
    "noise in every second step": ("noise", "No noise is on 2 steps of 4"),
    "Laplace": ("distribution", "beyond 3 sigma, where a normal distribution has 0.270%."),
    "correlated steps": ("independence", "is not independent"),
    "one draw for a row": ("independence", "as if one draw were used for several entries"),
    "one row for a matrix": ("independence", "as if one draw were used for several entries"),
}
"""Mistakes of `private_training.OTHERS`: what the check is about, and words of its sentence."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_a_cause_is_named_only_where_it_explains_the_updates(name: str) -> None:
    """Wrong: a bound on the mean named for every clipping, float16 for Laplace."""
    about, words = OTHERS[name]
    found = contradicted(checks(private_training.OTHERS[name]))
    assert words in found[about]
    assert set(found) <= {about, *_FOLLOWS.get(about, ())}


# ------------------------------------------------------------------------------------------------ steps made by hand
def test_noise_of_ranks_with_one_seed_is_named() -> None:
    """Two ranks that draw the same share give sqrt(2) of the noise. Wrong: no cause."""
    found = contradicted(judge(noisy_steps(3, processes=2, factor=2**0.5)))
    assert (
        " times as large as declared: each process adds all of the noise, or 2 processes draw the same numbers"
        in found["noise"]
    )


def test_noise_shares_before_aggregation_are_named() -> None:
    """Wrong: half of the variance without a cause."""
    found = contradicted(judge(noisy_steps(3, processes=2, factor=2**-0.5)))
    assert " times as large as declared: each process adds 1/2 of the noise" in found["noise"]


def test_equal_noise_of_two_steps_is_named_once() -> None:
    """Wrong: the level is contradicted as well, by counting one sample three times."""
    found = contradicted(judge(noisy_steps(3, same=True)))
    assert set(found) == {"independence"} and "st-00000" in found["independence"]


def test_a_step_without_declared_noise_is_not_measured() -> None:
    """Wrong: a finding about noise that nobody declared."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), TEXTS)
    assert measure("st-000000", step, step.update()) is None


def test_noise_that_is_changed_afterwards_is_not_judged() -> None:
    """Wrong: pruned noise called not Gaussian."""
    client = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), TEXTS, [0, 1, 1, 0])
    defenses = (
        DeclaredDefense(name="gaussian-noise", parameters={"scale": 1.0}),
        DeclaredDefense(name="prune", parameters={"share": 0.5}),
    )
    step = ClientStep(client.model, client.truth, client.recipe, client.facts.model_copy(update={"defenses": defenses}))
    with pytest.raises(SnapshotError, match="changes the noise after"):
        measure("st-000000", step, step.update())


# ------------------------------------------------------------------------------------------- sampling and composition
def sized(sizes: Sequence[int], expected: float) -> list[StepMeasured]:
    """Return steps with given numbers of examples."""
    step = noisy_steps(1)[0].step
    return [step.model_copy(update={"examples": size, "expected_examples": expected}) for size in sizes]


def stated(**more: Any) -> Privacy:
    """Return a statement of an accountant."""
    known: dict[str, Any] = {
        "epsilon": 3.0, "delta": 1e-5, "noise_multiplier": 1.0, "sampling_rate": 0.01, "steps": 100, "origin": "accountant"
    }  # fmt: skip
    return Privacy(**(known | more))


def test_batches_of_one_size_are_no_poisson_samples() -> None:
    """Wrong: five batches of exactly 64 taken for Poisson samples."""
    found = sampling(sized([64] * 5, 64), [stated()], DEFAULT_LEVEL / TEST_FAMILIES)
    assert found.outcome == "contradicted" and "Shuffled batches have one size" in found.sentence
    few = sampling(sized([64], 64), [stated()], DEFAULT_LEVEL / TEST_FAMILIES)
    assert few.outcome == "not contradicted"


def test_sizes_of_poisson_samples_are_not_contradicted() -> None:
    """Wrong: an accusation of real Poisson samples."""
    drawn = torch.distributions.Binomial(6_400, torch.tensor(0.01)).sample((200, 5)).int().tolist()
    wrong = [
        sampling(sized(sizes, 64), [stated()], DEFAULT_LEVEL / TEST_FAMILIES).outcome == "contradicted"
        for sizes in drawn
    ]
    assert sum(wrong) <= 2


def test_a_run_that_says_that_it_shuffles_is_contradicted() -> None:
    """Wrong: only a note beside an epsilon of Poisson samples."""
    assert sampling(sized([64], 64), [stated(sampling="shuffled")], 0.002).outcome == "contradicted"


def test_an_epsilon_of_fewer_steps_than_were_taken_is_contradicted() -> None:
    """Wrong: epsilon of 100 steps for a run of 200."""
    (found,) = composition([stated()], 200, 1.0)
    assert found.outcome == "contradicted" and "for 100 steps, and the run took 200" in found.sentence


def test_an_epsilon_that_no_accountant_gives_is_contradicted() -> None:
    """Wrong: 0.5 for 1,000 steps at noise 1 and rate 0.01, where PLD and PRV give 1.8."""
    (found,) = composition([stated(epsilon=0.5, steps=1_000)], 1_000, 1.0)
    assert found.outcome == "contradicted" and "cannot have less than 1." in found.sentence
    (tight,) = composition([stated(epsilon=1.84, steps=1_000)], 1_000, 1.0)
    assert tight.outcome == "not contradicted"


def test_an_accountant_with_more_noise_than_the_run_is_contradicted() -> None:
    """Wrong: an accountant of multiplier 2 beside updates of 1."""
    (found,) = composition([stated(noise_multiplier=2.0)], 100, 1.0)
    assert found.outcome == "contradicted" and "the run declares 1" in found.sentence


@pytest.mark.parametrize(("epsilon", "outcome"), [(5.0, "not contradicted"), (20.0, "contradicted")])
def test_the_classical_formula_of_a_message_is_compared_with_its_noise(epsilon: float, outcome: str) -> None:
    """Wrong: epsilon 20 for noise that cannot have less than 25.

    Flower's `LocalDpMod` uses the formula for every epsilon; it is proven below 1 only.
    """
    multiplier = (2 * math.log(1.25 / 1e-5)) ** 0.5 / epsilon
    (found,) = composition([stated(epsilon=epsilon, covers="message", steps=None)], 100, None, multiplier)
    assert found.outcome == outcome and "one message" in found.sentence


def test_without_an_epsilon_nothing_is_composed() -> None:
    """Wrong: a pass where nobody claims anything."""
    (found,) = composition([], 100, 1.0)
    assert found.outcome == "not tested"


# ------------------------------------------------------------------------------------------------------ two processes
def test_two_processes_with_opacus_are_not_accused() -> None:
    """Wrong: a mean over processes taken for the sum of one."""
    found = checks_of_two("correct")
    assert not contradicted(found)
    assert any(one.about == "noise" and one.outcome == "not contradicted" for one in found)


def test_two_processes_that_draw_from_one_seed_are_named() -> None:
    """Wrong: noise of sqrt(2) without the cause."""
    found = contradicted(checks_of_two("same seed"))
    assert "2 processes draw the same numbers" in found["noise"]


def test_two_processes_that_each_add_half_of_the_noise_are_named() -> None:
    """Two halves give 1 / sqrt(2) of the noise. Wrong: no cause."""
    assert "each process adds 1/2 of the noise" in contradicted(checks_of_two("half"))["noise"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "about", "words"),
    [
        ("shuffled batches under a Poisson accountant", "sampling", "Shuffled batches have one size"),
        ("epsilon for fewer steps than were taken", "composition", "for 2 steps, and the run took 4"),
    ],
)
def test_a_mistake_in_what_is_stated_is_named(name: str, about: str, words: str) -> None:
    """By the audit of the run. Wrong: only an epsilon that is repeated."""
    found = contradicted(checks_of_run(**OF_RUNS[name]))
    assert set(found) == {about} and words in found[about]
