"""Beam search for sentences over a bag of words.

Source: FILM (Gupta et al. 2022), Sec. 4.3 and Algorithm 1: the score of a text is log P - rho R_n, where R_n counts repeated n-grams. The published
code searches in groups of beams that avoid each other's tokens (Hamming diversity, Vijayakumar et al. 2016).

Letters: N texts, M tokens of the bag, G groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from leakaudit.algorithms.film.continuations import Continuations
from leakaudit.plugins.budget import Budget

Gram = tuple[int, ...]


@dataclass(frozen=True)
class Rules:
    """What a beam search may write, and how it is scored."""

    tokens: tuple[int, ...]
    """(M,) the bag."""
    starts: tuple[int, ...]
    """Tokens that begin a text."""
    ends: frozenset[int]
    """Tokens after which a text is over; empty if every text has `length` tokens."""
    length: int
    """L, most tokens of a text."""
    width: int
    """k, texts that are kept."""
    groups: int = 1
    """G groups of k / G texts each."""
    diversity: float = 0.0
    """Nats by which a token is worse for each text of an earlier group that has it at the same place."""
    apart: bool = False
    """Whether each start has a group of its own; `groups` then does not count. It keeps k / 4 texts, and fewer if the groups together would keep
    more than 4 k. Our choice: as many rows as a processor with two cores reads in a tenth of a second."""
    gram: int = 2
    """n of the n-grams that should not come twice; 0 for no penalty."""
    penalty: float = torch.inf
    """rho, nats for each n-gram that comes again in the same text."""
    said: Mapping[Gram, int] = field(default_factory=dict)
    """n-grams of texts that were found before, and how often."""
    said_penalty: float = 0.0
    """Nats for each n-gram that was found before."""
    most: Mapping[int, int] = field(default_factory=dict)
    """How often a token may come in a text, where this is known."""
    use: Mapping[int, float] = field(default_factory=dict)
    """Nats that the first use of a token in a text earns."""

    doubt: Mapping[int, float] = field(default_factory=dict)
    """Nats that every use of a token costs."""

    @cached_property
    def said_after(self) -> dict[Gram, dict[int, int]]:
        """The n-grams that were found before, by their first n - 1 tokens."""
        found: dict[Gram, dict[int, int]] = {}
        for gram, times in self.said.items():
            found.setdefault(gram[:-1], {})[gram[-1]] = times
        return found


@dataclass(frozen=True)
class Found:
    """A text that a beam search found."""

    token_ids: tuple[int, ...]
    score: float
    """log P minus penalties plus rewards, in nats."""
    group: int = 0
    """Number of its group."""

    @property
    def each(self) -> float:
        """The score in nats for each token."""
        return self.score / len(self.token_ids)


@dataclass
class _Beams:
    """The texts of one step: G lists of rows that grow."""

    texts: list[tuple[int, ...]]
    totals: Tensor
    """(N,) scores."""
    groups: dict[int, list[int]]
    """Number of a group -> its rows."""
    share: int
    """Texts that a group keeps."""

    def found(self, rows: Sequence[int]) -> list[Found]:
        """Return the texts of some rows."""
        of = {row: number for number, members in self.groups.items() for row in members}
        return [Found(self.texts[row], float(self.totals[row]), of[row]) for row in rows]


def beam_search(model: Continuations, rules: Rules, budget: Budget) -> list[Found]:
    """Return the texts of the last beams and those that ended before, the best first.

    Args:
        model: gives the log-probabilities of next tokens.
        rules: at least one start and one token.
        budget: checked between tokens.
    """
    beams = _first(rules)
    known = model.begin(beams.texts)  # (N, V)
    beams.totals = beams.totals.to(known)
    bag = torch.tensor(rules.tokens, device=known.device)
    over: list[Found] = []
    while len(beams.texts[0]) < rules.length and not budget.exhausted():
        grown = _grown(beams, known[:, bag] + _changes(beams.texts, rules).to(known), rules)
        if grown is None:
            break
        beams, rows = grown
        over += beams.found([row for row, text in enumerate(beams.texts) if text[-1] in rules.ends])
        beams, kept = _unfinished(beams, rules.ends)
        if not kept:
            return _ranked(over)
        if len(beams.texts[0]) < rules.length:
            last = torch.tensor([text[-1] for text in beams.texts], device=known.device)
            known = model.extend(rows[kept].to(known.device), last)
    return _ranked(over + beams.found(range(len(beams.texts))))


def grams_of(text: Sequence[int], size: int) -> Counter[Gram]:
    """Return the n-grams of a text, and how often each comes."""
    return Counter(tuple(text[at : at + size]) for at in range(len(text) - size + 1))


def _first(rules: Rules) -> _Beams:
    """Return the starts."""
    rows = range(len(rules.starts))
    totals = torch.tensor([rules.use.get(start, 0.0) - rules.doubt.get(start, 0.0) for start in rules.starts])
    if rules.apart:
        groups = {row: [row] for row in rows}
        share = max(1, min(rules.width // 4, 4 * rules.width // len(rules.starts)))
    else:
        groups = {number: list(rows) for number in range(rules.groups)}
        share = max(1, rules.width // rules.groups)
    return _Beams([(start,) for start in rules.starts], totals, groups, share)


def _ranked(found: Sequence[Found]) -> list[Found]:
    return sorted(found, key=lambda one: one.each, reverse=True)


def _changes(texts: Sequence[tuple[int, ...]], rules: Rules) -> Tensor:
    """Return (N, M) the nats that rewards add and penalties take from each next token."""
    column = {token: at for at, token in enumerate(rules.tokens)}
    doubts = torch.tensor([rules.doubt.get(token, 0.0) for token in rules.tokens])
    changed = -doubts.repeat(len(texts), 1)
    rewards = torch.tensor([rules.use.get(token, 0.0) for token in rules.tokens])
    for row, text in enumerate(texts):
        changed[row] += rewards
        used = Counter(text)
        for token, times in used.items():
            at = column.get(token)
            if at is not None:
                changed[row, at] -= rewards[at]
                if times >= rules.most.get(token, times + 1):
                    changed[row, at] = -torch.inf
        for token, nats in _repeats(text, rules).items():
            if token in column:
                changed[row, column[token]] -= nats
    return changed


def _repeats(text: tuple[int, ...], rules: Rules) -> dict[int, float]:
    """Return token -> nats that repeated n-grams take from it behind a text."""
    if not rules.gram or len(text) < rules.gram - 1:
        return {}
    last = text[len(text) - rules.gram + 1 :]
    found: dict[int, float] = {}
    for gram in grams_of(text, rules.gram):
        if gram[:-1] == last:
            found[gram[-1]] = rules.penalty  # once, because each repeat adds one to R_n, however many came before
    if rules.said_penalty:
        for token, times in rules.said_after.get(last, {}).items():
            found[token] = found.get(token, 0.0) + times * rules.said_penalty
    return found


def _grown(beams: _Beams, scores: Tensor, rules: Rules) -> tuple[_Beams, Tensor] | None:
    """Return the beams with one more token, and the (N,) rows they grew from.

    None if no token may follow.

    Args:
        beams: the texts.
        scores: (N, M) nats of each next token.
        rules: width, groups and diversity.
    """
    total = beams.totals[:, None] + scores  # (N, M)
    taken = torch.zeros(len(rules.tokens), device=scores.device)  # by earlier groups at this place
    texts: list[tuple[int, ...]] = []
    rows: list[int] = []
    totals: list[Tensor] = []
    groups: dict[int, list[int]] = {}
    for number, members in beams.groups.items():
        own = total[members]  # (rows of the group, M)
        best = (own - rules.diversity * taken).flatten().topk(min(beams.share, own.numel())).indices
        best = best[own.flatten()[best].isfinite()]
        tokens = best % len(rules.tokens)
        groups[number] = list(range(len(texts), len(texts) + len(best)))
        for at, token in zip((best // len(rules.tokens)).tolist(), tokens.tolist(), strict=True):
            rows.append(members[at])
            texts.append((*beams.texts[members[at]], rules.tokens[token]))
        totals.append(own.flatten()[best])
        taken.index_add_(0, tokens, torch.ones_like(taken[tokens]))
    if not texts:
        return None
    return _Beams(texts, torch.cat(totals), groups, beams.share), torch.tensor(rows)


def _unfinished(beams: _Beams, ends: frozenset[int]) -> tuple[_Beams, list[int]]:
    """Return the beams without the texts that are over, and the rows that stay."""
    kept = [row for row, text in enumerate(beams.texts) if text[-1] not in ends]
    place = {row: at for at, row in enumerate(kept)}
    groups = {number: [place[row] for row in rows if row in place] for number, rows in beams.groups.items()}
    groups = {number: rows for number, rows in groups.items() if rows}
    return _Beams([beams.texts[row] for row in kept], beams.totals[kept], groups, beams.share), kept
