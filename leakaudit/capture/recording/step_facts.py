"""The checks of a kept step's public facts against what was recorded of it.

A wrong fact would weaken an attack.
"""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import BatchSampler

from leakaudit.client.facts import PublicFacts
from leakaudit.client.truth import Truth
from leakaudit.errors import SnapshotError


def loader_bound(loader: Any, windows: int, processes: int) -> int | None:
    """Return the most examples that one step may take from a data loader.

    None means that the loader does not say.

    Args:
        loader: of the trainer. A subclass of the trainer may have made it with other sizes than the arguments say.
        windows: number of micro-batches in one optimizer step.
        processes: number of processes of the run; each draws batches of its own.
    """
    sampler = getattr(loader, "sampler", None)
    sampler = sampler if isinstance(sampler, BatchSampler) else getattr(loader, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        return None
    return size * windows * (1 if getattr(sampler, "split_batches", False) else processes)


def checked_bound(facts: PublicFacts, truth: Truth) -> tuple[int | None, str]:
    """Return the bound on the batch size, if the batch keeps to it, and a note.

    Otherwise the bound is None, and the note says why.

    Args:
        facts: with the bound that the trainer's settings state, in sequences of one step or local step.
        truth: the batch. Each packed text, and each choice of an example, counts as one sequence.
    """
    bound = facts.batch_size_bound
    if bound is None or truth.examples() <= bound * facts.local_steps:
        return bound, ""
    return None, "the batch held more sequences than the trainer's settings say, so no bound on its size is stated"


def checked_divisor(truth: Truth) -> tuple[float | None, str]:
    """Return the divisor of the loss of each micro-batch, and a note.

    The divisor is 1 over the gradient at the loss, from which the backward pass starts. It is None, and the note says why, unless it is
    the same positive number for all micro-batches. A loss that is computed outside the model has no divisor. If no gradient was recorded
    at any output, the divisor is 1.
    """
    output_gradients = [
        float(batch.output_gradients["loss"]) for batch in truth.micro_batches if "loss" in batch.output_gradients
    ]
    same = bool(output_gradients) and len(output_gradients) == len(truth.micro_batches)
    if (
        same
        and output_gradients[0] > 0
        and all(math.isclose(gradient, output_gradients[0], rel_tol=1e-6) for gradient in output_gradients)
    ):
        return 1.0 / output_gradients[0], ""
    if not any(batch.output_gradients for batch in truth.micro_batches):
        return 1.0, ""  # nothing is known of the loss: the step is repeated with the model's own loss, undivided
    return None, "what the trainer divided the loss by is not one number that could be seen, so none is stated"


def check_masked_words(facts: PublicFacts, truth: Truth) -> None:
    """Refuse a step of a masked language model if its masked words are unknown.

    These words are the labels, against which an attack is scored.

    Raises:
        SnapshotError: says how to make them known.
    """
    unknown = [b for b in truth.micro_batches if b.labels is None or b.labels.shape != b.inputs["input_ids"].shape]
    if facts.task == "masked-lm" and unknown:
        raise SnapshotError(
            "its masked words were not seen, because the trainer keeps the labels from the model; tell them before the forward pass "
            "(`attach(trainer)`, or `audit.batch({'labels': labels})`)"
        )
