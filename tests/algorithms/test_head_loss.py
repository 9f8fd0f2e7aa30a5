"""Losses from which labels can be read, on array classifiers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.attacks.ilrg import Ilrg
from leakaudit.attacks.llg import Llg
from leakaudit.attacks.llg_star import LlgStar
from leakaudit.client.array_batches import array_batch, array_facts
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.models.array_classifier import ArrayClassifier
from leakaudit.plugins.budget import Budget

LABELS = [0, 0, 0, 1, 1, 3]


def observe(criterion: nn.Module | None, labels: list[int] = LABELS, **facts: Any) -> Observation:
    """Return what is seen of a step of a small table classifier with four classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = nn.Linear(16, 4)
        net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), head)
        inputs = torch.randn(len(labels), 5)
        with torch.no_grad():
            head.weight.mul_(0.1)  # a fresh head: nearly the same prediction for every input
            head.bias.mul_(0.1)
    model = ArrayClassifier(net, 4, criterion).eval()
    facts = {"batch_size_bound": len(labels)} | facts
    step = ClientStep(
        model,
        Truth((array_batch(inputs, torch.tensor(labels)),)),
        StepRecipe(training=False),
        array_facts(model, (5,), training=False, **facts),
    )
    return step.observe()


@pytest.mark.parametrize("attack", [Llg(), LlgStar(), Ilrg(), Ilrg(dummy=False)])
@pytest.mark.parametrize(
    "criterion",
    [
        None,
        nn.CrossEntropyLoss(label_smoothing=0.3),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.5, 2.0])),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
)
def test_counts_come_back_through_smoothed_weighted_and_summed_losses(attack: Any, criterion: nn.Module | None) -> None:
    """Each loss changes the gradient in a public way, so counts are the same."""
    guess = attack(observe(criterion), torch.Generator().manual_seed(0), Budget(600))
    assert guess.label_counts == (3, 2, 0, 1)


class Focal(nn.Module):
    """(1 - p_y)^2 times cross-entropy."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over the batch."""
        loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        return ((1 - (-loss).exp()) ** 2 * loss).mean()


@pytest.mark.parametrize(
    ("criterion", "reason"),
    [
        (Focal(), "the loss is Focal and not cross-entropy"),
        (nn.BCEWithLogitsLoss(), "multi-label training"),
        (nn.MSELoss(), "this is a regression"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0, 1.0, 1.0])), "weight 0"),
        (nn.CrossEntropyLoss(weight=torch.ones(4), label_smoothing=0.1), "weigh the smoothed part"),
        (nn.CrossEntropyLoss(label_smoothing=1.0), "smoothed away"),
    ],
)
def test_other_losses_are_refused_with_the_reason(criterion: nn.Module, reason: str) -> None:
    """A wrong count would look like a leak, or like none."""
    seen = observe(None)
    model: Any = seen.model
    model.criterion = criterion
    for attack in (Llg(), LlgStar(), Ilrg()):
        verdict = attack.applies(seen)
        assert not verdict and reason in verdict.reason


def test_a_sum_over_an_unknown_number_asks_for_the_count() -> None:
    """Its gradient is B times as large, and B is what is missing."""
    seen = observe(nn.CrossEntropyLoss(reduction="sum"), batch_size_bound=None)
    with pytest.raises(Exception, match="sum over a batch of unknown size; grant `data_count`"):
        Llg()(seen, torch.Generator(), Budget(600))
    assert Llg(data_count=6)(seen, torch.Generator(), Budget(600)).label_counts == (3, 2, 0, 1)
