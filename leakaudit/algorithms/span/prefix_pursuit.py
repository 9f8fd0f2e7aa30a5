"""The prefixes of a decoder's batch, from the rows of all adapters.

The input of an adapter at a token depends on the token and on those before it, so every prefix has one input in each layer. The rows of
A's gradient combine the inputs of the batch. The pursuit starts at the empty prefix. In each step it takes the one token behind any known
prefix whose inputs add most evidence, over all layers; from then on this input counts as known. It ends when the best one adds no more
than chance does.

What decides is the comparison: the inputs of one word behind different prefixes are nearly parallel, so the rows are whitened by the inputs
of the batch's own words in random order (`typical_inputs`), not by those of any text. Only what the prefix adds to a word then counts.
(Own derivation; orthogonal matching pursuit over sentences is in SOMP, Li and Li 2026, arXiv 2603.16761.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.span.adapter_inputs import AdapterInputs
from leakaudit.algorithms.span.row_evidence import KNOWN, Explained, RowEvidence
from leakaudit.plugins.budget import Budget

TEXTS, LENGTH = 128, 24
"""Random texts of the batch's words, and tokens of each, whose inputs the rows are compared with. Our choice: some thousand inputs."""

CERTAIN = 1 - 1e-6
"""Largest share of a candidate that rows explain. Our choice: the rounding of float32."""

Tokens = tuple[int, ...]


def typical_inputs(
    inputs: AdapterInputs, words: Tensor, first: Tokens, longest: int, rng: torch.Generator
) -> list[Tensor]:
    """Return for each group (M, D) float64: its inputs on random texts of some words.

    Args:
        inputs: computes them.
        words: (W,) token ids.
        first: tokens before every text.
        longest: most tokens of a text.
        rng: draws the texts.
    """
    length = min(LENGTH, longest)
    drawn = torch.randint(len(words), (TEXTS, length), generator=rng).to(words.device)
    ids = words[drawn]
    ids[:, : len(first)] = torch.tensor(first[:length], dtype=torch.long, device=ids.device)
    return [given.flatten(0, 1).double() for given in inputs.run(ids)]


@dataclass
class _Candidates:
    """The candidates of one layer."""

    whitened: Tensor
    """(N, D) float32, in the coordinates of the rows."""
    length: Tensor
    """(N,) squared length."""
    outside: Tensor
    """(N,) squared length outside the known inputs' span."""

    def add(self, whitened: Tensor, axes: Tensor) -> None:
        """Add candidates (M, D) float64.

        Args:
            whitened: the candidates.
            axes: (k, D) float64 orthonormal rows that span the known inputs.
        """
        rest = whitened - (whitened @ axes.T) @ axes
        self.whitened = torch.cat([self.whitened, whitened.float()])
        self.length = torch.cat([self.length, whitened.square().sum(dim=1).float()])
        self.outside = torch.cat([self.outside, rest.square().sum(dim=1).float()])

    def know(self, axes: Tensor) -> None:
        """Take new axes (M, D) out of all candidates."""
        self.outside = self.outside - (self.whitened @ axes.T.float()).square().sum(dim=1)

    def gain(self, reader: Tensor, known: int) -> Tensor:
        """Return (N,) nats that each candidate adds; see `row_evidence`."""
        share = (self.whitened @ reader.T.float()).square().sum(dim=1) / self.outside.clamp_min(1e-30)
        nats = -0.5 * (reader.shape[1] - known) * torch.log1p(-share.clamp(max=CERTAIN))
        return torch.where(self.outside > KNOWN * self.length, nats, torch.zeros_like(nats))


class PrefixPursuit:
    """The search for prefixes, one after the other."""

    def __init__(
        self, inputs: AdapterInputs, layers: Sequence[RowEvidence], words: Tensor, first: Tokens, longest: int
    ) -> None:
        """Prepare the search.

        Args:
            inputs: computes the inputs of prefixes.
            layers: the rows of each group of adapters.
            words: (W,) token ids of the batch.
            first: tokens before every text.
            longest: most tokens of a text.
        """
        self._inputs, self._words, self._longest = inputs, words, longest
        self._known = Explained.nothing(layers)
        self._open: list[Tokens] = []
        self._taken: list[int] = []
        self._candidates = [_empty(layer) for layer in layers]
        self.prefixes: list[Tokens] = []
        """The prefixes that were found, parents before children."""
        for length in range(1, len(first) + 1):
            self._know(first[:length])
        self._open_behind(first)

    def run(self, budget: Budget) -> bool:
        """Take prefixes until none adds evidence; return whether that was reached."""
        while not budget.exhausted():
            gain = self._gain()
            best = int(gain.argmax())
            if float(gain[best]) <= self._chance():
                return True
            self._taken.append(best)
            self._know(self._open[best])
            if len(self._open[best]) < self._longest:
                self._open_behind(self._open[best])
        return False

    def _gain(self) -> Tensor:
        """Return (N,) nats that each candidate adds over all layers."""
        known = self._known
        parts = [
            each.gain(reader, len(axes))
            for each, reader, axes in zip(self._candidates, known.readers, known.axes, strict=True)
        ]
        nats = torch.stack(parts).sum(dim=0)
        nats[self._taken] = -1.0
        return nats

    def _chance(self) -> float:
        """Return the nats that the best of all wrong candidates adds by chance.

        See `Explained.chance`; the layers' shares are independent.
        """
        signals = sum(float(reader.square().sum()) for reader in self._known.readers)
        tail = math.log(len(self._open))
        return 0.5 * float(signals + 2 * (signals * tail) ** 0.5 + 2 * tail)

    def _know(self, prefix: Tokens) -> None:
        """Take the inputs of a prefix as known."""
        given = self._inputs.run(self._ids(prefix))
        before = [len(axes) for axes in self._known.axes]
        self._known = self._known.with_inputs([each[0, -1] for each in given])
        for each, axes, count in zip(self._candidates, self._known.axes, before, strict=True):
            each.know(axes[count:])
        self.prefixes.append(prefix)

    def _open_behind(self, prefix: Tokens) -> None:
        """Make every word behind a prefix a candidate."""
        made = self._inputs.children(self._ids(prefix), self._words)
        for each, layer, axes, given in zip(self._candidates, self._known.layers, self._known.axes, made, strict=True):
            each.add(layer.whitened(given[0]), axes)
        self._open += [(*prefix, word) for word in self._words.tolist()]

    def _ids(self, prefix: Tokens) -> Tensor:
        return torch.tensor([prefix], dtype=torch.long, device=self._words.device).view(1, -1)


def _empty(layer: RowEvidence) -> _Candidates:
    none = layer.rows[:0].float()
    return _Candidates(none, none.sum(dim=1), none.sum(dim=1))
