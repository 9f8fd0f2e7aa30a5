"""Checks of a snapshot's content, before anything is built from it.

A snapshot is a file, and anyone can make a file. The bounds are far above the needs of a training step, but low enough to refuse harmful
content early. The same check runs when a snapshot is written, so every kept snapshot can be read.

Letters: B sequences, T tokens of one sequence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor

from leakaudit.client.trace import MOMENTS
from leakaudit.errors import SnapshotDamagedError

if TYPE_CHECKING:
    from leakaudit.client.snapshot import Manifest

MAX_MANIFEST_BYTES = 16 * 1024 * 1024
"""Most bytes of `snapshot.json`. Our choice: ten thousand names of parameters take about 2 MiB."""
MAX_MICRO_BATCHES = 4096
"""Most forward passes of one optimizer step. Our choice: in practice, gradient accumulation uses less than a thousand."""
MAX_SEQUENCES = 100_000
"""Most sequences of one optimizer step. Our choice: sequences without tokens have no bytes, so the file's size does not limit them."""
MAX_RANK = 8
"""Most dimensions of a tensor of the batch. Our choice: video has five."""
MAX_CLASSES = 1_000_000
"""Most classes. Our choice: the largest public label sets have tens of thousands."""
MAX_VOCABULARY = 100_000_000
"""Most tokens of a vocabulary. Our choice: the largest tokenizers in use have less than a million."""
MAX_LOCAL_STEPS = 100_000
"""Most local steps. Our choice: one round of federated averaging has hundreds."""
MAX_STEP = 10**15
"""Largest number of an optimizer step: a float represents every smaller whole number exactly."""

_KEY = re.compile(
    r"(0|[1-9][0-9]{0,8})/(?:(inputs|rng|kept_back|pulls|options)/.+|num_items|again|entities)", re.DOTALL
)

_STATE_KEY = re.compile(r"optimizer/.+/.+", re.DOTALL)

_TRACE_KEY = re.compile(rf"trace/(?:{'|'.join(MOMENTS)})/.+", re.DOTALL)


def check_truth(tensors: Mapping[str, Tensor], where: str, *, arrays: bool, vocabulary: int = 0) -> None:
    """Refuse a private batch whose tensors do not belong together.

    Args:
        tensors: key in the file -> tensor.
        where: name of the file, for messages.
        arrays: whether the model classifies arrays, so that `input_ids` is (B, 0).
        vocabulary: number of token ids; 0 if it is unknown.

    Raises:
        SnapshotDamagedError: a tensor is wrong. The message says what was expected and what was found, never a value.
    """
    batches: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if _is_of_no_batch(key, tensor, where):
            continue
        if not _KEY.fullmatch(key):
            raise _damaged(where, "a tensor whose name no recorder writes", f"a name of {len(key)} characters")
        number, _, rest = key.partition("/")
        batches.setdefault(int(number), {})[rest] = tensor
        if len(batches) > MAX_MICRO_BATCHES:
            raise _damaged(where, "too many micro-batches", f"more than {MAX_MICRO_BATCHES}")
    if sorted(batches) != list(range(len(batches))) or not batches:
        raise _damaged(where, "no micro-batches numbered from 0", f"{len(batches)} micro-batches")
    for index, batch in batches.items():
        _check_batch(batch, f"{where}, micro-batch {index},", arrays=arrays, vocabulary=vocabulary)
    total = sum(math.prod(batch["inputs/input_ids"].shape[:-1]) for batch in batches.values())
    if total == 0:
        raise _damaged(where, "no sequence", f"{len(batches)} micro-batches without any")
    if total > MAX_SEQUENCES:
        raise _damaged(where, "too many sequences", f"{total}, at most {MAX_SEQUENCES} are read")


def _is_of_no_batch(key: str, tensor: Tensor, where: str) -> bool:
    """Return whether a tensor belongs to the whole step, and check its form."""
    traced = _TRACE_KEY.fullmatch(key) is not None
    if traced and (tensor.dim() != 2 or tensor.dtype != torch.float32):
        raise _damaged(where, "a trace that is not (K, n) float32", _shape(tensor))
    return traced or _STATE_KEY.fullmatch(key) is not None


