"""Whether two rows were written by one sentence, learned on invented sentences.

The gradients at the places of one sentence pass backwards through the same later layers, so their rows are alike in some directions, which
differ from model to model. The model is public: sentences are invented from the words of the batch, their gradients are computed, with
dropout drawn if the client drew it, and a linear map is learned under which rows of one sentence point the same way. No language is
needed: the words of an invented sentence are drawn at random. (Own derivation; the loss is logistic regression on pairs.)

Letters: U rare words, R rows of invented sentences, N sentences, T places, D hidden size, M directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from leakaudit.algorithms.rare_rows.rows import Rows
from leakaudit.algorithms.rare_rows.sentences import Draft, Laid, SentenceSimulator
from leakaudit.plugins.budget import Budget

LEAST, OF_WORD = 2_000, 30
"""Sentences that are invented: so many at least, and so many for each rare word.
Chosen on training texts: 8,000 for 260 rare words are as good as 20,000; see docs/decisions/rare_rows.md."""

RARE_SHARE = 0.5
"""Share of the invented sentences that have a rare word at a place with many of them. Our choice: about half of a batch's places do."""

LATEST_END = 3
"""Most words of an invented sentence after the last place that is dealt rare words. Our choice: few sentences have more."""

DIRECTIONS, EPOCHS, TOGETHER, RATE, DECAY = 96, 8, 64, 2e-3, 1e-2
"""Of the learning: M, passes over the invented sentences, sentences of a step, rate and decay of AdamW. Chosen on training texts."""

START_SCALE, START_OFFSET = 2.4, -4.8
"""Where the scale's logarithm and the offset of the odds begin. Chosen on training texts: learning ends near them."""


@dataclass(frozen=True)
class SameSentence:
    """Odds that two rows were written by one sentence."""

    directions: Tensor
    """(M, D) float32."""
    scale: float
    offset: float

    def log_odds(self, rows: Tensor) -> Tensor:
        """Return (U, U) float32 for rows (U, D) of any length."""
        turned = self.turned(rows)
        return self.scale * (turned @ turned.T) + self.offset

    def turned(self, rows: Tensor) -> Tensor:
        """Return (U, M) float32 of unit length: rows (U, D) in the learned directions."""
        return _turned(rows.float(), self.directions)


def learn(
    simulator: SentenceSimulator, rows: Rows, longest: int, drawn: bool, rng: torch.Generator, budget: Budget
) -> SameSentence | None:
    """Learn on invented sentences; return None if there was no time for any.

    Args:
        simulator: of the client's model.
        rows: of the batch, with at least one rare word.
        longest: number of places that a sentence has at most.
        drawn: whether dropout was active in the client's step.
        rng: draws the sentences and the order of learning.
        budget: inventing ends when it is used up.
    """
    vectors, sentences, begun, enough = [], [], 0, max(LEAST, OF_WORD * len(rows.rare))
    with _dropout(simulator, drawn, int(torch.randint(2**31, (), generator=rng))):
        while begun < enough and not budget.exhausted():
            drafts = _invented(simulator, rows, longest, rng)
            for chunk, laid in simulator.chunks(drafts):
                found, which = _rows_of(simulator, laid, rng)
                vectors.append(found)
                sentences.append(begun + torch.tensor(chunk)[which])
            begun += len(drafts)
    return _learned(torch.cat(vectors), torch.cat(sentences), rng) if vectors else None


def _invented(simulator: SentenceSimulator, rows: Rows, longest: int, rng: torch.Generator) -> list[Draft]:
    """Return sentences of the batch's words at random, with each rare word once."""
    at: dict[int, list[int]] = {}
    for word, place in rows.places.items():
        at.setdefault(place, []).append(word)
    begin, last = len(simulator.before), max(longest - len(simulator.after), max(at) + 1)
    long_enough = 0
    found: list[dict[int, int]] = []
    for place in range(max(at), begin - 1, -1):  # from the end, so that longer sentences have all places before
        words = at.get(place, [])
        long_enough = max(long_enough, math.ceil(len(words) / RARE_SHARE))
        while len(found) < long_enough:
            stop = min(place + 1 + int(torch.randint(LATEST_END + 1, (), generator=rng)), last)
            found.append(dict.fromkeys(range(begin, stop), -1))
        for word, turn in zip(words, torch.randperm(long_enough, generator=rng).tolist(), strict=False):
            found[turn][place] = word
    return [_with_frequent(one, rows.frequent, rng) for one in found]


