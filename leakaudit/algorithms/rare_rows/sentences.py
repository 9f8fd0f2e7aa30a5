"""Partial sentences, and the simulation of one sentence alone.

Letters: N drafts, T places, D hidden size, C classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.client.observation import Observation
from leakaudit.models.structure import InputStage

TOKENS_AT_ONCE = {"cpu": 1_536, "cuda": 32_768}
"""Tokens that are simulated in one pass, by kind of device.
Our choice: larger passes are not faster on two processor cores, and take less than 2 GB on a GPU with 12 layers of D = 768."""


@dataclass(frozen=True)
class Draft:
    """A sentence of which some places are known."""

    words: Mapping[int, int]
    """Place -> token id, without the tokens that the tokenizer puts around a text."""
    begin: int
    """First place of the words."""
    end: int
    """First place after the words."""

    @property
    def holes(self) -> tuple[int, ...]:
        """Return the places that have no word."""
        return tuple(place for place in range(self.begin, self.end) if place not in self.words)

    def with_word(self, place: int, word: int) -> Draft:
        """Return the draft with another word at a place."""
        return replace(self, words={**self.words, place: word})

    def without(self, places: Collection[int]) -> Draft:
        """Return the draft with holes at some places."""
        return replace(self, words={p: word for p, word in self.words.items() if p not in places})

    def lengths(self, count: int, longest: int) -> list[Draft]:
        """Return the draft with the likely ends behind its last word.

        Args:
            count: most ends to try.
            longest: largest end, unless the last word is behind it.
        """
        first = max(self.words) + 1
        last = min(first + count, longest + 1)
        return [replace(self, end=end) for end in range(first, max(last, first + 1))]

    def in_order(self) -> tuple[int, ...]:
        """Return the words in the order of their places."""
        return tuple(self.words[place] for place in sorted(self.words))


@dataclass(frozen=True)
class Laid:
    """Drafts side by side, padded on the right."""

    tokens: Tensor
    """(N, T) int64."""
    places: Tensor
    """(N, T) int64."""
    mask: Tensor
    """(N, T) int64; 0 where there is no token."""
    kept: Tensor | None = None
    """(N, T, D): factors of the normalisation's output at each place, where dropout is known."""


