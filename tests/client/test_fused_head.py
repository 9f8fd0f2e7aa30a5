"""Gradients of a head that gives the scores of labels and no logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leakaudit.client.fused_head import label_scores

TEXTS, TOKENS, HIDDEN, WORDS = 12, 40, 48, 4000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_trls_fused_head_to_the_last_bit(dtype: torch.dtype, bias: bool) -> None:
    kernels = pytest.importorskip("trl.kernels")
    random = torch.Generator().manual_seed(0)
    read = torch.randn(TEXTS, TOKENS, HIDDEN, generator=random).to(dtype)
    labels = torch.randint(WORDS, (TEXTS, TOKENS), generator=random)
    labels[0, 30:] = -100
    head = nn.Linear(HIDDEN, WORDS, bias=bias).to(dtype)

    theirs = read.clone().requires_grad_()
    scores, *_ = kernels.ChunkedLogProbFunction.apply(
        theirs[:, :-1].reshape(-1, HIDDEN),
        head.weight,
        head.bias,
        labels[:, 1:].clamp(min=0).reshape(-1),
        1.0,
        32768,
        None,
        1.0,
        ("log_probs",),
    )
    wanted = _gradients(scores.view(TEXTS, -1).masked_fill(labels[:, 1:] == -100, 0.0), head, theirs)

    own = read.clone().requires_grad_()
    found = _gradients(label_scores(head(own), labels, head, own), head, own)

    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_gradients_in_single_precision_are_those_of_the_logits() -> None:
    random = torch.Generator().manual_seed(0)
    read = torch.randn(TEXTS, TOKENS, HIDDEN, generator=random)
    labels = torch.randint(WORDS, (TEXTS, TOKENS), generator=random)
    head = nn.Linear(HIDDEN, WORDS)
    one, other = (read.clone().requires_grad_() for _ in range(2))
    found = _gradients(label_scores(head(one), labels, head, one), head, one)
    wanted = _gradients(label_scores(head(other), labels, None, None), head, other)
    torch.testing.assert_close(found, wanted)


def test_logits_that_are_changed_after_the_head_keep_their_own_gradient() -> None:
    random = torch.Generator().manual_seed(0)
    read = torch.randn(TEXTS, TOKENS, HIDDEN, generator=random).requires_grad_()
    labels = torch.randint(WORDS, (TEXTS, TOKENS), generator=random)
    head = nn.Linear(HIDDEN, WORDS, bias=False)
    logits = torch.tanh(head(read))
    found = _gradients(label_scores(logits, labels, head, read), head, read)
    scores = torch.tanh(head(read))[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None])[..., 0]
    torch.testing.assert_close(found, _gradients(scores, head, read))


def _gradients(scores: torch.Tensor, head: nn.Linear, read: torch.Tensor) -> list[torch.Tensor]:
    """Return what the mean of scores sends to a head's input and weights."""
    weights = [one for one in (head.weight, head.bias) if one is not None]
    return list(torch.autograd.grad(-scores.sum() / scores.numel(), [read, *weights]))
