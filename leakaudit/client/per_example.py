"""The gradient of each example of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakaudit.client.output_gradients import gradients_by_row
from leakaudit.client.replay import take_gradients
from leakaudit.client.truth import MicroBatch
from leakaudit.errors import SnapshotError

SAME_OUTPUT = 1e-4
"""Largest difference of an example's output alone from that in its batch, as a share of its largest entry. Our choice: products of float32
differ by about 1e-6 between sizes of batches, and dropout moves outputs by a tenth or more."""

NORM_FLOOR = 1e-6
"""Number that is added to an example's gradient norm before a division by it.

Opacus' `clip_and_accumulate` does the same.
"""

Forward = Callable[[MicroBatch], AbstractContextManager[dict[str, Tensor]]]
"""Runs the client's model on a micro-batch and gives its outputs by path."""


@dataclass(frozen=True)
class ExampleClipping:
    """How a client clips the gradient of each example before it adds them up."""

    bound: float
    """C: L2 norm to which the whole gradient of an example is clipped, so the most that one example adds to the sum."""
    divisor: float = 1.0
    """Divisor of the sum of the clipped gradients, such as the expected batch size."""
    summed: bool = False
    """Whether the loss of a micro-batch is the sum over its examples instead of their mean."""
    bounds: tuple[float, ...] = ()
    """Bound of each shared parameter in their order, if each one is clipped by itself (McMahan et al. 2018, per-layer clipping).

    Their L2 norm is C. Empty if the gradient is clipped as a whole.
    """

    def clip(self, example: Mapping[str, Tensor]) -> None:
        """Clip the gradient of one example in place.

        Args:
            example: parameter name -> gradient, in the order of the shared parameters.

        Raises:
            SnapshotError: as for `factors`.
        """
        factors = self.factors([gradient.norm() for gradient in example.values()])
        for gradient, factor in zip(example.values(), factors, strict=True):
            gradient.mul_(factor)

    def factors(self, norms: Sequence[Tensor]) -> list[float]:
        """Return the factor of each parameter's gradient.

        Source: Abadi et al. 2016, Algorithm 1.

        Args:
            norms: L2 norm of the gradient of one example, for each shared parameter in their order.

        Raises:
            SnapshotError: there is another number of parameters than there are bounds.
        """
        if not self.bounds:
            return [clipping_factor(self.bound, torch.stack(list(norms)).norm())] * len(norms)
        if len(self.bounds) != len(norms):
            raise SnapshotError(f"{len(self.bounds)} clipping bounds were declared for {len(norms)} trained parameters")
        return [clipping_factor(bound, norm) for bound, norm in zip(self.bounds, norms, strict=True)]


def clipping_factor(bound: float, norm: Tensor) -> float:
    """Return the factor that shortens a vector of a norm to a bound; 1 for a shorter one."""
    return float((bound / (norm + NORM_FLOOR)).clamp(max=1.0))


def gradients_of_examples(
    forward: Forward,
    batch: MicroBatch,
    parameters: Mapping[str, nn.Parameter],
    *,
    divisor: float,
    share: float,
    alone: bool = True,
) -> Iterator[dict[str, Tensor]]:
    """Yield the gradient of each example by parameter name.

    It is `share` times the example's part in the gradient of the micro-batch. It costs a backward pass over the batch. With `alone`, and where
    an example gives the same outputs alone as in its batch (not with dropout), it costs a forward and a backward pass over one example.

    Args:
        forward: runs the client's model.
        batch: the micro-batch.
        parameters: those of the model whose gradients are asked for; their `grad` is overwritten.
        divisor: divisor of the client's loss, if the model computes it.
        share: factor of every gradient.
        alone: examples may be taken out of their batch. The gradients are then rounded otherwise than in the batch, which shows where the
            gradients of several examples nearly cancel.

    Raises:
        SnapshotError: no output has one row an example, so the examples' gradients cannot be told apart.
    """
    rows = len(batch.inputs["input_ids"])
    with forward(batch) as outputs:
        tensors, output_gradients = gradients_by_row(outputs, batch.output_gradients, rows, divisor)
    names = {id(output): path for path, output in outputs.items()}
    whole = {names[id(tensor)]: tensor for tensor in tensors}
    is_independent = alone and rows > 1
    for row in range(rows):
        for parameter in parameters.values():
            parameter.grad = None
        own_outputs = _outputs_alone(forward, _example_of(batch, row, rows), row, whole) if is_independent else None
        if own_outputs is None:
            is_independent = False
            own = [_only(row, share * one) for one in output_gradients]
            torch.autograd.backward(tensors, own, retain_graph=row < rows - 1)
        else:
            torch.autograd.backward(own_outputs, [share * one[row : row + 1] for one in output_gradients])
        yield take_gradients(parameters)


def _only(row: int, gradient: Tensor) -> Tensor:
    """Return an output gradient that is zero outside of one row."""
    mine = torch.zeros_like(gradient)
    mine[row] = gradient[row]
    return mine


def _example_of(batch: MicroBatch, row: int, rows: int) -> MicroBatch:
    """Return a micro-batch of one example, padded as in its batch."""

    def own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: tensor[row : row + 1] if tensor.dim() and len(tensor) == rows else tensor
            for name, tensor in tensors.items()
        }

    return replace(
        batch,
        inputs=own(batch.inputs),
        withheld_inputs=own(batch.withheld_inputs),
        output_gradients=own(batch.output_gradients),
    )


def _outputs_alone(
    forward: Forward, example: MicroBatch, row: int, whole: Mapping[str, Tensor]
) -> Sequence[Tensor] | None:
    """Return the outputs of one example without its batch.

    None where they are not the outputs that it has in its batch.
    A model may refuse a batch of one example, as batch normalisation does.

    Args:
        forward: runs the client's model.
        example: the micro-batch of this example.
        row: its number in its batch.
        whole: path -> output of its batch, one row an example.
    """
    try:
        with forward(example) as found:
            pass
    except Exception:
        return None
    outputs = []
    for path, output in whole.items():
        one, expected = found.get(path), output[row : row + 1]
        if one is None or not one.requires_grad or one.shape != expected.shape:
            return None
        difference = (one.detach() - expected.detach()).abs().max()
        if not bool(difference <= SAME_OUTPUT * expected.detach().abs().max()):
            return None
        outputs.append(one)
    return outputs