def _check_batch(batch: Mapping[str, Tensor], where: str, *, arrays: bool, vocabulary: int) -> None:
    ids = batch.get("inputs/input_ids")
    if ids is None:
        raise _damaged(where, "a batch without `input_ids`", f"{len(batch)} other tensors")
    shaped = ids.dim() == 2 or (ids.dim() == 3 and not arrays)
    # With Poisson sampling, one process may draw no example, so one micro-batch may be empty.
    if not shaped or _is_real(ids) or (ids.shape[-1] == 0 and len(ids) > 0 and not arrays):
        raise _damaged(where, "`input_ids` that are not whole numbers of shape (B, T) or (B, choices, T)", _shape(ids))
    if vocabulary and ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
        raise _damaged(where, "`input_ids` outside the vocabulary", f"an id beyond the {vocabulary} known ones")
    for name, tensor in batch.items():
        if wrong := _wrong(name, tensor, ids):
            raise _damaged(where, f"`{name}` that is {wrong}", _shape(tensor))
    if arrays:
        odd = [name for name, tensor in batch.items() if name == "inputs/inputs" and len(tensor) != len(ids)]
        if odd:
            raise _damaged(where, "a number of arrays other than that of examples", _shape(batch[odd[0]]))


def _wrong(name: str, tensor: Tensor, ids: Tensor) -> str:
    """Return the problem of one tensor of a micro-batch; empty if it is valid."""
    part, _, rest = name.partition("/")
    if tensor.dim() > MAX_RANK:
        return f"no tensor of at most {MAX_RANK} dimensions"
    if name == "inputs/inputs" and tensor.dim() == 0:
        return "no array for each example"
    if part == "inputs" and rest == "attention_mask" and not _masks(tensor, ids):
        return f"not of the shape of `input_ids` {tuple(ids.shape)}, nor one row a token"
    if part == "rng" and (tensor.dim() != 1 or tensor.dtype != torch.uint8 or not tensor.numel()):
        return "no state of a random generator (bytes)"
    if part == "options" and (tensor.dim() != 0 or not _is_finite(tensor)):
        return "no finite scalar"
    if part == "num_items" and (tensor.dim() > 1 or not tensor.numel() or not _is_finite(tensor)):
        return "no finite number of items"
    if name == "entities" and not _names_entities(tensor):
        return "no list of names for each sequence, as JSON in bytes"
    if part == "pulls" and not tensor.is_floating_point():
        return "no gradient (floating point)"
    return ""


def _names_entities(stored: Tensor) -> bool:
    """Return whether bytes are JSON: a list of strings, or null, for each sequence."""
    if stored.dim() != 1 or stored.dtype != torch.uint8:
        return False
    try:
        rows = json.loads(bytes(stored.tolist()))
    except (ValueError, RecursionError):
        return False
    lists = isinstance(rows, list) and all(row is None or isinstance(row, list) for row in rows)
    return lists and all(isinstance(name, str) for row in rows for name in row or ())


def _masks(mask: Tensor, ids: Tensor) -> bool:
    """Return whether a mask fits token ids.

    It has one entry for each token, or one for each pair of tokens: (B, T, T) or (B, heads, T, T).
    """
    width = ids.shape[-1]
    pairs = mask.dim() in (3, 4) and mask.shape[-1] == width and mask.shape[-2] in (1, width)
    return mask.shape == ids.shape or (pairs and mask.shape[0] in (1, len(ids)))


def check_update(update: Mapping[str, Tensor], where: str) -> None:
    """Refuse an update that holds anything but floating-point numbers.

    Raises:
        SnapshotDamagedError: an update is not floating point. The message names the first parameter.
    """
    odd = [name for name, tensor in update.items() if not tensor.is_floating_point()]
    if odd:
        raise _damaged(where, f"an update of {odd[0]!r} that is not floating point", _shape(update[odd[0]]))


