"""The gradients that a client's loss sent to the outputs of its model."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from leakaudit.errors import SnapshotError

EXPLAINED = 1e-6
"""Relative error up to which a loss inside the model explains the gradient at another output. Our choice: rounding
of float32 leaves 1e-7, and an entropy bonus of 0.1 may add no more than 1e-3."""

EXPLAINED_IN_HALF = 3e-2
"""The same for outputs in bfloat16 and float16. Our choice: the largest relative error of an update that is computed again in bfloat16."""


def send_back(outputs: Mapping[str, Tensor], recorded: Mapping[str, Tensor], factor: float) -> None:
    """Differentiate outputs with the gradients that the client's loss sent there.

    A recorded gradient is all that arrived at an output, directly and through later outputs. So it replaces what arrives there now. If the
    model returned a loss, its gradient is sent back first, and another output gets its recorded gradient only if the loss does not
    explain it. So the labels of the batch have a part in the result whenever they had one in the client's.

    Args:
        outputs: path -> output of the model, with its graph.
        recorded: path -> gradient at that output.
        factor: of all gradients, such as a loss scale.
    """
    scalars = [path for path, gradient in recorded.items() if gradient.dim() == 0]
    loss = max(scalars, key=lambda path: made_at(outputs[path]), default=None)  # other scalars may be its terms

    def replaced(path: str, arrived: Tensor) -> Tensor | None:
        wanted = factor * recorded[path].to(arrived)
        half = arrived.dtype in (torch.bfloat16, torch.float16)
        error = float((arrived.float() - wanted.float()).norm())
        if loss is not None and error <= (EXPLAINED_IN_HALF if half else EXPLAINED) * float(wanted.float().norm()):
            return None
        return wanted

    roots = []
    for path, gradient in recorded.items():
        sent = loss in (None, path)
        roots.append(factor * gradient.to(outputs[path]) if sent else torch.zeros_like(outputs[path]))
        if path != loss and len(recorded) > 1:
            outputs[path].register_hook(functools.partial(replaced, path))
    torch.autograd.backward([outputs[path] for path in recorded], roots)


def made_at(output: Tensor) -> int:
    """Return the place of an output in the order in which a pass computed its nodes."""
    return int(output.grad_fn._sequence_nr())  # type: ignore[union-attr]


def _direct(outputs: Mapping[str, Tensor], output_gradients: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs and the gradient that the loss sent to each of them directly.

    Some outputs are computed from other outputs, such as a pooled state from the last hidden state. The recorded gradient of an output
    includes the part that reached it through such later outputs. Backward from those adds this part again, so it is subtracted here.
    """
    order = sorted(output_gradients, key=lambda path: -made_at(outputs[path]))
    tensors: list[Tensor] = []
    direct: list[Tensor] = []
    for path in order:
        output, gradient = outputs[path], output_gradients[path].to(outputs[path])
        if tensors:
            (via,) = torch.autograd.grad(tensors, output, direct, retain_graph=True, allow_unused=True)
            gradient = gradient if via is None else gradient - via
        tensors.append(output)
        direct.append(gradient)
    return tensors, direct


def gradients_by_row(
    outputs: Mapping[str, Tensor], recorded: Mapping[str, Tensor], rows: int, divisor: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs with one row per example, and their output gradients.

    If the model computes the loss, the gradient is propagated back to the output with one row per example, such as the logits.
    """
    output_gradients = dict(recorded) or {"loss": torch.ones(()) / divisor}
    scalars = [path for path in output_gradients if outputs[path].dim() == 0]
    if not scalars:
        return _direct(outputs, output_gradients)
    loss, gradient = outputs[scalars[0]], output_gradients[scalars[0]].to(outputs[scalars[0]])
    for output in outputs.values():
        if output.requires_grad and output.dim() > 0 and len(output) == rows:
            (reached,) = torch.autograd.grad(loss, output, gradient, retain_graph=True, allow_unused=True)
            if reached is not None:
                return [output], [reached]
    raise SnapshotError(
        "no output of the model holds one row an example that the loss is computed from, so the examples' gradients "
        "cannot be told apart and the clipping of this private step cannot be repeated"
    )
