"""`ilrg` and `rlu` solve linear systems for the class counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.algorithms.labels.local_steps import moved
from leakaudit.attacks.ilrg import Ilrg
from leakaudit.attacks.llg import Llg
from leakaudit.attacks.llg_star import LlgStar
from leakaudit.attacks.rlu import Rlu
from leakaudit.client.array_batches import array_batch, array_facts
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.models.array_classifier import ArrayClassifier, save_auxiliary
from leakaudit.plugins.budget import Budget
from tests.support import tiny

CLASSES = 6


def _table(hidden: int = 32, scale: float = 1.0) -> ArrayClassifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = nn.Linear(hidden, CLASSES)
        net = nn.Sequential(nn.Linear(8, hidden), nn.Sigmoid(), head)
        with torch.no_grad():
            head.weight.mul_(scale)
    return ArrayClassifier(net, CLASSES).eval()


def _step(model: ArrayClassifier, batches: list[list[int]], **facts: Any) -> ClientStep:
    rng = torch.Generator().manual_seed(2)
    centres = torch.randn(CLASSES, 8, generator=rng)
    made = []
    for labels in batches:
        index = torch.tensor(labels)
        made.append(array_batch(centres[index] + 0.3 * torch.randn(len(labels), 8, generator=rng), index))
    public = array_facts(model, (8,), training=False, batch_size_bound=len(batches[0]), **facts)
    return ClientStep(model, Truth(tuple(made)), StepRecipe(training=False), public)


def _counts(attack: Any, seen: Observation) -> tuple[int, ...]:
    counts: tuple[int, ...] = attack(seen, torch.Generator().manual_seed(0), Budget(600)).label_counts
    return counts


@pytest.mark.parametrize("dummy", [True, False])
@pytest.mark.parametrize("size", [1, 12, 96])
def test_an_untrained_classifier_gives_every_count_away(dummy: bool, size: int) -> None:
    """The system is exact there, with and without dummy inputs."""
    labels = torch.randint(CLASSES, (size,), generator=torch.Generator().manual_seed(size)).tolist()
    seen = _step(_table(scale=0.2), [labels]).observe()
    assert _counts(Ilrg(dummy=dummy), seen) == tuple(labels.count(c) for c in range(CLASSES))


def test_a_class_as_frequent_as_it_is_predicted_does_no_harm() -> None:
    """Its entry of the bias's update is nearly 0: the paper's quotient is 0 / 0."""
    labels = [c for c in range(CLASSES) for _ in range(4)]
    assert _counts(Ilrg(), _step(_table(), [labels]).observe()) == (4,) * CLASSES


def test_a_head_without_bias_is_not_for_it() -> None:
    """The reason says who reads it instead."""
    seen = tiny.client_step(tiny.gpt2_classifier(3), tiny.gpt2_tokenizer(), ["a dog"]).observe()
    verdict = Ilrg().applies(seen)
    assert not verdict and "llg-star reads heads without one" in verdict.reason


def test_local_steps_are_counted_together() -> None:
    """Five steps of four examples: the shares are those of all twenty."""
    batches = [[0, 0, 1, 2], [0, 3, 3, 1], [0, 0, 0, 0], [5, 5, 1, 0], [0, 1, 2, 3]]
    flat = [label for batch in batches for label in batch]
    seen = _step(_table(), batches, view="delta", local_steps=5, learning_rate=0.02).observe()
    assert _counts(Rlu(), seen) == tuple(flat.count(c) for c in range(CLASSES))


def test_following_the_model_beats_standing_still(tmp_path: Any) -> None:
    """At a large learning rate the predictions before the steps mislead.

    Auxiliary data give predictions by class, too.
    """
    rng = torch.Generator().manual_seed(5)
    centres = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(CLASSES).repeat(10)
    path = tmp_path / "aux.safetensors"
    save_auxiliary(path, {"inputs": centres[labels] + 0.3 * torch.randn(60, 8, generator=rng)}, labels)
    error = {"llg-star": 0, "rlu": 0, "rlu+": 0}
    for trial in range(6):
        order = torch.randint(3, (40,), generator=torch.Generator().manual_seed(trial)).tolist()
        batches = [order[i : i + 8] for i in range(0, 40, 8)]
        seen = _step(_table(), batches, view="delta", local_steps=5, learning_rate=0.1).observe()
        true = torch.bincount(torch.tensor(order), minlength=CLASSES)
        for name, attack in {"llg-star": LlgStar(), "rlu": Rlu(), "rlu+": Rlu(auxiliary=path)}.items():
            error[name] += int((torch.tensor(_counts(attack, seen)) - true).abs().sum())
    assert error["rlu"] < error["llg-star"] and error["rlu+"] < error["llg-star"]


def test_the_model_after_the_steps_is_the_one_the_client_ended_with() -> None:
    """Adding the update gives the client's weights; afterwards the old are back."""
    model = _table()
    step = _step(model, [[0, 1], [2, 3]], view="delta", local_steps=2, learning_rate=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = step.observe()
    with moved(seen.model, seen.update, 0.2):
        for name, parameter in seen.model.named_parameters():
            assert torch.allclose(parameter, before[name] - 0.2 * seen.update[name])
            assert not torch.equal(parameter, before[name])
    assert all(torch.equal(p, before[name]) for name, p in seen.model.named_parameters())


def test_what_the_threat_model_grants_is_said(tmp_path: Any) -> None:
    """The battery prints it with the score."""
    assert Rlu(auxiliary=tmp_path / "a", data_count=3).grants == ("auxiliary", "data_count")
    assert Rlu().grants == Ilrg().grants == ()
    assert Ilrg(data_count=2).grants == ("data_count",)


@pytest.mark.parametrize("attack", [LlgStar(), Ilrg()])
def test_noise_is_met_with_every_entry_of_the_rows(attack: Any) -> None:
    """Where noise hides the bias, its row of 32 entries separates classes better."""
    from leakaudit.client.facts import DeclaredDefense

    labels = [0] * 24 + [1] * 12 + [2] * 12
    seen = _step(_table(hidden=256), [labels]).observe()
    errors = {"known": 0, "unknown": 0}
    for seed in range(10):
        rng = torch.Generator().manual_seed(seed)
        noisy = {name: g + 0.1 * torch.randn(g.shape, generator=rng) for name, g in seen.update.items()}
        declared = seen.under(DeclaredDefense(name="gaussian-noise", parameters={"sigma": 0.1}), noisy)
        silent = Observation(noisy, seen.model, seen.facts)
        for name, what in (("known", declared), ("unknown", silent)):
            guess = torch.tensor(_counts(attack, what))
            errors[name] += int((guess - torch.bincount(torch.tensor(labels), minlength=CLASSES)).abs().sum())
    assert errors["known"] < 0.7 * errors["unknown"]


def test_a_pruned_bias_is_filled_in() -> None:
    """Entries of the bias's update add up to 0, so the removed sum is known."""
    from leakaudit.algorithms.labels.output_layer import bias_gradient, find_output_layer
    from leakaudit.client.facts import DeclaredDefense

    seen = _step(_table(), [[0, 0, 0, 1]]).observe()
    name = find_output_layer(seen).bias or ""
    cut = {**seen.update, name: seen.update[name] * (seen.update[name].abs() > seen.update[name].abs().min())}
    pruned = seen.under(DeclaredDefense(name="prune", parameters={"share": 0.1}), cut)
    found = bias_gradient(pruned, find_output_layer(pruned))
    assert found is not None and torch.allclose(found, seen.update[name].double(), atol=1e-6)
    assert _counts(Llg(), pruned) == (3, 1, 0, 0, 0, 0)
