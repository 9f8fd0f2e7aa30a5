"""The types in which weights are sent, and what they do to an update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from leakaudit.client.facts import DeclaredDefense

FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Type of a tensor -> its name in the options of a defence."""


def is_rounded(sent: Tensor, weight: Tensor) -> bool:
    """Return whether a sent tensor has fewer digits than the client's weight."""
    return sent.dtype in FORMATS and torch.finfo(sent.dtype).eps > torch.finfo(weight.dtype).eps


def before_on_wire(weight: Tensor, sent: Tensor) -> Tensor:
    """Return a weight before the round as it would have been sent.

    The server knows it, so a weight that did not move tells that it did not.
    """
    return weight.to(sent.dtype) if is_rounded(sent, weight) else weight


def rounding_of(
    sent: Mapping[str, Tensor], weights: Mapping[str, Tensor], declared: Iterable[DeclaredDefense], *, differences: bool
) -> tuple[DeclaredDefense, ...]:
    """Return the declared defences with the rounding that the types show.

    A declaration of the same rounding in other units is replaced by it.

    Args:
        sent: parameter name -> what was sent, in the type in which it was sent.
        weights: parameter name -> weights before the round.
        declared: the defences that the protocol declares, in the order in which they apply.
        differences: whether `sent` holds differences of weights.
    """
    found = {FORMATS[w.dtype] for name, w in sent.items() if is_rounded(w, weights[name])}
    if not found:
        return tuple(declared)
    kind = "differences" if differences else "weights"
    dtype = min(found)  # bf16 has fewer digits than fp16
    shown = DeclaredDefense(name="round", parameters={"dtype": dtype, "of": kind})
    others = (one for one in declared if (one.name, one.parameters.get("dtype")) != (shown.name, dtype))
    return (*others, shown)
