"""Conversion between the private batch and the tensors of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from leakaudit.client.sequences import PLAIN, Reading
from leakaudit.client.truth import MicroBatch, Truth

STORED_PARTS = {"inputs": "inputs", "rng": "rng", "withheld_inputs": "kept_back", "output_gradients": "pulls"}
"""Field of a micro-batch -> its name in the file, as in schema 1.0."""


OPTIMIZER = "optimizer/"
"""Prefix of the optimizer's state in the file."""

TRACE = "trace/"
"""Prefix of the trace in the file."""


def tensors_of(truth: Truth) -> dict[str, Tensor]:
    """Return the tensors of a batch by their names in `truth.safetensors`."""
    tensors = {f"{OPTIMIZER}{name}": value.contiguous() for name, value in truth.optimizer_state.items()}
    tensors |= {f"{TRACE}{name}": value.contiguous() for name, value in truth.trace.items()}
    for index, batch in enumerate(truth.micro_batches):
        for part, stored in STORED_PARTS.items():
            values = getattr(batch, part)
            tensors |= {f"{index}/{stored}/{name}": value.contiguous() for name, value in values.items()}
        tensors |= {f"{index}/options/{name}": _scalar(value) for name, value in batch.options.items()}
        if batch.num_items is not None:
            tensors[f"{index}/num_items"] = batch.num_items
        if batch.repeated_pass:
            tensors[f"{index}/again"] = torch.tensor(True)
        if batch.entities:
            tensors[f"{index}/entities"] = torch.tensor(list(json.dumps(batch.entities).encode()), dtype=torch.uint8)
    return tensors


def _scalar(value: bool | float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def truth_of(tensors: Mapping[str, Tensor], reading: Reading = PLAIN) -> Truth:
    """Return the batch in such tensors, which `check_truth` has accepted.

    Args:
        tensors: names in the file -> tensors.
        reading: how texts are read from a batch.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith((OPTIMIZER, TRACE)):
            continue
        number, _, rest = key.partition("/")
        found.setdefault(int(number), {})[rest] = value
    batches = tuple(_micro_batch(found[number]) for number in sorted(found))
    return Truth(batches, reading, below(OPTIMIZER, tensors), below(TRACE, tensors))


def _micro_batch(mine: Mapping[str, Tensor]) -> MicroBatch:
    return MicroBatch(
        inputs=below("inputs/", mine),
        rng=below("rng/", mine),
        num_items=mine.get("num_items"),
        options={name: value.item() for name, value in below("options/", mine).items()},
        withheld_inputs=below("kept_back/", mine),
        output_gradients=below("pulls/", mine),
        repeated_pass="again" in mine,
        entities=_entities(mine["entities"]) if "entities" in mine else (),
    )


def _entities(stored: Tensor) -> tuple[tuple[str, ...] | None, ...]:
    rows = json.loads(bytes(stored.tolist()))
    return tuple(None if row is None else tuple(row) for row in rows)


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without the prefix."""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
