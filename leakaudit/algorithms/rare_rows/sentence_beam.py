"""Sentences of a batch, grown token by token along the head's rows.

The head's rows and the update of the attention's output layers (`update_pull`) propose the next tokens of each beginning; simulated rows judge the longer
beginnings (`sentence_scores`).

Letters: n beginnings, M rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.rare_rows.sentence_choice import (
    LATE_RIVALS,
    RIVALS,
    TIED,
    UNTIED,
    Item,
    TakenStates,
    best_of,
    without_rivals,
)
from leakaudit.algorithms.rare_rows.sentence_scores import Scored, SentenceScores
from leakaudit.plugins.budget import Budget

SECOND = 24
"""Second tokens that the first one's state proposes. Our choice: no other row has confirmed the first."""

OFTEN, MOST_OFTEN = 5.0, 12
"""From how many states in its row on, and how many, frequent tokens are always proposed where rows alone propose. Their rows say little, and most sentences end
with one."""

STARTS_KEPT, STARTS_SIMULATED = 20, 30
"""Most beginnings of two tokens with the same first one that are kept, and simulated. Our choice."""

TEMPER = 40.0
"""By what the evidence of simulated rows is divided beside that of the next token. Chosen on training texts: beginnings of the same sentence
differ by hundreds of nats before their ends are known; the first round finds 23 sentences with it, and 21 with 15."""

TOLD, TOLD_TIED = 0.03, 0.1
"""Weights of the head's rows in a next token's log-odds beside `PULL`, for tables that are not tied and tied. Fitted to training texts at B = 64."""

PULL = 1.5
"""Log-odds in nats of a next token for each standard deviation of the update's pull. Fitted to training texts, both heads, B = 64."""

MOST_HIT = 300.0
"""Most evidence of a next token that counts for its beginning. Our choice."""

LEAST = -300.0
"""Evidence in nats below which a beginning is given up. Our choice."""

FALLEN, PATIENCE = 400.0, 4
"""How far a beginning may fall below its best, and for how many tokens it may not rise. Chosen on training texts."""

SLOPE = 15.0
"""Least evidence in nats that a beginning of more than four tokens must have had, for each of its tokens. Our choice: most right beginnings
have more."""


@dataclass(frozen=True)
class _Beginning:
    scored: Scored
    mother: int
    """Number of the beginning that it continues, among those that were kept."""
    best: float
    """Largest evidence of it or of a part of it."""
    age: int = 0
    """Tokens since then."""


def grow_sentences(
    scores: SentenceScores,
    starts: Sequence[tuple[int, ...]],
    longest: int,
    budget: Budget,
    wider: int = 1,
) -> list[Scored]:
    """Return all beginnings that were simulated, the found sentences first.

    Those that agree best come first, and what was not found follows by its evidence.

    Args:
        scores: the rows.
        starts: beginnings, which differ in their last token.
        longest: largest number of tokens of a sentence.
        budget: when it is used up, the beginnings end where they are.
        wider: how many times as many beginnings as usual are kept and simulated.
    """
    if not starts or not len(scores.rows.tokens):
        return []
    begin = len(starts[0])
    live = [_Beginning(one, number, one.evidence) for number, one in enumerate(scores.score(starts))]
    seen: list[Scored] = []
    taken, widths = TakenStates(scores), TIED if scores.rest.tables.tied else UNTIED
    for length in range(begin + 1, longest + 1):
        if not live or budget.exhausted():
            break
        first = length == begin + 1
        group = begin if first else begin + 1
        most = widths.first_simulated if length < begin + 3 else widths.simulated
        alike = STARTS_SIMULATED if first else widths.simulated_alike
        proposals = _proposed(scores, live, SECOND if first else widths.near, first)
        proposed = best_of(proposals, most * wider, alike, group)
        scored = scores.score([(*live[mother].scored.tokens, token) for mother, token in proposed])
        seen += scored
        for one in sorted(scored, key=lambda each: each.left):
            if one.found:
                taken.add(one)
        older = [_older(live[mother], mother, one) for (mother, _), one in zip(proposed, scored, strict=True)]
        going = ((one.scored.evidence, one.scored.tokens, one) for one in older if _goes_on(one, length - begin))
        left: Iterator[Item[_Beginning]] = (item for item in going if taken.leave(item[1]))
        if not first:
            left = without_rivals(scores, left, group, LATE_RIVALS if length > begin + 3 else RIVALS)
        live = best_of(left, widths.kept * wider, STARTS_KEPT if first else widths.kept_alike, group)
    return sorted(seen, key=lambda one: (one.left, -one.evidence))


def _proposed(
    scores: SentenceScores, live: Sequence[_Beginning], near: int, first: bool
) -> Iterator[Item[tuple[int, int]]]:
    """Yield numbers of beginnings and their next tokens, with how likely they are.

    Args:
        scores: the rows.
        live: the beginnings.
        near: next tokens that each state proposes.
        first: whether the beginnings have no evidence yet.
    """
    rows = scores.rows
    states = torch.stack([one.scored.state for one in live])
    told, prior = rows.evidence(states @ scores.rest.map), rows.prior(states)  # (n, M)
    odds = told + prior
    hit = odds.amax(dim=1).clamp(0.0, MOST_HIT)
    base = (torch.tensor([one.scored.evidence for one in live], device=hit.device) + hit) / TEMPER
    if scores.rest.pull.known:
        odds = (TOLD_TIED if scores.rest.tables.tied else TOLD) * told + prior + PULL * _pulled(scores, live, first)
    chosen = odds.topk(min(odds.shape[1], near), dim=1).indices.tolist()
    ranked = rows.counts.argsort(descending=True)[:MOST_OFTEN]
    often = [] if scores.rest.pull.known else ranked[rows.counts[ranked] >= OFTEN].tolist()
    likely = odds if first else odds - odds.logsumexp(dim=1, keepdim=True) + base[:, None]
    values, tokens = likely.tolist(), rows.tokens.tolist()
    for number, one in enumerate(live):
        for row in dict.fromkeys(chosen[number] + often):
            yield values[number][row], (*one.scored.tokens, tokens[row]), (number, tokens[row])


def _pulled(scores: SentenceScores, live: Sequence[_Beginning], first: bool) -> Tensor:
    """Return (n, M) how much the update pulls at next tokens."""
    pull, tokens = scores.rest.pull, scores.rows.tokens
    paths = torch.tensor([one.scored.tokens for one in live], device=tokens.device)
    if first:
        return pull.start(paths, tokens)
    mothers = torch.tensor([one.mother for one in live], device=tokens.device)
    return pull.extend(mothers, paths[:, -1], tokens)


def _older(mother: _Beginning, number: int, one: Scored) -> _Beginning:
    if one.evidence > mother.best:
        return _Beginning(one, number, one.evidence)
    return _Beginning(one, number, mother.best, mother.age + 1)


def _goes_on(one: _Beginning, tokens: int) -> bool:
    """Return whether a beginning is worth continuing.

    Args:
        one: the beginning.
        tokens: its tokens behind what stands before every text.
    """
    if one.scored.evidence < LEAST:
        return False
    if tokens <= 3:
        return True
    return one.scored.evidence > one.best - FALLEN and one.age <= PATIENCE and one.best > SLOPE * (tokens + 1)