def check_manifest(manifest: Manifest, where: str) -> None:
    """Refuse public facts that no training step has.

    Numbers may not be negative, infinite, or beyond the bounds above.

    Raises:
        SnapshotDamagedError: a fact is invalid. The message names the first.
    """
    facts, recipe, provenance, words = (
        manifest.facts,
        manifest.recipe,
        manifest.provenance,
        manifest.facts.vocabulary,
    )
    classes = 1 if facts.num_labels is None else facts.num_labels
    ranges: dict[str, tuple[float | None, float, float]] = {
        "facts.num_labels": (classes, 1, MAX_CLASSES),
        "facts.local_steps": (facts.local_steps, 1, MAX_LOCAL_STEPS),
        "facts.batch_size_bound": (facts.batch_size_bound, 1, MAX_SEQUENCES),
        "facts.max_grad_norm": (facts.max_grad_norm, 0.0, math.inf),
        "facts.learning_rate": (facts.learning_rate, 0.0, math.inf),
        "facts.vocabulary.size": (words.size, 0, MAX_VOCABULARY),
        "recipe.max_grad_norm": (recipe.max_grad_norm, 0.0, math.inf),
        "recipe.max_grad_value": (recipe.max_grad_value, 0.0, math.inf),
        "recipe.neftune_alpha": (recipe.neftune_alpha, 0.0, math.inf),
        "recipe.processes": (recipe.processes, 1, MAX_MICRO_BATCHES),
        "recipe.outside": (recipe.unaudited_parameters, 0, MAX_STEP),
        "provenance.step": (provenance.step, 0, MAX_STEP),
        "provenance.total_steps": (provenance.total_steps, 0, MAX_STEP),
        "provenance.skipped_before": (provenance.skipped_before, 0, MAX_STEP),
    }
    for name, divisor in (("facts", facts.loss_divisor), ("recipe", recipe.loss_divisor)):
        ranges[f"{name}.loss_divisor"] = (divisor, 0.0, math.inf)
    ranges["recipe.loss_scale"] = (recipe.loss_scale, 0.0, math.inf)
    ranges |= {f"facts.dropout of {name!r}": (rate, 0.0, 1.0) for name, rate in facts.dropout.items()}
    for name, (value, low, high) in ranges.items():
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise _damaged(where, f"{name} outside {low:g} to {high:g}", "a number outside this range")
    above_zero = (facts.loss_divisor, recipe.loss_divisor, recipe.loss_scale)
    if 0.0 in above_zero:
        raise _damaged(where, "a loss that is divided by 0", "a loss_divisor or loss_scale of 0")
    _check_ids(manifest, where)


def _check_ids(manifest: Manifest, where: str) -> None:
    """Refuse token ids outside the vocabulary, and invalid shapes of arrays."""
    words, shape = manifest.facts.vocabulary, manifest.facts.input_shape
    known = (*words.special.values(), *words.starts_with, *words.ends_with)
    if any(not 0 <= token < max(words.size, 1) for token in known):
        raise _damaged(where, "special tokens outside the vocabulary", f"an id beyond the {words.size} known ones")
    if shape is not None and (len(shape) > MAX_RANK or any(not 0 < size <= MAX_VOCABULARY for size in shape)):
        raise _damaged(where, "facts.input_shape that is no shape of an array", f"{len(shape)} dimensions")


def check_size(size: int, where: str) -> None:
    """Refuse a file larger than this machine's memory, before it is read.

    Raises:
        SnapshotDamagedError: the file is too large. The message has its size and the size of the memory.
    """
    memory = psutil.virtual_memory().total
    if size > memory:
        raise _damaged(
            where, f"a file larger than this machine's memory of {memory / 1e9:.0f} GB", f"{size / 1e9:.0f} GB"
        )


def _damaged(where: str, what: str, found: str) -> SnapshotDamagedError:
    return SnapshotDamagedError(f"{where} holds {what}; found {found}. Remove the snapshot and keep a new step")


def _shape(tensor: Tensor) -> str:
    shape = f"{tensor.dim()} dimensions" if tensor.dim() > MAX_RANK else f"shape {tuple(tensor.shape)}"
    return f"{shape}, {str(tensor.dtype).removeprefix('torch.')}"


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
