"""Drafts of sentences under dropout, where no draft agrees exactly.

Masks of later layers are unknown, so a right sentence agrees only in part, and groups of rare words hold words of other sentences. Every
rare word is therefore tried in every draft, and at each place the words are assigned to the drafts so that the sum of gains is largest
(`scipy.optimize.linear_sum_assignment`). Holes are filled again after that. (Own derivation.)

Letters: S drafts, W rare words of one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from leakaudit.algorithms.rare_rows.agreement import Agreement
from leakaudit.algorithms.rare_rows.filling import Candidates, Filled, fill
from leakaudit.algorithms.rare_rows.sentences import Draft
from leakaudit.plugins.budget import Budget

TURNS = 3
"""Times that all words are assigned. Chosen on training sentences; see docs/decisions/rare_rows.md."""

LEAST_GAIN = 0.03
"""Smallest gain at which a word joins a draft. Our choice: words of other sentences gain 0.02 in the mean."""

BEYOND = 2
"""Places after the end of a draft at which words are tried. Our choice: a sentence seldom ends with more frequent words."""

STEPS = 20
"""Steps of a filling. Chosen on training sentences."""

AT_ONCE = 32
"""Drafts that are filled together. Our choice: they take less than 1 GB."""


def assigned_sentences(drafts: Sequence[Draft], agreement: Agreement, budget: Budget) -> list[Filled]:
    """Return drafts with assigned rare words and filled holes, the best first.

    Args:
        drafts: rare words alone, with the ends of the sentences.
        agreement: the rows of all rare words.
        budget: the turns end when it is used up.
    """
    candidates = Candidates.of(agreement)
    filled = _filled(drafts, agreement, candidates)
    for _ in range(TURNS):
        if budget.exhausted():
            break
        filled = _filled(_assigned([one.draft for one in filled], agreement, budget), agreement, candidates)
    return sorted(filled, key=lambda one: one.agreement, reverse=True)


def _filled(drafts: Sequence[Draft], agreement: Agreement, candidates: Candidates) -> list[Filled]:
    found: list[Filled] = []
    for start in range(0, len(drafts), AT_ONCE):
        found += fill(drafts[start : start + AT_ONCE], agreement, candidates, STEPS)
    return found


def _assigned(drafts: Sequence[Draft], agreement: Agreement, budget: Budget) -> list[Draft]:
    """Return the drafts with the rare words assigned to them, and no others."""
    words: list[dict[int, int]] = [{} for _ in drafts]
    for place, rare in _by_place(agreement):
        if budget.exhausted():
            return list(drafts)
        gains = _gains(drafts, place, rare, agreement)
        for row, column in zip(*linear_sum_assignment(np.maximum(gains, 0.0), maximize=True), strict=True):
            if gains[row, column] >= LEAST_GAIN:
                words[row][place] = rare[column]
    return [
        Draft(known, draft.begin, max(draft.end, max(known) + 1))
        for draft, known in zip(drafts, words, strict=True)
        if known
    ]


def _by_place(agreement: Agreement) -> Iterator[tuple[int, list[int]]]:
    places = agreement.rows.places
    for place in sorted(set(places.values())):
        yield place, [word for word in agreement.rows.rare if places[word] == place]


def _gains(drafts: Sequence[Draft], place: int, rare: Sequence[int], agreement: Agreement) -> np.ndarray:
    """Return (S, W) float64: gains of words in drafts; -1 far after an end."""
    near = [index for index, draft in enumerate(drafts) if place < draft.end + BEYOND]
    without = [_without(drafts[index], place) for index in near]
    tried = [_with(draft, place, word) for draft in without for word in rare]
    scores = agreement.scores([*without, *tried])
    base, values = scores[: len(without)], scores[len(without) :].view(len(near), len(rare))
    gains = torch.full((len(drafts), len(rare)), -1.0)
    gains[near] = values - base[:, None]
    return gains.double().numpy()


def _without(draft: Draft, place: int) -> Draft:
    return Draft({p: word for p, word in draft.words.items() if p != place}, draft.begin, draft.end)


def _with(draft: Draft, place: int, word: int) -> Draft:
    return Draft({**draft.words, place: word}, draft.begin, max(draft.end, place + 1))