class SentenceSimulator:
    """Gradients at the places of sentences, each simulated alone.

    Dropout is off, which is the mean of its masks; only masks that rows show are applied. Places without a word are left out, as if the
    attention did not see them.
    """

    def __init__(
        self, seen: Observation, stage: InputStage, kept: Mapping[tuple[int, int], Tensor] | None = None
    ) -> None:
        """Keep the model and the vectors of its tokens and places.

        Args:
            seen: of a text classifier.
            stage: additive, so that the normalisation's input is a token vector plus a place's vector.
            kept: (token id, place) -> (D,) factors that dropout put on the normalisation's output there.
        """
        self.kept = dict(kept or {})
        assert stage.norm_module is not None
        self.model, self.norm = seen.model, stage.norm_module
        self.device = stage.device
        self.token_vectors = stage.token_vectors.detach()  # (V, D)
        self.place_vectors = stage.position_vectors.to(self.token_vectors)  # (P, D)
        self.before, self.after = seen.facts.vocabulary.starts_with, seen.facts.vocabulary.ends_with
        classes = seen.facts.num_labels or 1
        self.labels: tuple[int, ...] = () if classes <= 2 else tuple(range(classes))
        """Labels to simulate. Empty for two classes, where both labels give one direction with opposite signs."""

    def lay(self, drafts: Sequence[Draft]) -> Laid:
        """Return drafts side by side, in their order."""
        rows = [self._row(draft) for draft in drafts]
        width = max(len(row) for row in rows)
        grid = torch.zeros(3, len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            grid[:2, index, : len(row)] = torch.tensor(row).T
            grid[2, index, : len(row)] = 1
        tokens, places, mask = grid.to(self.device)
        return Laid(tokens, places, mask, self._kept(rows, width) if self.kept else None)

    def _kept(self, rows: Sequence[Sequence[tuple[int, int]]], width: int) -> Tensor:
        """Return (N, T, D): the known factors, 1 elsewhere."""
        table = torch.ones(len(rows), width, self.token_vectors.shape[1])
        for index, row in enumerate(rows):
            for turn, pair in enumerate(row):
                if pair in self.kept:
                    table[index, turn] = self.kept[pair]
        return table.to(self.device)

    def _row(self, draft: Draft) -> list[tuple[int, int]]:
        before = [(token, place) for place, token in enumerate(self.before)]
        words = [(draft.words[place], place) for place in sorted(draft.words)]
        return before + words + [(token, draft.end + turn) for turn, token in enumerate(self.after)]

    def inputs(self, laid: Laid) -> Tensor:
        """Return (N, T, D): the normalisation's inputs of laid drafts."""
        return self.token_vectors[laid.tokens] + self.place_vectors[laid.places]

    def gradients(self, inputs: Tensor, laid: Laid, *, differentiable: bool = False) -> Tensor:
        """Return the gradients at all places, up to a factor for each sentence.

        Args:
            inputs: (N, T, D) inputs of the normalisation.
            laid: the drafts, for their attention mask and their known dropout.
            differentiable: keep the graph, so that the result can be differentiated again.

        Returns:
            (K, N, T, D): K is 1 for at most two classes, where the factor's sign depends on the label; else the number of classes, in
            the order of the labels, with a positive factor.
        """
        with torch.enable_grad():
            given = inputs if inputs.requires_grad else inputs.detach().requires_grad_()
            logits = self._logits(given, laid)
            parts = self._losses(logits)
            found = [
                torch.autograd.grad(
                    part, given, create_graph=differentiable, retain_graph=differentiable or turn + 1 < len(parts)
                )[0]
                for turn, part in enumerate(parts)
            ]
        return torch.stack(found)

    def _losses(self, logits: Tensor) -> list[Tensor]:
        if self.labels:
            return [
                nn.functional.cross_entropy(
                    logits, torch.full_like(logits[:, 0], label, dtype=torch.long), reduction="sum"
                )
                for label in self.labels
            ]
        return [(logits[:, -1] - logits[:, 0]).sum() if logits.shape[1] > 1 else logits.sum()]

    def _logits(self, inputs: Tensor, laid: Laid) -> Tensor:
        with _normalised_from(self.norm, inputs, laid.kept):
            logits: Tensor = self.model(input_ids=torch.zeros_like(laid.mask), attention_mask=laid.mask).logits
        return logits.reshape(len(laid.mask), -1)

    def chunks(self, drafts: Sequence[Draft]) -> Iterator[tuple[list[int], Laid]]:
        """Yield drafts of similar lengths: their indices, and the drafts side by side."""
        most = TOKENS_AT_ONCE.get(self.device.type, TOKENS_AT_ONCE["cpu"])
        order = sorted(range(len(drafts)), key=lambda index: len(drafts[index].words))
        frame = len(self.before) + len(self.after)
        while order:
            width = len(drafts[order[-1]].words) + frame
            size = max(1, most // width)
            order, chunk = order[:-size], order[-size:]
            yield chunk, self.lay([drafts[index] for index in chunk])


@contextmanager
def _normalised_from(norm: nn.Module, inputs: Tensor, kept: Tensor | None) -> Iterator[None]:
    """Let a normalisation read `inputs`, and multiply its output by `kept`."""

    def replaced(_module: nn.Module, _given: Any) -> tuple[Tensor]:
        return (inputs,)

    def dropped(_module: nn.Module, _given: Any, made: Tensor) -> Tensor:
        return made if kept is None else made * kept

    with norm.register_forward_pre_hook(replaced), norm.register_forward_hook(dropped):
        yield
