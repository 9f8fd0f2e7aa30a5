"""`update-difference` finds texts that an update made more likely."""

from __future__ import annotations

import itertools

import pytest
import torch

from leakaudit.attacks.update_difference import UpdateDifference
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import Observation
from leakaudit.plugins.attack_protocol import Reconstruction
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.testing import check_attack
from tests.support import tiny
from tests.support.optimizer_steps import difference_step

TEXT = "the old dog chased a small cat near two red trees ."


def _learned(name: str = "AdamW", rate: float = 1e-2) -> Observation:
    """Return four local steps on one text, repeated."""
    batches = [[TEXT]] * 4
    step = difference_step(
        name, batches, model=tiny.gpt2_lm(), tokenizer=tiny.gpt2_tokenizer(), task="causal-lm", rate=rate
    )
    return step.observe()


def _run(seen: Observation, seconds: float = 600.0, **knobs: object) -> Reconstruction:
    attack = UpdateDifference(**knobs)  # type: ignore[arg-type]
    return attack(seen, torch.Generator().manual_seed(0), Budget(seconds))


def _true() -> list[int]:
    return list(tiny.gpt2_tokenizer()(TEXT)["input_ids"])


def _longest_run(guess: Reconstruction) -> int:
    """Return the most neighbouring tokens of the text that one guessed text has."""
    true = _true()
    runs = [tuple(true[a:b]) for a, b in itertools.combinations(range(len(true) + 1), 2)]
    return max(
        len(run)
        for run in runs
        for one in guess.sequences or ()
        if any(one.token_ids[at : at + len(run)] == run for at in range(len(one.token_ids)))
    )


def test_it_keeps_what_every_attack_promises() -> None:
    """The same seed, the same guess; nothing is changed."""
    check_attack(UpdateDifference)


@pytest.mark.parametrize(("name", "rate"), [("AdamW", 1e-2), ("SGD", 0.5)])
def test_a_text_that_was_learned_in_four_steps_is_found(name: str, rate: float) -> None:
    """And without the update it is not."""
    seen = _learned(name, rate)
    assert _longest_run(_run(seen)) >= len(_true()) - 2
    assert _longest_run(_run(seen, evidence=False)) <= 4


def test_a_gradient_is_followed_for_some_steps() -> None:
    """One step against it, as many times as `amplification` says."""
    step = tiny.client_step(tiny.gpt2_lm(), tiny.gpt2_tokenizer(), [TEXT], task="causal-lm")
    seen = step.observe()
    assert _longest_run(_run(seen, amplification=8.0)) > _longest_run(_run(seen, evidence=False))


def test_as_many_texts_are_guessed_as_the_client_can_have_had() -> None:
    """The protocol's bound times the number of local steps."""
    seen = _learned()
    facts = seen.facts.model_copy(update={"batch_size_bound": 1})
    few = Observation(seen.update, seen.model, facts)
    assert len(_run(few).sequences or ()) == 4
    assert len(_run(seen, sentences=7).sequences or ()) == 7


def test_noise_alone_gives_no_guess() -> None:
    """The search in drawn noise finds as much."""
    seen = _learned()
    generator = torch.Generator().manual_seed(0)
    empty = 0
    for _ in range(10):
        noise = {name: 1e-3 * torch.randn(tensor.shape, generator=generator) for name, tensor in seen.update.items()}
        declared = DeclaredDefense(name="gaussian-noise", parameters={"sigma": 1e-3})
        empty += not _run(seen.under(declared, noise), length=8).sequences
    assert empty == 10


def test_a_learned_text_is_still_found_in_little_noise() -> None:
    """It is better than anything in noise alone."""
    seen = _learned()
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: tensor + 1e-3 * torch.randn(tensor.shape, generator=generator) for name, tensor in seen.update.items()
    }
    declared = DeclaredDefense(name="gaussian-noise", parameters={"sigma": 1e-3})
    guess = _run(seen.under(declared, noisy))
    assert guess.diagnostics["ratio"] > guess.diagnostics["ratio_of_noise"]
    assert _longest_run(guess) >= len(_true()) - 2


def test_the_budget_is_checked_between_tokens() -> None:
    """What was found so far is returned."""
    ticks = itertools.count()
    budget = Budget(5.0, clock=lambda: float(next(ticks)))
    guess = UpdateDifference()(_learned(), torch.Generator(), budget)
    assert guess.stop == "budget" and guess.sequences
    assert max(len(one.token_ids) for one in guess.sequences) <= 6


def test_other_models_are_refused() -> None:
    """A classifier predicts no next token."""
    verdict = UpdateDifference().applies(tiny.observe(["a dog"]))
    assert not verdict and "classification" in verdict.reason


def test_a_part_of_a_model_is_refused() -> None:
    """It cannot be run."""
    seen = _learned()
    verdict = UpdateDifference().applies(Observation(seen.update, seen.model, seen.facts, whole=False))
    assert not verdict and "first blocks" in verdict.reason


def test_an_update_of_zeros_is_refused() -> None:
    """There is no difference to read."""
    seen = _learned()
    nothing = Observation({name: torch.zeros_like(each) for name, each in seen.update.items()}, seen.model, seen.facts)
    verdict = UpdateDifference().applies(nothing)
    assert not verdict and "zero" in verdict.reason


@pytest.mark.parametrize("knob", [{"beam": 0}, {"sentences": 0}, {"length": 0}, {"amplification": 0.0}])
def test_knobs_that_search_nothing_are_refused(knob: dict[str, float]) -> None:
    """With what was given."""
    with pytest.raises(ValueError, match="0"):
        UpdateDifference(**knob)  # type: ignore[arg-type]
