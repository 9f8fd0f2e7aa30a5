"""`gradient-mixture` on trained models, and lower bounds of counts by the bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.algorithms.labels.counts import fewest_of_each, whole_counts
from leakaudit.algorithms.labels.head_loss import HeadLoss, head_loss
from leakaudit.algorithms.labels.llg import extract_labels
from leakaudit.algorithms.labels.output_layer import find_output_layer
from leakaudit.attacks.gradient_mixture import GradientMixture, mixture
from leakaudit.attacks.ilrg import Ilrg
from leakaudit.attacks.llg import Llg
from leakaudit.attacks.llg_plus import LlgPlus
from leakaudit.attacks.llg_star import LlgStar
from leakaudit.attacks.rlu import Rlu
from leakaudit.client.array_batches import array_batch, array_facts
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.models.array_classifier import ArrayClassifier, save_auxiliary
from leakaudit.plugins.budget import Budget

CLASSES = 4


def rows(count: int, seed: int, only: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Return points around four centres that overlap, and their classes."""
    centres = 1.2 * torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(9))
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=rng) if only is None else torch.tensor(only)
    return centres[labels] + torch.randn(len(labels), 6, generator=rng), labels


def trained(steps: int = 150, bias: bool = True) -> ArrayClassifier:
    """Return a classifier that is sure of most points and wrong about some."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, CLASSES, bias=bias))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(steps):
        inputs, labels = rows(32, 1000 + step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    optimizer.zero_grad()
    return ArrayClassifier(net, CLASSES).eval()


def observe(model: ArrayClassifier, batches: list[tuple[Tensor, Tensor]], **facts: Any) -> Observation:
    """Return what is seen of a client with these batches."""
    public = array_facts(model, (6,), training=False, **{"batch_size_bound": len(batches[0][1])} | facts)
    truth = Truth(tuple(array_batch(*batch) for batch in batches))
    return ClientStep(model, truth, StepRecipe(training=False), public).observe()


def guess(attack: Any, seen: Observation) -> Tensor:
    """Return its counts."""
    return torch.tensor(attack(seen, torch.Generator().manual_seed(0), Budget(600)).label_counts)


@pytest.fixture
def auxiliary(tmp_path: Path) -> Path:
    """Give 160 labelled points like the client's."""
    inputs, labels = rows(160, 1)
    save_auxiliary(tmp_path / "aux", {"inputs": inputs}, labels)
    return tmp_path / "aux"


@pytest.mark.parametrize("whole", [True, False])
def test_weights_of_a_mixture_come_back(whole: bool) -> None:
    """A sum of two of ten known matrices has these two weights, less the ridge."""
    rng = torch.Generator().manual_seed(0)
    pulled, features = (torch.randn(10, n, generator=rng, dtype=torch.float64) for n in (4, 7))
    update = 0.75 * torch.outer(pulled[2], features[2]) + 0.25 * torch.outer(pulled[7], features[7])
    weights = mixture([(pulled, features)], update, whole=whole)
    assert weights[2] == pytest.approx(0.75, rel=0.05) and weights[7] == pytest.approx(0.25, rel=0.1)
    assert float(weights.sum() - weights[2] - weights[7]) < 0.02


