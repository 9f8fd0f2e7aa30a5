"""Frequent words in drafts that hold rare words only, for steps with dropout.

A frequent word's row is a sum over several sentences, so it is like the rows of each of them (`same_sentence`). The groups that it is most
like are tried: the word stands at each open place in turn, and stays where the rare rows agree best. (Own derivation.)

Letters: F frequent words, G groups, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakaudit.algorithms.rare_rows.grouping import Group, Grouping
from leakaudit.algorithms.rare_rows.sentences import Draft
from leakaudit.plugins.budget import Budget

TRIED = 8
"""Groups that are tried for a word. Chosen on training texts: the best two hold it for half of the words."""

LEAST = 0.4
"""Smallest sum of the gain of the agreement and the cosine of the rows at which a word is inserted.
Chosen on training texts: three of five inserted words are then in the sentence, one of four at its place."""


@dataclass(frozen=True)
class _Trial:
    """A frequent word at a place of a group's draft."""

    group: Group
    place: int
    word: int
    alike: float
    """Cosine of the word's row with the mean of the group's rows, in the learned directions."""


def with_frequent_words(groups: Sequence[Group], grouping: Grouping, budget: Budget) -> dict[Group, Draft]:
    """Return the groups' drafts with the frequent words that make them agree better.

    Args:
        groups: simulated ones.
        grouping: of the rare words.
        budget: if it is used up, nothing is inserted.
    """
    drafts = {group: _closed(grouping.draft(group)) for group in groups}
    trials = _trials(drafts, grouping)
    scores: list[float] = []
    for start in range(0, len(trials), 1_000):
        if budget.exhausted():
            return drafts
        part = trials[start : start + 1_000]
        tried = [grouping.draft(one.group).with_word(one.place, one.word) for one in part]
        scores += grouping.agreement.scores(tried).tolist()
    ranked = sorted(
        (
            (score - grouping.known[one.group] + one.alike, turn)
            for turn, (one, score) in enumerate(zip(trials, scores, strict=True))
        ),
        reverse=True,
    )
    inserted: set[tuple[Group, int]] = set()
    for score, turn in ranked:
        one = trials[turn]
        if score < LEAST:
            break
        if (one.group, one.word) not in inserted and one.place not in drafts[one.group].words:
            inserted.add((one.group, one.word))
            drafts[one.group] = _closed(drafts[one.group].with_word(one.place, one.word))
    return drafts


def _closed(draft: Draft) -> Draft:
    """Return the draft with its end after its last word."""
    return replace(draft, end=max(draft.words) + 1)


def _trials(drafts: Mapping[Group, Draft], grouping: Grouping) -> list[_Trial]:
    """Return every frequent word at the open places of the groups it is most like."""
    rows, groups = grouping.agreement.rows, list(drafts)
    if not rows.frequent or not groups:
        return []
    turned = {
        word: vector
        for word, vector in zip(rows.rare, grouping.alike.turned(_table(rows.sums, rows.rare)), strict=True)
    }
    means = torch.stack([torch.stack([turned[word] for word in group]).mean(dim=0) for group in groups])  # (G, M)
    words = grouping.alike.turned(_table(rows.sums, rows.frequent))  # (F, M)
    alike = torch.nn.functional.cosine_similarity(words[:, None], means[None], dim=2)  # (F, G)
    values, best = alike.topk(min(TRIED, len(groups)), dim=1)
    return [
        _Trial(groups[turn], place, word, value)
        for word, turns, cosines in zip(rows.frequent, best.tolist(), values.tolist(), strict=True)
        for turn, value in zip(turns, cosines, strict=True)
        for place in range(drafts[groups[turn]].begin, min(drafts[groups[turn]].end + 1, grouping.end))
        if place not in drafts[groups[turn]].words
    ]


def _table(sums: Mapping[int, Tensor], words: Sequence[int]) -> Tensor:
    return torch.stack([sums[word] for word in words])
