"""A term on the weights alone is recognised in an update, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.callbacks.weight_term import start_of, weight_term
from tests import tiny
from tests.callbacks import stacks

RATE = 0.1
Penalty = Callable[[nn.Module, dict[str, Tensor]], Any]


def proximal(model: nn.Module, start: dict[str, Tensor]) -> Any:
    """Return FedProx's term with mu = 0.3."""
    return 0.15 * sum((p - start[name]).square().sum() for name, p in model.named_parameters())


def decay(model: nn.Module, start: dict[str, Tensor]) -> Any:
    """Return an L2 penalty with lambda = 0.02."""
    return 0.01 * sum(p.square().sum() for p in model.parameters())


def pulled_along(model: nn.Module, start: dict[str, Tensor]) -> Any:
    """Return a term with mu = -0.3."""
    return -proximal(model, start)


def lasso(model: nn.Module, start: dict[str, Tensor]) -> Any:
    """Return an L1 penalty, which is no combination of weights."""
    return 0.01 * sum(p.abs().sum() for p in model.parameters())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the gradients."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


class Third:
    """The third step of plain SGD with some terms beside the batch's loss."""

    def __init__(self, *terms: Penalty, empties: bool = True) -> None:
        self.model = tiny.bert().train()
        self.start = start_of(self.model)
        whole = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for number, batch in enumerate(stacks.classes(count=3)):
            if empties:
                self.model.zero_grad()
            loss = self.model(**batch).loss
            (loss + sum(term(self.model, whole) for term in terms)).backward()
            if number < 2:
                with torch.no_grad():
                    for p in self.model.parameters():
                        if p.grad is not None:
                            p.sub_(p.grad, alpha=RATE)
        self.observed, self.batches = gradients(self.model), stacks.classes(count=3)

    def found(self, batch: int = 2) -> Any:
        """Return the term that is found if the update is said to come from one of the batches."""
        self.model.zero_grad()
        self.model(**self.batches[batch]).loss.backward()
        return weight_term(self.observed, gradients(self.model), dict(self.model.named_parameters()), self.start)


@pytest.mark.parametrize(
    ("terms", "mu", "rate"), [((proximal,), 0.3, 0.0), ((decay,), 0.0, 0.02), ((proximal, decay), 0.3, 0.02)]
)
def test_a_term_on_the_weights_is_recognised(terms: tuple[Penalty, ...], mu: float, rate: float) -> None:
    """With its factors, and only beside the right batch."""
    step = Third(*terms)
    found = step.found()
    assert found.proximal == pytest.approx(mu, rel=1e-3) and found.decay == pytest.approx(rate, rel=1e-3)
    assert ("FedProx" in found.note) is bool(mu) and ("L2 penalty" in found.note) is bool(rate)
    assert step.found(batch=1) is None


@pytest.mark.parametrize("terms", [(), (lasso,), (pulled_along,)])
def test_nothing_else_is_taken_for_one(terms: tuple[Penalty, ...]) -> None:
    """No term, a penalty of another form, and a pull away from the start, as gradients that were not emptied leave one."""
    assert Third(*terms).found() is None
    assert Third(*terms, empties=False).found() is None