def test_known_examples_tell_more_of_a_trained_model_than_mean_predictions(auxiliary: Path) -> None:
    """Twenty batches of eight, half of one class, on a model that is mostly right."""
    model = trained()
    error = {"mixture": 0, "llg-plus": 0, "ilrg": 0}
    for seed in range(20):
        one, two = seed % CLASSES, (seed + 1) % CLASSES
        inputs, labels = rows(0, 100 + seed, only=[one, one, one, one, two, two, seed // 5, seed // 7])
        seen, true = observe(model, [(inputs, labels)]), torch.bincount(labels, minlength=CLASSES)
        attacks = {
            "mixture": GradientMixture(auxiliary=auxiliary),
            "llg-plus": LlgPlus(auxiliary=auxiliary),
            "ilrg": Ilrg(),
        }
        for name, attack in attacks.items():
            error[name] += int((guess(attack, seen) - true).abs().sum())
    assert error["mixture"] < min(error["llg-plus"], error["ilrg"])


@pytest.mark.parametrize("bias", [True, False])
def test_a_fresh_model_is_read_as_well(auxiliary: Path, bias: bool) -> None:
    """With a bias and without."""
    inputs, labels = rows(0, 3, only=[0, 0, 0, 2, 2, 3])
    seen = observe(trained(steps=0, bias=bias), [(inputs, labels)])
    assert guess(GradientMixture(auxiliary=auxiliary), seen).tolist() == [3, 0, 2, 1]


def test_local_steps_and_clipping_do_not_stop_it(auxiliary: Path) -> None:
    """Examples count before and after local steps; clipping leaves proportions."""
    attack, model = GradientMixture(auxiliary=auxiliary), trained(steps=0)
    batches = [rows(0, seed, only=[0, 0, 1, 0]) for seed in (1, 2, 3)]
    seen = observe(model, batches, view="delta", local_steps=3, learning_rate=0.01)
    assert guess(attack, seen).tolist() == [9, 3, 0, 0]
    whole = observe(model, batches[:1])
    clipped = {name: 0.01 * gradient for name, gradient in whole.update.items()}
    norm = float(torch.stack([gradient.norm() for gradient in clipped.values()]).norm())
    facts = whole.facts.model_copy(update={"max_grad_norm": norm})
    assert guess(attack, Observation(clipped, whole.model, facts)).tolist() == [3, 1, 0, 0]


def test_it_needs_labelled_data_and_says_that_it_had_them(auxiliary: Path) -> None:
    """As every attack that is granted something."""
    seen = observe(trained(steps=0), [rows(4, 0)])
    assert not GradientMixture().applies(seen)
    assert GradientMixture(auxiliary=auxiliary).applies(seen)
    assert GradientMixture(auxiliary=auxiliary, data_count=4).grants == ("auxiliary", "data_count")


def test_the_bias_proves_how_many_there_are_at_least(auxiliary: Path) -> None:
    """-B d_c is never above n_c, and no attack goes below it.

    On fresh and trained models and over local steps.
    """
    for steps in (0, 30, 150):
        model, proved = trained(steps), 0
        for seed in range(10):
            batches = [rows(8, 50 + seed), rows(8, 80 + seed)]
            one = observe(model, batches[:1])
            several = observe(model, batches, view="delta", local_steps=2, learning_rate=1e-3)
            for seen, labels in ((one, batches[0][1]), (several, torch.cat([b[1] for b in batches]))):
                layer = find_output_layer(seen)
                fewest = fewest_of_each(seen, layer, head_loss(seen), len(labels))
                proved += int(fewest.sum())
                assert bool((fewest <= torch.bincount(labels, minlength=CLASSES)).all())
                for attack in (
                    Llg(),
                    LlgStar(),
                    LlgPlus(auxiliary=auxiliary),
                    Ilrg(),
                    Rlu(),
                    GradientMixture(auxiliary=auxiliary),
                ):
                    assert bool((guess(attack, seen) >= fewest).all()), type(attack).__name__
        assert proved >= 20


def test_nothing_is_proved_where_the_bias_is_not_known_to_rounding() -> None:
    """Noise, half precision, a frozen bias, class weights, scale or number unknown."""
    seen = observe(trained(), [rows(0, 0, only=[3] * 8)])
    layer, plain = find_output_layer(seen), HeadLoss()
    assert int(fewest_of_each(seen, layer, plain, 8).sum()) > 0
    none = torch.zeros(CLASSES, dtype=torch.long)
    noisy = seen.under(DeclaredDefense(name="gaussian-noise", parameters={"sigma": 0.1}), seen.update)
    half = Observation(seen.update, seen.model, seen.facts.model_copy(update={"dtype": "bfloat16"}))
    scaled = Observation({n: 10_000 * g for n, g in seen.update.items()}, seen.model, seen.facts)
    for what in (noisy, half, scaled):
        assert torch.equal(fewest_of_each(what, layer, plain, 8), none)
    assert torch.equal(fewest_of_each(seen, layer, plain, None), none)
    assert torch.equal(fewest_of_each(seen, layer, HeadLoss(weights=torch.ones(CLASSES)), 8), none)
    frozen = {n: g for n, g in seen.update.items() if n != layer.bias}
    without = Observation(frozen, seen.model, seen.facts)
    assert torch.equal(fewest_of_each(without, find_output_layer(without), plain, 8), none)


def test_what_is_proved_is_kept_when_counts_are_made_whole() -> None:
    """The rest goes to the nearest counts; without a rest nothing changes."""
    shares = torch.tensor([0.9, 0.1, 0.0, 0.0])
    assert whole_counts(shares, 4, torch.tensor([0, 0, 1, 0])) == (3, 0, 1, 0)
    assert whole_counts(shares, 2, torch.tensor([0, 0, 1, 1])) == (0, 0, 1, 1)
    even = torch.full((4,), 0.25)
    assert extract_labels(torch.tensor([-0.1, -0.6, 0.3, 0.4]), 4, -0.25, even, torch.tensor([0, 3, 0, 0])) == (
        1,
        3,
        0,
        0,
    )
