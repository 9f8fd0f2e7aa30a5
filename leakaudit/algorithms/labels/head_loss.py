"""The loss of a classifier's head, and the gradient that it gives labels.

Letters: B examples, C classes. With mean cross-entropy the gradient of the logits is d = mean p - n / B (LLG, Eq. 9). Two
variants change it in a way that is public and can be reversed. Label smoothing e replaces n / B by (1 - e) n / B + e / C. Class weights
w give every example the weight of its class, so that shares become w_c n_c / sum_j w_j n_j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError

REGRESSIONS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.GaussianNLLLoss, nn.PoissonNLLLoss)
SIGMOIDS = (nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)


@dataclass(frozen=True)
class HeadLoss:
    """A cross-entropy, as the protocol prescribes it."""

    smoothing: float = 0.0
    """Share of every label that is spread over all classes."""
    weights: Tensor | None = None
    """(C,) class weights; None if all are equal."""
    summed: bool = False
    """Whether the loss is the sum over the batch and not its mean. Gradients are then B times as large."""

    def shares(self, weighted: Tensor) -> Tensor:
        """Return (C,) shares n_c / B, computed from mean p - d.

        Args:
            weighted: (C,) mean p - d: the shares as the loss weighs and smooths them.
        """
        return self.unweighted((weighted - self.smoothing / len(weighted)) / (1 - self.smoothing))

    def unweighted(self, weighted: Tensor) -> Tensor:
        """Return (C,) shares n_c / B from w_c n_c / sum_j w_j n_j."""
        if self.weights is None:
            return weighted
        plain = weighted / self.weights.to(weighted)
        return plain / plain.sum()


def head_loss(seen: Observation) -> HeadLoss:
    """Return the loss of the head.

    Raises:
        AnatomyError: the labels are not classes, or label attacks cannot read the gradient of this loss.
    """
    criterion = getattr(seen.model, "criterion", None)
    if criterion is None:
        return HeadLoss()
    if isinstance(criterion, REGRESSIONS):
        raise AnatomyError(f"this is a regression ({type(criterion).__name__}): its labels are not classes")
    if isinstance(criterion, SIGMOIDS):
        raise AnatomyError(f"this is multi-label training ({type(criterion).__name__}): an example has no single class")
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
        raise AnatomyError(
            f"the loss is {type(criterion).__name__} and not cross-entropy; focal and similar losses weigh every example by "
            "how well it is predicted, so what a label leaves in the gradient is not known"
        )
    smoothing = float(getattr(criterion, "label_smoothing", 0.0))
    if smoothing >= 1.0:
        raise AnatomyError(
            "labels are smoothed away entirely (label smoothing of 1): they leave nothing in the gradient"
        )
    if smoothing and criterion.weight is not None:
        raise AnatomyError("class weights together with label smoothing weigh the smoothed part, too: not supported")
    weights = criterion.weight
    if weights is not None and bool((weights <= 0).any()):
        raise AnatomyError("a class has weight 0: its examples leave nothing in the gradient")
    return HeadLoss(smoothing, None if weights is None else weights.double(), criterion.reduction == "sum")


def mean_gradient(gradient: Tensor, loss: HeadLoss, count: int | None) -> Tensor:
    """Return the gradient of the mean loss over the batch.

    Args:
        gradient: any part of the update.
        loss: the head's loss.
        count: B; None if it is not known.

    Raises:
        AnatomyError: the loss is a sum over a batch of unknown size.
    """
    if not loss.summed:
        return gradient
    if count is None:
        raise AnatomyError("the loss is the sum over a batch of unknown size; grant `data_count`")
    return torch.div(gradient, count)
