"""The words behind similar ones, where the protocol replaces some words of a text.

The attacker read a changed text o, exactly or nearly. It knows the share p of the words that are replaced and the number K of most similar
words from which one is drawn (`leakaudit.client.facts.ReplacedWords`), and it has the public table of words. So it knows the chance of o_t
given the client's word w: 1 - p if w = o_t, p / K if o_t is among the K words that are most similar to w, else 0. It looks for the text
with the largest product of these chances and of the likelihood that a language model gives to the text (Bayes' rule; the same as decoding a
hidden Markov model, here by beam search because the language model looks back further). The update says nothing more: it is computed from
the changed text alone. Own derivation.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from leakaudit.client.facts import ReplacedWords
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.prior_protocol import Scorer

SHORTLIST = 200
"""Words, the most similar to a word that was read, that are tested as its origin. Our choice: in 60 texts of CoLA's train.jsonl every one of 163
replaced words was among them."""

BEAM = 16
"""Beginnings of a text that are kept while it grows. Our choice: with a model of three words, more change little."""

TRUST = 0.5
"""Weight of the language model's nats beside those of the replacement. Chosen on texts of CoLA's train.jsonl: with 1, a language model of
other texts changes more right words into wrong ones than back."""

CHUNK = 1 << 26
"""Most similarities that are held at once, 256 MB in float32. Our choice."""


def origins_of(
    table: Tensor, words: Sequence[int], kept: Sequence[int], nearest: int, shortlist: int = SHORTLIST
) -> dict[int, tuple[int, ...]]:
    """Return the words that may stand behind each word that was read.

    Args:
        table: (V, D) public word embedding, any dtype.
        words: ids that were read.
        kept: ids that are neither replaced nor taken.
        nearest: number K of most similar words (cosine) from which the client draws.
        shortlist: most words that are tested for each; less similar ones are left out.

    Returns:
        Word that was read -> ids w of which it is one of the K most similar words; the word itself is not among them.
    """
    unit = functional.normalize(table.detach().float(), dim=1)
    own = torch.tensor(sorted(set(words) - {*kept}), dtype=torch.long, device=unit.device)
    barred = torch.tensor(sorted(kept), dtype=torch.long, device=unit.device)
    if not len(own):
        return {}
    near = _most_similar(unit, own, barred, min(shortlist, len(unit) - len(barred) - 1))  # (N, shortlist)
    tested = near.unique()
    drawn = _most_similar(unit, tested, barred, min(nearest, len(unit) - len(barred) - 1))  # (tested, K)
    found: dict[int, list[int]] = {int(word): [] for word in own}
    for word, others in zip(tested.tolist(), drawn.tolist(), strict=True):
        for other in others:
            if other in found:
                found[other].append(word)
    return {word: tuple(others) for word, others in found.items()}


def _most_similar(unit: Tensor, rows: Tensor, barred: Tensor, count: int) -> Tensor:
    """Return (N, count) the most similar words of some rows, without themselves.

    Args:
        unit: (V, D) rows of length 1.
        rows: (N,) ids.
        barred: ids that are never taken.
        count: number of words for each.
    """
    found = []
    for some in rows.split(max(1, CHUNK // len(unit))):
        likeness = unit[some] @ unit.T  # (n, V)
        likeness[:, barred] = -torch.inf
        likeness[torch.arange(len(some), device=unit.device), some] = -torch.inf
        found.append(likeness.topk(count, dim=1).indices)
    return torch.cat(found)


class _Beginning(NamedTuple):
    """A beginning of a text; the smallest `nats` are the best."""

    nats: float
    words: tuple[int, ...]


def restored(
    read: Sequence[int],
    origins: Mapping[int, Sequence[int]],
    replaced: ReplacedWords,
    language: Scorer,
    *,
    trust: float = TRUST,
    beam: int = BEAM,
    budget: Budget | None = None,
) -> tuple[int, ...]:
    """Return the most probable text behind a text that was read.

    A word stays as it was read if the language model cannot say what comes next, and if the time is over.

    Args:
        read: ids of the text as it was read. Ids without an entry in `origins` stay.
        origins: as `origins_of` returns them.
        replaced: how the client replaces words.
        language: the language model.
        trust: weight of its nats.
        beam: number of beginnings that are kept.
        budget: time limit; None for no limit.

    Returns:
        As many ids as were read.
    """
    same, other = _nats(1 - replaced.share), _nats(replaced.share / replaced.nearest)
    kept = [_Beginning(0.0, ())]
    for word in read:
        choices = [(word, same), *((one, other) for one in origins.get(word, ()))]
        asked = word in origins and not (budget and budget.exhausted())
        following = language.next_token_nll([words for _, words in kept]) if asked else None
        if following is None:
            kept = [_Beginning(nats, (*words, word)) for nats, words in kept]
            continue
        costs = following[:, [one for one, _ in choices]].mul(trust).tolist()
        grown = (
            _Beginning(start.nats + cost + chance, (*start.words, one))
            for start, row in zip(kept, costs, strict=True)
            for cost, (one, chance) in zip(row, choices, strict=True)
        )
        kept = heapq.nsmallest(beam, grown)
    return kept[0].words


def _nats(chance: float) -> float:
    return -math.log(chance) if chance > 0 else math.inf
