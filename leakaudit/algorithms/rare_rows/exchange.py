"""Exchange of single words of drafts while the rows agree better.

The words to try at a place are ranked by the agreement's own derivative (HotFlip, Ebrahimi et al. 2018, Sec. 3): v_w . dF/du at the place.

Letters: N drafts, T places, C candidate words, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
from torch import Tensor

from leakaudit.algorithms.rare_rows.agreement import Agreement
from leakaudit.algorithms.rare_rows.filling import Candidates
from leakaudit.algorithms.rare_rows.sentences import Draft, Laid
from leakaudit.plugins.budget import Budget

TRIED = 6
"""Words that are tried at a place in one round. Chosen on training sentences; see docs/decisions/rare_rows.md."""

ROUNDS = 10
"""Most rounds for one draft. Chosen on training sentences: those that become exact need 2 to 6."""

SETTLED, SETTLED_SHARE = 1.0, 0.4
"""Smallest agreement at which a rare word is not exchanged, and smallest share of the draft's best agreement.
Chosen on training sentences: a word of another sentence seldom reaches 0.7."""

WIDE_PART = 150
"""Neighbours that are simulated together in a wide round. Our choice: one pass of a second or two."""

NEARLY = 1.5
"""Smallest mean agreement of a draft's rare rows at which all words are tried at all places.
Chosen on training sentences: drafts with one to four wrong words reach 1.8 or more, wrong drafts 1.0."""


@dataclass
class Exchanged:
    """A draft on its way to agreement."""

    draft: Draft
    choices: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Place -> words to try there in every round."""
    agreement: float = -1.0
    exact: bool = False
    """Whether one of its rows agrees exactly."""
    settled: frozenset[int] = frozenset()
    """Places of rare words that agree well, which are not exchanged."""
    wide: bool = False
    """Whether the next round tries all words at all places, and swaps."""
    stuck: bool = False

    @property
    def done(self) -> bool:
        """Return whether nothing is left to try."""
        return self.stuck or self.exact


def exchange(begun: Sequence[Exchanged], agreement: Agreement, candidates: Candidates, budget: Budget) -> None:
    """Improve drafts without holes, in place, until no exchange helps.

    Args:
        begun: drafts and words to try.
        agreement: the rows to agree with.
        candidates: all words of the batch.
        budget: the exchanges end when it is used up.
    """
    for one, score, exact in zip(begun, *_judged(agreement, [one.draft for one in begun]), strict=True):
        one.agreement, one.exact = score, exact
    for _ in range(ROUNDS):
        moving = [one for one in begun if not one.done]
        if not moving or budget.exhausted():
            return
        _narrow_round([one for one in moving if not one.wide], agreement, candidates)
        for one in moving:
            if one.wide and not one.done and not budget.exhausted():
                _wide_round(one, agreement, candidates)


def _judged(agreement: Agreement, drafts: Sequence[Draft]) -> tuple[list[float], list[bool]]:
    scores, exact = agreement.judge(drafts)
    return scores.tolist(), exact.tolist()


def _narrow_round(moving: Sequence[Exchanged], agreement: Agreement, candidates: Candidates) -> None:
    """Try likely neighbours of each draft; take the best, or all that help."""
    if not moving:
        return
    ranked = _ranked(moving, agreement, candidates)
    neighbours = [_neighbours(one, words) for one, words in zip(moving, ranked, strict=True)]
    scores = agreement.scores([draft for drafts in neighbours for draft in drafts]).split([len(d) for d in neighbours])
    best = [drafts[int(values.argmax())] for drafts, values in zip(neighbours, scores, strict=True)]
    mixed = [_combined(one, *pair) for one, pair in zip(moving, zip(neighbours, scores, strict=True), strict=True)]
    judged = list(zip(best + mixed, *_judged(agreement, best + mixed), strict=True))
    for one, first, second in zip(moving, judged[: len(best)], judged[len(best) :], strict=True):
        better = _take(one, max(first, second, key=lambda found: found[1]))
        hopeless = one.agreement < NEARLY * agreement.rare_words(one.draft)
        one.stuck, one.wide = not better and hopeless, not better


def _wide_round(one: Exchanged, agreement: Agreement, candidates: Candidates) -> None:
    """Try all neighbours in parts; take the best of the first part that helps."""
    drafts = _wide(one.draft, one.settled, candidates)
    for start in range(0, len(drafts), WIDE_PART):
        part = drafts[start : start + WIDE_PART]
        scores, exact = _judged(agreement, part)
        best = max(range(len(part)), key=scores.__getitem__)
        if _take(one, (part[best], scores[best], exact[best])):
            one.wide = False
            return
    one.stuck = True


def _take(one: Exchanged, found: tuple[Draft, float, bool]) -> bool:
    """Take a draft if it agrees better, and return whether it does."""
    draft, score, exact = found
    if score <= one.agreement + 1e-4:
        return False
    one.draft, one.agreement, one.exact = draft, score, exact
    return True


def _combined(one: Exchanged, drafts: Sequence[Draft], values: Tensor) -> Draft:
    """Return the draft with the best improving word at every place at once."""
    mixed, changed = one.draft, set[int]()
    for index in values.argsort(descending=True).tolist():
        if float(values[index]) <= one.agreement or drafts[index].end != one.draft.end:
            continue
        places = {place for place, word in drafts[index].words.items() if one.draft.words[place] != word}
        if not places & changed:
            changed |= places
            mixed = replace(mixed, words={**mixed.words, **{place: drafts[index].words[place] for place in places}})
    return mixed