def _with_frequent(dealt: Mapping[int, int], frequent: Sequence[int], rng: torch.Generator) -> Draft:
    """Return a draft with frequent words where no rare word was dealt."""
    drawn = torch.randint(max(len(frequent), 1), (len(dealt),), generator=rng).tolist()
    words = {
        place: word if word >= 0 else frequent[turn]
        for (place, word), turn in zip(dealt.items(), drawn, strict=True)
        if word >= 0 or frequent
    }
    return Draft(words, min(dealt), max(dealt) + 1)


def _rows_of(simulator: SentenceSimulator, laid: Laid, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the words' gradients (R, D), and which sentence each is of, (R,)."""
    plain = Laid(laid.tokens, laid.places, laid.mask)  # dropout is drawn, so known masks are left out
    all_labels = simulator.gradients(simulator.inputs(plain), plain).detach()
    label = torch.randint(len(all_labels), (all_labels.shape[1],), generator=rng)
    gradients = all_labels[label, torch.arange(all_labels.shape[1])]
    turn = torch.arange(laid.mask.shape[1], device=laid.mask.device)
    lengths = laid.mask.sum(dim=1, keepdim=True)
    is_word = (turn >= len(simulator.before)) & (turn < lengths - len(simulator.after))
    return gradients[is_word], is_word.nonzero()[:, 0].cpu()


def _learned(vectors: Tensor, sentences: Tensor, rng: torch.Generator) -> SameSentence:
    """Learn from rows (R, D) and the numbers (R,) of their sentences."""
    size, device = vectors.shape[1], vectors.device
    directions = (torch.randn(DIRECTIONS, size, generator=rng) / size**0.5).to(device).requires_grad_()
    odds = torch.tensor([START_SCALE, START_OFFSET], device=device, requires_grad=True)
    blocks = list(_blocks(sentences, rng))
    ascent = torch.optim.AdamW([directions, odds], lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(ascent, RATE, total_steps=len(blocks) + 1)
    with torch.enable_grad():
        for block in blocks:
            which = sentences[block].to(device)
            pairs = ~torch.eye(len(block), dtype=torch.bool, device=device)
            turned = _turned(vectors[block.to(device)], directions)
            logits = odds[0].exp() * (turned @ turned.T) + odds[1]
            same = (which[:, None] == which).float()
            loss = binary_cross_entropy_with_logits(logits[pairs], same[pairs])
            ascent.zero_grad()
            loss.backward()
            ascent.step()
            schedule.step()
    scale, offset = odds.detach().tolist()
    return SameSentence(directions.detach(), math.exp(scale), offset)


def _turned(rows: Tensor, directions: Tensor) -> Tensor:
    """Return (U, M) of unit length: rows (U, D) in directions (M, D)."""
    return normalize(normalize(rows, dim=1) @ directions.T, dim=1)


def _blocks(sentences: Tensor, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield the numbers of the rows of some sentences, for each step of learning."""
    order = sentences.argsort()
    starts = torch.searchsorted(sentences[order], torch.arange(int(sentences.max()) + 2)).tolist()
    for _ in range(EPOCHS):
        for some in torch.randperm(len(starts) - 1, generator=rng).split(TOGETHER):
            yield torch.cat([order[starts[one] : starts[one + 1]] for one in some.tolist()])


@contextmanager
def _dropout(simulator: SentenceSimulator, drawn: bool, seed: int) -> Iterator[None]:
    """Let the model draw dropout, and leave it as it was found."""
    modes = [(module, module.training) for module in simulator.model.modules()]
    devices = [simulator.device] if simulator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            simulator.model.train(drawn)
            yield
    finally:
        for module, mode in modes:
            module.training = mode
