"""The assignment of withheld labels to the forward pass that they belong to.

A trainer withholds labels from the model if it computes the loss itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leakaudit.capture.observing.forward_hooks import ForwardPass

LABELS = "labels"


def assign_labels(passes: Sequence[ForwardPass]) -> None:
    """Assign the withheld labels of a batch to the pass that they belong to.

    A loop may make several passes over one batch (FixMatch: labelled and unlabelled texts; R-Drop: the same texts twice). The labels
    belong to the pass over the tokens of the batch, else to the first pass with as many rows as there are labels. Every other pass gets
    an empty tensor of labels, which says that the trainer had no labels for it. If no pass fits, each pass gets all that was withheld.

    Args:
        passes: of one step. Before the call, `withheld_inputs` of each pass is the whole batch, one object for all passes over it;
            afterwards it is what was withheld from that pass.
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


def _owner(passes: Sequence[ForwardPass], batch: dict[str, Tensor]) -> ForwardPass | None:
    """Return the pass that the labels of a batch belong to.

    None means that no pass fits, or that there are no labels to assign.
    """
    labels = batch.get(LABELS)
    if labels is None or labels.dim() == 0 or len(passes) < 2:
        return None
    ids = batch.get("input_ids")
    same_tokens = [p for p in passes if ids is not None and _equal(p.inputs.get("input_ids"), ids)]
    as_many_rows = [p for p in passes if _rows(p) == len(labels)]
    return next(iter([*same_tokens, *as_many_rows]), None)


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and bool(torch.equal(one.cpu(), other.cpu()))


def _rows(seen: ForwardPass) -> int:
    """Return the number of examples of a pass."""
    first = seen.inputs.get("input_ids", next(iter(seen.inputs.values()), None))
    return -1 if first is None or first.dim() == 0 else len(first)
