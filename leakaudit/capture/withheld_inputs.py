"""Finds the forward pass that the labels of a batch belong to.

The trainer kept these labels from the model, for a loss of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leakaudit.capture.forward_hooks import Pass

LABELS = "labels"


def hand_out(passes: Sequence[Pass]) -> None:
    """Leave what a trainer kept back of a batch with the one pass that it belongs to.

    Several passes may be made of one batch (FixMatch: labelled and unlabelled texts; R-Drop: the same texts twice). The labels belong
    to the pass over the tokens of the batch, else to the first one with as many rows as there are labels. A pass that they do not
    belong to keeps an empty tensor of labels, which says that the trainer had none for it.

    Args:
        passes: of one step; `withheld_inputs` of each is the whole batch that was told before it, one object for all passes made of it.
    """
    batches = {id(seen.withheld_inputs): seen.withheld_inputs for seen in passes}
    for identity, batch in batches.items():
        mine = [seen for seen in passes if id(seen.withheld_inputs) == identity]
        owner = _owner(mine, batch)
        for seen in mine:
            if seen is owner or owner is None:
                seen.withheld_inputs = {name: value for name, value in batch.items() if name not in seen.inputs}
            else:
                seen.withheld_inputs = {LABELS: batch[LABELS][:0]} if LABELS not in seen.inputs else {}


def _owner(passes: Sequence[Pass], batch: dict[str, Tensor]) -> Pass | None:
    """Return the pass that the labels of a batch belong to.

    None means that this cannot be told, or that there are no labels to hand out.
    """
    labels = batch.get(LABELS)
    if labels is None or labels.dim() == 0 or len(passes) < 2:
        return None
    ids = batch.get("input_ids")
    same = [p for p in passes if ids is not None and _is(p.inputs.get("input_ids"), ids)]
    long = [p for p in passes if _rows(p) == len(labels)]
    return next(iter([*same, *long]), None)


def _is(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and bool(torch.equal(one.cpu(), other.cpu()))


def _rows(seen: Pass) -> int:
    """Return the number of examples of a pass."""
    first = seen.inputs.get("input_ids", next(iter(seen.inputs.values()), None))
    return -1 if first is None or first.dim() == 0 else len(first)
