"""Reordering of a sentence's phrases and tokens by a score.

Source: FILM (Gupta et al. 2022), Sec. 4.4: text after the first punctuation is cut if the score falls; then phrases between random cuts are
permuted; then tokens are swapped, deleted and inserted from the bag. Each step takes the best of its candidates if it is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from leakaudit.plugins.budget import Budget

Text = tuple[int, ...]
Score = Callable[[Sequence[Text]], list[float]]
"""Scores of texts; less is better."""


@dataclass(frozen=True)
class Reordering:
    """How long a sentence is reordered."""

    phrase_steps: int
    token_steps: int
    candidates: int
    """Candidates of each step."""
    patience: int
    """A stage ends after this many steps without a better text; 0 for never."""
    cuts: tuple[int, int] = (3, 5)
    """Least and most cuts of a sentence into phrases."""


@dataclass(frozen=True)
class Reordered:
    """A text with its score."""

    token_ids: Text
    score: float
    steps: int
    """Steps that were taken."""


def cut_at_stop(text: Text, ends: frozenset[int], score: Score) -> Text:
    """Return the text up to its first full stop, if that scores better."""
    at = next((place for place, token in enumerate(text) if token in ends), len(text) - 1)
    if at + 1 >= len(text) or at == 0:
        return text
    whole, part = score([text, text[: at + 1]])
    return text[: at + 1] if part < whole else text


def reordered(
    text: Text, bag: Sequence[int], how: Reordering, score: Score, rng: torch.Generator, budget: Budget
) -> Reordered:
    """Return the best text that reordering reaches.

    Args:
        text: what the beam search found.
        bag: tokens to insert.
        how: steps and candidates.
        score: of candidates.
        rng: source of all random numbers.
        budget: checked between steps.
    """
    best = Reordered(text, score([text])[0], 0)
    for steps, make in (
        (how.phrase_steps, lambda one: _phrases(one, how.cuts, rng)),
        (how.token_steps, lambda one: _tokens(one, bag, rng)),
    ):
        best = _climb(best, steps, how, make, score, budget)
    return best


def _climb(
    best: Reordered, steps: int, how: Reordering, make: Callable[[Text], Text], score: Score, budget: Budget
) -> Reordered:
    """Take the best candidate of each step while it is better."""
    idle = taken = 0
    for _ in range(steps):
        if budget.exhausted() or (how.patience and idle >= how.patience):
            break
        made = dict.fromkeys(make(best.token_ids) for _ in range(how.candidates))
        new = [text for text in made if text and text != best.token_ids]
        taken += 1
        idle += 1
        if new:
            scores = score(new)
            least = min(range(len(new)), key=scores.__getitem__)
            if scores[least] < best.score:
                best, idle = Reordered(new[least], scores[least], best.steps), 0
    return Reordered(best.token_ids, best.score, best.steps + taken)


def _phrases(text: Text, cuts: tuple[int, int], rng: torch.Generator) -> Text:
    """Return the text with the phrases between random cuts in random order."""
    if len(text) < 3:
        return text
    number = min(len(text) - 1, _draw(cuts[1] - cuts[0] + 1, rng) + cuts[0])
    at = sorted((torch.randperm(len(text) - 1, generator=rng)[:number] + 1).tolist())
    parts = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    return tuple(token for place in torch.randperm(len(parts), generator=rng).tolist() for token in parts[place])


def _tokens(text: Text, bag: Sequence[int], rng: torch.Generator) -> Text:
    """Return the text with two tokens swapped, one deleted or one inserted."""
    kind, tokens = _draw(3, rng), list(text)
    if kind == 0:
        one, other = _draw(len(text), rng), _draw(len(text), rng)
        tokens[one], tokens[other] = tokens[other], tokens[one]
    elif kind == 1 and len(text) > 1:
        del tokens[_draw(len(text), rng)]
    elif kind == 2:
        tokens.insert(_draw(len(text) + 1, rng), bag[_draw(len(bag), rng)])
    return tuple(tokens)


def _draw(size: int, rng: torch.Generator) -> int:
    return int(torch.randint(size, (1,), generator=rng))
