"""Noise on chosen layers: what carries it, and what attacks know of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.audit.verification import verify
from leakaudit.capture.training_defense import Trained, TrainingDefense
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import PluginSpec
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.models.structure import parameters_of_layers
from leakaudit.plugins.testing import check_defense
from leakaudit.plugins.testing.attacks import ticking
from leakaudit.registry import attacks, defenses
from leakaudit.results.schema import VerificationStatus
from tests.support import tiny
from tests.support.any_defense import STEPS

NAMES = ["gaussian-noise", "laplace-noise"]
LAYERS = ["embeddings", "first-1", "last-1", "head"]


def _defended(step: ClientStep, name: str = "gaussian-noise", **knobs: Any) -> Observation:
    seen: Observation = defenses.create(name, knobs)(step, step.observe(), torch.Generator().manual_seed(3))
    return seen


def _declaring(step: ClientStep, seen: Observation) -> ClientStep:
    return ClientStep(
        step.model, step.truth, step.recipe, step.facts.model_copy(update={"defenses": seen.facts.defenses})
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", LAYERS)
def test_what_is_not_chosen_is_sent_bit_for_bit(name: str, layers: str) -> None:
    """The level is 0 there, and the declared one on the chosen parameters."""
    step, _ = STEPS["classification"]
    clean, seen = step.observe(), _defended(step, name, scale=0.5, layers=layers)
    chosen = parameters_of_layers(step.model, layers)
    assert chosen and chosen < set(clean.update)
    for parameter, sent in seen.update.items():
        assert torch.equal(sent, clean.update[parameter]) == (parameter not in chosen), parameter
        assert (seen.noise_level.of(parameter) > 0) == (parameter in chosen), parameter
    (declared,) = seen.facts.defenses
    assert seen.noise_level.largest == declared.parameters["sigma"] == seen.noise_sigma


def test_layers_split_a_model_into_what_is_before_in_and_behind_blocks() -> None:
    """A model of two blocks; a tied head counts as embedding."""
    model = STEPS["classification"][0].model
    every = {name for name, _ in model.named_parameters()}
    embeddings, first, last, head = (parameters_of_layers(model, layers) for layers in LAYERS)
    assert embeddings < first and head < last
    assert first | last == every and not first & last
    assert all("layer." not in name for name in head) and any("layer.1" in name for name in last)
    blocks = parameters_of_layers(model, "last-9")
    assert not blocks & embeddings and blocks == parameters_of_layers(model, "last-2")
    tied = STEPS["causal-lm"][0].model
    assert not parameters_of_layers(tied, "head") & parameters_of_layers(tied, "embeddings")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", LAYERS)
def test_the_defence_keeps_what_it_promises(name: str, layers: str) -> None:
    """As every registered defence does."""
    check_defense(defenses.create(name, {"layers": layers}))


@pytest.mark.parametrize("layers", ["first-0", "blocks", "last", "head-1"])
def test_other_layers_are_refused(layers: str) -> None:
    """The message says what may be written."""
    with pytest.raises(ValueError, match=r"embeddings, first-N, last-N or head"):
        GaussianNoise(layers=layers)


def test_noise_on_all_layers_is_declared_as_before() -> None:
    """Stored results and policies name it without the knob."""
    assert "layers" not in defenses.create("gaussian-noise", {"scale": 1.0}).declared().parameters


@pytest.mark.parametrize("task", STEPS)
@pytest.mark.parametrize("layers", ["embeddings", "last-1"])
def test_a_step_with_it_is_verified_and_another_batch_is_a_mismatch(task: str, layers: str) -> None:
    """However large the noise is, the clean parameters belong to one batch only."""
    step, other = STEPS[task]
    seen = _defended(step, scale=8.0, layers=layers)
    assert verify(_declaring(step, seen), seen.update).status is VerificationStatus.NOISED
    assert verify(_declaring(other, seen), seen.update).status is VerificationStatus.MISMATCH


def test_noise_where_none_was_declared_is_a_mismatch() -> None:
    """Declared on the head, added to all layers."""
    step, _ = STEPS["classification"]
    narrow = _defended(step, sigma=0.1, layers="head")
    wide = _defended(step, sigma=0.1)
    assert verify(_declaring(step, narrow), wide.update).status is VerificationStatus.MISMATCH


@pytest.mark.parametrize(
    ("attack", "task", "layers"),
    [
        ("embedding-rows", "classification", "last-2"),
        ("embedding-rows", "classification", "head"),
        ("span", "classification", "head"),
        ("span", "classification", "last-1"),
        ("idlg", "classification", "first-1"),
        ("llg-star", "classification", "embeddings"),
        ("ilrg", "classification", "first-1"),
    ],
)
def test_an_attack_on_clean_parameters_recovers_what_it_does_without_noise(attack: str, task: str, layers: str) -> None:
    """It asks for the noise on what it reads."""
    texts, labels = ["the old dog chased a cat ."], [1]
    step = tiny.client_step(tiny.bert(num_labels=3), tiny.bert_tokenizer(), texts, labels)

    def guess(seen: Observation) -> tuple[Any, ...]:
        found = attacks.create(attack)(seen, torch.Generator().manual_seed(0), ticking(400))
        if attacks.create(attack).goal == "labels":
            return found.label_counts, found.counts_told
        return found.tokens, [sequence.token_ids for sequence in found.sequences or ()]

    clean = guess(step.observe())
    assert any(clean)
    assert guess(_defended(step, scale=4.0, layers=layers)) == clean


def test_training_changes_the_same_parameters_as_the_battery() -> None:
    """With the same random numbers the gradients are equal, bit for bit."""
    step, _ = STEPS["classification"]
    seen = _defended(step, scale=0.5, layers="last-1")
    model: nn.Module = step.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clean = step.observe().update
    spec = PluginSpec(name="gaussian-noise", options={"scale": 0.5, "layers": "last-1"})
    begun = TrainingDefense.begin(spec, Trained(model, optimizer), model, seed=3)
    assert begun is not None
    for name, parameter in model.named_parameters():
        parameter.grad = clean[name].clone()
    optimizer.step()
    begun.end()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, seen.update[name]), name
    optimizer.zero_grad(set_to_none=True)
