"""Another order of additions gives the same numbers with another rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from leakaudit.client.other_order import other_order

RUNS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: nn.functional.linear(x[0, 0], x[1, 0], x[1, 0, 0]),
    "matrices": lambda x: x[0] @ x[1],
    "convolution": lambda x: nn.functional.conv1d(x[0], x[1, :, :, :3], x[1, 0, 0]),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[:1], x[1:], x[:1]),
}
"""Name -> operator of a tensor of (2, 64, 64, 64)."""


def _found(run: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of an operator and the gradient of half its squares."""
    inputs = inputs.clone().requires_grad_()
    output = run(inputs)
    output.square().sum().div(2).backward()
    assert inputs.grad is not None
    return output.detach(), inputs.grad


@pytest.mark.parametrize("name", RUNS)
def test_rounding_differs_and_nothing_else(name: str) -> None:
    """Output and gradient are within float32's rounding, and not equal."""
    inputs = torch.randn(2, 64, 64, 64, generator=torch.Generator().manual_seed(0))
    plain = _found(RUNS[name], inputs)
    with other_order():
        other = _found(RUNS[name], inputs)
    for one, two in zip(plain, other, strict=True):
        assert 1e-9 < float((one - two).norm() / one.norm()) < 1e-5


@pytest.mark.parametrize("groups", [1, 4])
def test_sums_of_whole_numbers_are_the_same_in_any_order(groups: int) -> None:
    """Transposed and grouped convolutions, too."""
    x = torch.randint(-3, 4, (2, 8, 16), generator=torch.Generator().manual_seed(0)).float()
    weight = torch.randint(-3, 4, (8, 8 // groups, 3), generator=torch.Generator().manual_seed(1)).float()
    for run in (nn.functional.conv1d, nn.functional.conv_transpose1d):
        plain = run(x, weight, groups=groups)
        with other_order():
            assert torch.equal(run(x, weight, groups=groups), plain)