def _neighbours(one: Exchanged, ranked: Sequence[tuple[int, int]]) -> list[Draft]:
    """Return drafts that differ in one word, or end one word earlier or later."""
    draft = one.draft
    chosen = [(place, word) for place, words in one.choices.items() for word in words if place < draft.end]
    pairs = dict.fromkeys((place, word) for place, word in [*chosen, *ranked] if draft.words[place] != word)
    found = [draft.with_word(place, word) for place, word in pairs]
    last = draft.end - 1
    if last > draft.begin:
        found.append(Draft({p: w for p, w in draft.words.items() if p != last}, draft.begin, last))
        moved = {**draft.words, last - 1: draft.words[last]}  # the closing mark stays
        del moved[last]
        found.append(Draft(moved, draft.begin, last))
    found.append(Draft({**draft.words, draft.end: draft.words[last]}, draft.begin, draft.end + 1))
    return found


def _wide(draft: Draft, settled: frozenset[int], candidates: Candidates) -> list[Draft]:
    """Return all drafts with one other word, one more or less, or two exchanged."""
    last_rare = max(
        (place for place, word in draft.words.items() if not candidates.anywhere(word)), default=draft.begin - 1
    )
    longer = [_opened(draft, place) for place in range(last_rare + 1, draft.end + 1)]
    shorter = [_closed(draft, place) for place in range(last_rare + 1, draft.end) if draft.end - draft.begin > 1]
    anywhere = [
        draft.with_word(place, word) for place in draft.words if place not in settled for word in candidates.at(place)
    ]
    grown = [opened.with_word(place, word) for place, opened in longer for word in candidates.at(place)]
    return shorter + _swapped(draft, candidates) + grown + anywhere


def _opened(draft: Draft, place: int) -> tuple[int, Draft]:
    """Return a place and the draft whose words from there on stand one place later."""
    return place, Draft({p + (p >= place): word for p, word in draft.words.items()}, draft.begin, draft.end + 1)


def _closed(draft: Draft, place: int) -> Draft:
    """Return the draft without a place's word; later words move forward."""
    words = {p - (p > place): word for p, word in draft.words.items() if p != place}
    return Draft(words, draft.begin, draft.end - 1)


def _swapped(draft: Draft, candidates: Candidates) -> list[Draft]:
    free = [place for place in draft.words if candidates.anywhere(draft.words[place])]
    return [
        replace(draft, words={**draft.words, one: draft.words[other], other: draft.words[one]})
        for one, other in combinations(free, 2)
        if draft.words[one] != draft.words[other]
    ]


def _ranked(moving: Sequence[Exchanged], agreement: Agreement, candidates: Candidates) -> list[list[tuple[int, int]]]:
    """Return for each draft pairs of place and word with the largest derivatives."""
    found: list[list[tuple[int, int]]] = [[] for _ in moving]
    vectors = agreement.simulator.token_vectors[candidates.words]
    for chunk, laid in agreement.simulator.chunks([one.draft for one in moving]):
        slopes, reached = _slopes(agreement, laid, agreement.row_numbers(laid))
        for row, index in enumerate(chunk):
            moving[index].settled = _settled(moving[index].draft, reached[row])
            pairs = _best_pairs(moving[index].draft, slopes[row], vectors, candidates)
            found[index] = [(place, word) for place, word in pairs if place not in moving[index].settled]
    return found


def _settled(draft: Draft, agreements: Tensor) -> frozenset[int]:
    """Return the places of rare words that agree well, from agreements (T,)."""
    rare = [place for place in draft.words if float(agreements[place]) > 0.0]
    limit = max(SETTLED, SETTLED_SHARE * max((float(agreements[place]) for place in rare), default=0.0))
    return frozenset(place for place in rare if float(agreements[place]) >= limit)


def _best_pairs(draft: Draft, slopes: Tensor, vectors: Tensor, candidates: Candidates) -> list[tuple[int, int]]:
    places = torch.arange(draft.begin, draft.end, device=slopes.device)
    gains = slopes[draft.begin : draft.end] @ vectors.T  # (T, C)
    now = torch.tensor([draft.words[place] for place in places.tolist()], device=slopes.device)
    same = candidates.words[None] == now[:, None]
    own = (gains * same).sum(1, keepdim=True)
    gains = (gains - own).masked_fill(same | ~candidates.allowed(places), -torch.inf)
    values, best = gains.topk(min(TRIED, gains.shape[1]), dim=1)
    words = candidates.words.tolist()
    return [
        (place, words[index])
        for place, row, gain in zip(places.tolist(), best.tolist(), values.tolist(), strict=True)
        for index, value in zip(row, gain, strict=True)
        if value > float("-inf")
    ]


def _slopes(agreement: Agreement, laid: Laid, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the agreement's derivatives by the inputs (N, T, D), and it (N, T)."""
    simulator = agreement.simulator
    inputs = simulator.inputs(laid).requires_grad_()
    with torch.enable_grad():
        gradients = simulator.gradients(inputs, laid, differentiable=True)
        reached = agreement.of_places(gradients, numbers)
        (slopes,) = torch.autograd.grad(reached.sum(), inputs)
    return slopes.detach(), reached.detach()
