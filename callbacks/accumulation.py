"""Tells a backward pass that adds to gradients from one that only computes some, such as `torch.autograd.grad`."""

from __future__ import annotations

from typing import Any

import torch

Nodes = tuple[tuple[Any, int], ...]
"""`next_functions` of a node of the autograd graph: what a backward pass goes on to."""


def accumulates(below: Nodes) -> bool:
    """Return whether the backward pass that runs now adds to the gradient of a leaf that it can reach.

    Call it from a hook. `backward()` runs every leaf, so the first one that is found answers; `torch.autograd.grad` runs none, and the
    whole graph is walked once.

    Args:
        below: what follows the node whose hook runs. Empty for a leaf itself, whose gradient is taken to be added.
    """
    if not below:
        return True
    waiting, known = [node for node, _ in below if node is not None], set()
    while waiting:
        node = waiting.pop()
        if node in known:
            continue
        known.add(node)
        further = [later for later, _ in node.next_functions if later is not None]
        if not further and _runs(node):
            return True
        waiting += further
    return False


def _runs(leaf: Any) -> bool:
    """Return whether the engine will run a leaf's node; it refuses to say of a leaf whose gradient `autograd.grad` returns."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:
        return False
