"""Log-probabilities of next labels, as a fused head of a client computes them.

Letters: B texts, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from leakaudit.client.facts import IGNORED_LABEL


def label_scores(logits: Tensor, labels: Tensor, head: nn.Module | None, read: Tensor | None) -> Tensor:
    """Return the log-probability of each next label (B, T - 1).

    It is 0 where the next label is ignored.

    Args:
        logits: (B, T, V), with their graph.
        labels: (B, T) int64.
        head: the model's output layer; None if it has none.
        read: (B, T, D) the head's input, with its graph; None if it was not seen.

    A fused head sums the gradients of its input and its weight in single precision and rounds them once. So does this one, if the logits are
    the plain product of the two; otherwise the ordinary gradient of the logits is sent back, which is the same up to rounding.
    """
    following = labels[:, 1:].to(logits.device)
    targets = following.clamp(min=0)
    if isinstance(head, nn.Linear) and read is not None and _is_product(logits, head, read):
        with torch.no_grad():  # in a fused head, the product is rounded before the bias is added
            logits = linear(read[:, :-1], head.weight)
            logits = logits if head.bias is None else logits + head.bias.to(logits.dtype)
        scores: Tensor = _LabelScores.apply(read[:, :-1], head.weight, head.bias, logits, targets)  # type: ignore[no-untyped-call]  # of torch
    else:
        scores = logits[:, :-1].float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return scores.masked_fill(following == IGNORED_LABEL, 0.0)


def _is_product(logits: Tensor, head: nn.Linear, read: Tensor) -> bool:
    """Return whether logits are what a head makes of its input, and nothing more."""
    if type(head) is not nn.Linear or read.shape[:-1] != logits.shape[:-1]:
        return False
    with torch.no_grad():
        return torch.equal(linear(read, head.weight, head.bias), logits)


class _LabelScores(torch.autograd.Function):
    """Log-probabilities whose gradients are summed in single precision."""

    @staticmethod
    def forward(ctx: Any, read: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor, targets: Tensor) -> Tensor:
        wide = logits.float()
        most = wide.amax(dim=-1)
        total = most + (wide - most[..., None]).exp().sum(dim=-1).log()  # (B, T - 1)
        ctx.save_for_backward(read, weight, bias, logits, targets, total)
        return wide.gather(-1, targets[..., None])[..., 0] - total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        read, weight, bias, logits, targets, total = ctx.saved_tensors
        at_logits = (logits.float() - total[..., None]).exp_().neg_()  # (B, T - 1, V), changed in place: it is large
        at_logits.scatter_add_(-1, targets[..., None], torch.ones_like(total)[..., None])
        at_logits.mul_(gradients[0].float()[..., None])
        rows = at_logits.to(logits.dtype).float().flatten(0, 1)  # (N, V), rounded as a client stores them
        inputs = read.to(logits.dtype).float().flatten(0, 1)  # (N, D)
        at_read = (rows @ weight.to(logits.dtype).float()).view(read.shape).to(read.dtype)
        at_weight = (rows.T @ inputs).to(weight.dtype) if ctx.needs_input_grad[1] else None
        at_bias = rows.sum(dim=0).to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        return at_read, at_weight, at_bias, None, None
