"""Gradients and losses of texts at the weights before a round.

They depend on the public model only, so one reading serves every round that begins with these weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from leakaudit.algorithms.membership.candidates import Candidate
from leakaudit.client.observation import Observation, Update
from leakaudit.errors import AnatomyError, ConfigError
from leakaudit.models.versions import call_with

ENTRIES = 200_000
"""Most entries of the update that are read.
Our choice: 300 texts then take 240 MB, and the adapters of small models are read whole."""

FEWEST = 16
"""Fewest calibration texts. Our choice: with fewer, neither the scale of a gradient's entries nor the spread of scores is known."""

DRAWN = 0
"""Seed of the draw of entries. Our choice: any; equal draws make readings of the same model comparable."""


@dataclass(frozen=True)
class Readings:
    """What the model before the round says of some texts.

    A text without a known label has one row for each class.
    """

    entries: Mapping[str, Tensor]
    """Parameter name -> (p,) int64 numbers of the entries that are read, in the flattened parameter; P in all."""
    gradients: Tensor
    """(rows, P) float32: gradient of each text's loss."""
    losses: Tensor
    """(rows,) float64: loss before the round."""
    lengths: Tensor
    """(rows,) int64 tokens."""
    text: Tensor
    """(rows,) int64: number of the text of each row, from 0, ascending."""

    @cached_property
    def texts(self) -> int:
        """Number of texts."""
        return int(self.text[-1]) + 1

    def of_update(self, update: Update) -> Tensor:
        """Return (P,) float32: the read entries of an update."""
        return torch.cat([update[name].flatten()[places] for name, places in self.entries.items()])

    def largest(self, values: Tensor) -> Tensor:
        """Return (texts,): the largest value of each text's rows (rows,)."""
        empty = torch.full((self.texts,), -torch.inf, dtype=values.dtype)
        return empty.scatter_reduce(0, self.text, values, "amax")

    def first(self, values: Tensor) -> Tensor:
        """Return (texts,): the smallest value of each text's rows (rows,)."""
        empty = torch.full((self.texts,), torch.inf, dtype=values.dtype)
        return empty.scatter_reduce(0, self.text, values, "amin")


def read_texts(seen: Observation, texts: Sequence[Candidate]) -> Readings:
    """Return the gradient and the loss of each text, with dropout off.

    Args:
        seen: gives the model before the round, and which parameters are shared. Its update's values are not read.
        texts: at least one; a language model's labels are the tokens themselves.

    Raises:
        AnatomyError: the model's loss is neither a classification nor causal language modelling, or nothing but embedding tables is shared.
        ConfigError: there is no text, or a text is empty or has a label that is no class.
    """
    _check(seen, texts)
    entries = _entries(seen)
    weights = {name: p.detach().requires_grad_() for name, p in seen.model.named_parameters() if name in entries}
    device = next(seen.model.parameters()).device
    gradients, losses, lengths, numbers = [], [], [], []
    for number, text in enumerate(texts):
        ids = torch.tensor([text.token_ids], device=device)
        for labels in _labels(seen, text, ids):
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
            with torch.enable_grad():
                loss: Tensor = call_with(seen.model, weights, inputs).loss
            found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
            pairs = zip(found, (entries[name] for name in weights), strict=True)
            gradients.append(torch.cat([gradient.flatten()[places].float().cpu() for gradient, places in pairs]))
            losses.append(float(loss.detach()))
            lengths.append(len(text.token_ids))
            numbers.append(number)
    return Readings(
        {name: entries[name] for name in weights},
        torch.stack(gradients),
        torch.tensor(losses, dtype=torch.float64),
        torch.tensor(lengths),
        torch.tensor(numbers),
    )


def _check(seen: Observation, texts: Sequence[Candidate]) -> None:
    facts = seen.facts
    if facts.task not in ("classification", "causal-lm"):
        raise AnatomyError(
            f"membership reads the loss of a classifier or of a causal language model; this step's task is {facts.task!r}"
        )
    if not texts:
        raise ConfigError("membership needs candidate texts, and got none; give texts of the round and others")
    empty = sum(not text.token_ids for text in texts)
    if empty:
        raise ConfigError(f"{empty} of {len(texts)} candidate texts have no token; leave them out")
    classes = facts.num_labels or 0
    wrong = sum(text.label is not None and not 0 <= text.label < classes for text in texts)
    if facts.task == "classification" and wrong:
        raise ConfigError(
            f"{wrong} of {len(texts)} candidate texts have a label that is no class; classes go from 0 to {classes - 1}"
        )


def _labels(seen: Observation, text: Candidate, ids: Tensor) -> list[Tensor]:
    """Return the labels with which a text is read: the known one, or each class."""
    if seen.facts.task == "causal-lm":
        return [ids]
    known = range(seen.facts.num_labels or 0) if text.label is None else [text.label]
    return [torch.tensor([label], device=ids.device) for label in known]


def _entries(seen: Observation) -> dict[str, Tensor]:
    """Return the entries to read, a random part of each parameter if there are many.

    Embedding tables are left out: nearly all of their entries are zero in the gradient of one text.
    """
    tables = {id(m.weight) for m in seen.model.modules() if isinstance(m, nn.Embedding)}
    read = {
        name: parameter.numel()
        for name, parameter in seen.model.named_parameters()
        if name in seen.update and id(parameter) not in tables
    }
    total = sum(read.values())
    if not total:
        raise AnatomyError("membership reads layers, and this update has embedding tables only")
    rng = torch.Generator().manual_seed(DRAWN)
    share = min(1.0, ENTRIES / total)
    return {
        name: torch.arange(size) if share == 1.0 else _drawn(size, max(1, round(share * size)), rng)
        for name, size in read.items()
    }


def _drawn(size: int, count: int, rng: torch.Generator) -> Tensor:
    """Return (count,) different numbers below `size`, ascending."""
    return torch.randperm(size, generator=rng)[:count].sort().values
