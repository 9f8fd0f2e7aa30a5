"""The gradient of each example of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from leakaudit.client.per_example import gradients_of_examples
from leakaudit.client.truth import MicroBatch


class Net(nn.Module):
    """A network of which the examples may share statistics."""

    def __init__(self, middle: nn.Module) -> None:
        """Use `middle` between two layers."""
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 8), middle, nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.last(torch.tanh(self.middle(self.first(inputs))))
        return logits


def gradients(net: Net, batch: MicroBatch) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Return the gradient of each example, and the sizes of all forward passes."""
    sizes: list[int] = []

    @contextmanager
    def forward(one: MicroBatch) -> Iterator[dict[str, Tensor]]:
        sizes.append(len(one.inputs["input_ids"]))
        torch.manual_seed(sum(sizes))
        yield {"logits": net(one.inputs["input_ids"])}

    parameters = dict(net.named_parameters())
    return list(gradients_of_examples(forward, batch, parameters, divisor=1.0, share=4.0)), sizes


@pytest.mark.parametrize("middle", ["none", "dropout", "batch norm"])
def test_examples_are_taken_alone_where_they_are_the_same_alone(middle: str) -> None:
    """Elsewhere a backward pass over the batch gives them; the sum is the same.

    The sum of the examples' gradients is four times the gradient of the batch, because `share` is 4.
    """
    torch.manual_seed(0)
    net = Net({"none": nn.Identity(), "dropout": nn.Dropout(0.3), "batch norm": nn.BatchNorm1d(8)}[middle])
    output_gradient = torch.randn(4, 2)
    batch = MicroBatch(inputs={"input_ids": torch.randn(4, 3)}, output_gradients={"logits": output_gradient})
    found, sizes = gradients(net, batch)
    assert sizes == ([4, 1, 1, 1, 1] if middle == "none" else [4, 1] if middle == "dropout" else sizes)
    torch.manual_seed(4)  # that of the first pass
    net(batch.inputs["input_ids"]).backward(output_gradient)
    for name, parameter in net.named_parameters():
        total = torch.stack([one[name] for one in found]).sum(0)
        torch.testing.assert_close(
            total, 4 * (parameter.grad if parameter.grad is not None else torch.zeros(1)), rtol=1e-4, atol=1e-5
        )
