"""A gradient is computed from a difference of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from leakaudit.algorithms.gradient_estimate import as_gradient, gradient_estimate
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.step import ClientStep
from tests.support import tiny
from tests.support.optimizer_steps import difference_step

TEXTS = ["the dog saw a bird", "a cat"]


def _gradient(step: ClientStep) -> dict[str, torch.Tensor]:
    facts = step.facts.model_copy(update={"view": "local", "optimizer": None, "local_steps": 1, "learning_rate": None})
    return replace(step, facts=facts).update()


@pytest.mark.parametrize("name", ["momentum", "nesterov", "dampened", "maximized"])
def test_one_step_with_momentum_is_the_gradient_within_its_error(name: str) -> None:
    """The first step has no dampening; Nesterov's counts the gradient 1 + m times."""
    step = difference_step(name, [TEXTS])
    true, (seen, found) = _gradient(step), as_gradient(step.observe())
    assert found.quality == "exact"
    for each, gradient in true.items():
        off = (seen.update[each] - gradient).abs()
        assert bool((off <= 6 * seen.error[each] + 1e-6 * gradient.abs()).all()), each


@pytest.mark.parametrize("name", ["momentum", "nesterov", "dampened", "maximized"])
def test_several_steps_with_momentum_are_a_weighted_mean_of_their_gradients(name: str) -> None:
    """Equal batches and a small learning rate give equal gradients."""
    step = difference_step(name, [TEXTS] * 3, rate=1e-4)
    one = _gradient(difference_step(name, [TEXTS]))
    seen, found = as_gradient(step.observe())
    assert found.quality == "exact"
    for each, gradient in one.items():
        allowed = 0.05 * float(gradient.norm()) + 2 * float(seen.error[each].norm())
        assert float((seen.update[each] - gradient).norm()) < allowed, each


def test_weight_decay_of_plain_sgd_is_taken_out() -> None:
    """The rows of words that are not in the batch are zero up to rounding."""
    step = difference_step("nesterov", [TEXTS])
    group = step.facts.optimizer.groups[0].model_copy(update={"options": {"weight_decay": 0.1}})  # type: ignore[union-attr]
    plain = step.facts.optimizer.model_copy(update={"groups": (group,)})  # type: ignore[union-attr]
    seen, found = as_gradient(replace(step, facts=step.facts.model_copy(update={"optimizer": plain})).observe())
    table, unused = tiny.word_table(seen.model), tiny.VOCABULARY["river"]
    assert found.quality == "exact"
    assert bool((seen.update[table][unused].abs() <= 6 * seen.error[table][unused]).all())


@pytest.mark.parametrize("name", ["momentum", "AdamW", "Adafactor"])
def test_kept_moments_leave_a_direction_only(name: str) -> None:
    """The movement of earlier gradients is in the difference and cannot be told apart."""
    seen = difference_step(name, [TEXTS], kept=["one two three"]).observe()
    found = gradient_estimate(seen)
    assert found.quality == "direction" and "earlier rounds" in found.note
    assert as_gradient(seen)[0].only_a_direction


def test_a_defence_after_the_optimizer_leaves_a_direction_only() -> None:
    """Noise on a step of Adam is not noise on a gradient."""
    seen = difference_step("AdamW", [TEXTS]).observe()
    noisy = seen.under(DeclaredDefense(name="gaussian-noise", parameters={"sigma": 0.1}), seen.update)
    assert gradient_estimate(noisy).quality == "direction"


def test_a_direction_of_an_optimizer_that_maximizes_is_turned_round() -> None:
    """It points along the gradient, like all others."""
    true = _gradient(difference_step("AdamW", [TEXTS]))
    step = difference_step("AdamW", [TEXTS] * 2)
    group = step.facts.optimizer.groups[0]  # type: ignore[union-attr]
    group = group.model_copy(update={"options": {**group.options, "maximize": True}})
    optimizer = step.facts.optimizer.model_copy(update={"groups": (group,)})  # type: ignore[union-attr]
    seen, _ = as_gradient(replace(step, facts=step.facts.model_copy(update={"optimizer": optimizer})).observe())
    name = "bert.pooler.dense.weight"
    assert float((seen.update[name] * true[name]).sum()) > 0


def test_gradients_of_rank_one_with_equal_signs_give_one_step_of_adafactor() -> None:
    """So there is no inverse: all that is left of them are signs."""
    rows, columns = torch.tensor([0.3, -0.02, 0.5]), torch.tensor([1.0, -0.2, 0.07, 3.0])
    steps = []
    for gradient in (torch.outer(rows, columns), torch.outer(rows.sign(), columns.sign())):
        parameter = torch.nn.Parameter(torch.ones(3, 4))
        parameter.grad = gradient
        torch.optim.Adafactor([parameter], lr=0.1).step()
        steps.append(parameter.detach())
    assert torch.allclose(steps[0], steps[1], atol=1e-6)


def test_a_step_of_adafactor_is_a_direction() -> None:
    """The reason says what is missing."""
    found = gradient_estimate(difference_step("Adafactor", [TEXTS]).observe())
    assert found.quality == "direction" and "divides every row and column by its size" in found.note
