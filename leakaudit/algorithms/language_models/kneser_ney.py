"""N-gram models with interpolated modified Kneser-Ney smoothing, in numpy.

Source: Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling", Harvard TR-10-98, 1998, Sec. 3
(interpolated form; three discounts for each order from its counts of counts). As usual, n-grams at the beginning of a sentence
keep their raw counts at every order, because they have no left context to count. The lowest order is
interpolated with the uniform distribution over V tokens and the end of the sentence.

Letters: N order of the model, M tokens of text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Numbers = NDArray[np.float64]

BASE = 1 << 22
"""Larger than every vocabulary. The key of an n-gram is (number of its first n - 1 tokens among the shorter n-grams) * BASE + (last
token)."""
START, END = BASE - 1, BASE - 2
"""Tokens of our own before and after every sentence. The model predicts an end, but never a start."""


@dataclass(frozen=True)
class NgramOrder:
    """The n-grams of one length, and the tokens that follow them."""

    keys: Ids
    """Sorted keys. The number of an n-gram is the index of its key."""
    counts: Ids
    """Kneser-Ney counts. For the longest n-grams: how often each occurs. For shorter ones: after how many different tokens each occurs."""
    shorter: int
    """Number of n-grams one token shorter."""

    def find(self, beginnings: Ids, tokens: Ids) -> Ids:
        """Return the numbers of n-grams, given their beginnings and last tokens.

        The number of an n-gram that never occurred is -1.

        Args:
            beginnings: numbers of the n-grams without their last tokens.
            tokens: the last tokens.
        """
        wanted = beginnings * BASE + tokens
        at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where((beginnings >= 0) & (self.keys[at] == wanted), at, -1)

    @cached_property
    def discounts(self) -> Numbers:
        """Return (4,) the discounts of counts 0, 1, 2, and 3 or more.

        D(i) = i - (i + 1) Y n_(i+1) / n_i with Y = n_1 / (n_1 + 2 n_2). In a small text, or one of a single pattern, the counts of
        counts may give no value between 0 and i. The discount is then i / 2, our choice, so that seen and unseen n-grams both keep some
        probability.
        """
        n1, n2, n3, n4 = (int((self.counts == i).sum()) for i in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2) if n1 else 0.0
        found = [i - (i + 1) * y * above / n if n else 0.0 for i, n, above in ((1, n1, n2), (2, n2, n3), (3, n3, n4))]
        return np.array([0.0, *(d if 0 < d < i else i / 2 for i, d in enumerate(found, start=1))])

    @cached_property
    def taken(self) -> Numbers:
        """Return the discount of every n-gram."""
        return self.discounts[np.minimum(self.counts, 3)]

    @cached_property
    def after(self) -> tuple[Numbers, Numbers]:
        """Return the total count after each beginning, and the order below's share.

        The share is the probability that the discounts leave to the shorter n-grams. Both have one entry for every beginning.
        """
        beginnings = self.keys // BASE
        total: Numbers = np.bincount(beginnings, self.counts, self.shorter).astype(np.float64)
        freed: Numbers = np.bincount(beginnings, self.taken, self.shorter).astype(np.float64)
        return total, np.divide(freed, total, out=np.ones_like(freed), where=total > 0)


@dataclass(frozen=True)
class KneserNey:
    """An n-gram model."""

    orders: tuple[NgramOrder, ...]
    """Of 1, 2, ..., N tokens."""
    size: int
    """V."""

    @classmethod
    def count(cls, sentences: Sequence[Sequence[int]], order: int, size: int) -> KneserNey:
        """Count a text.

        Args:
            sentences: token ids without start or end; at least one sentence is not empty.
            order: N, at least 1.
            size: V.
        """
        ids, sentence = _flat(sentences)
        beginnings = np.zeros(len(ids), dtype=np.int64)
        found: list[tuple[Ids, Ids, Ids]] = []  # keys, raw counts, and the place at which each n-gram first occurs
        numbers: list[Ids] = []  # of the n-gram at each place; -1 if it would cross the end of its sentence
        for n in range(1, order + 1):
            places = _inside(sentence, n) & (beginnings >= 0)
            last = np.zeros_like(ids)
            last[: len(ids) - n + 1] = ids[n - 1 :]
            where = places.nonzero()[0]
            if not len(where):
                break
            keys, first, number, raw = np.unique(
                beginnings[where] * BASE + last[where], return_index=True, return_inverse=True, return_counts=True
            )
            found.append((keys, raw, where[first]))
            beginnings = np.full(len(ids), -1)
            beginnings[where] = number
            numbers.append(beginnings)
        orders = []
        for n, (keys, raw, first) in enumerate(found):
            counts = raw
            if n + 1 < len(found):
                endings = numbers[n][found[n + 1][2] + 1]  # each distinct longer n-gram without its first token
                counts = np.where(ids[first] == START, raw, np.bincount(endings, minlength=len(keys)))
            if n == 0:
                counts = np.where(keys == START, 0, counts)
            orders.append(NgramOrder(keys, counts.astype(np.int64), len(found[n - 1][0]) if n else 1))
        return cls(tuple(orders), size)

    def nll(self, sentences: Sequence[Sequence[int]]) -> list[float]:
        """Return each sentence's mean negative log-likelihood in nats.

        The mean is over its tokens and its end.
        """
        if not sentences:
            return []
        ids, sentence = _flat(sentences)
        p = np.full(len(ids), 1.0 / (self.size + 1))
        beginnings = np.zeros(len(ids), dtype=np.int64)
        for n, order in enumerate(self.orders):
            reach = len(ids) - n  # places at which an n-gram of n + 1 tokens can begin
            if reach < 1:
                break
            total, left = order.after
            context = np.where(_inside(sentence, n + 1)[:reach], beginnings[:reach], -1)
            number = order.find(context, ids[n:])
            known = (context >= 0) & (total[context] > 0)
            count = np.where(number >= 0, order.counts[number] - order.taken[number], 0.0)
            sure = np.divide(count, total[context], out=np.zeros_like(count), where=known)
            p[n:] = np.where(known, sure + left[context] * p[n:], p[n:])
            beginnings[:reach] = number
            beginnings[reach:] = -1
        scored = ids != START
        nats = np.bincount(sentence[scored], -np.log(p[scored]), len(sentences))
        return list((nats / np.bincount(sentence[scored], minlength=len(sentences))).tolist())

    def next_token(self, prefixes: Sequence[Sequence[int]]) -> Numbers:
        """Return (prefixes, V + 1) probabilities of the next token.

        The last column is the end of the sentence.
        """
        p = np.full((len(prefixes), self.size + 1), 1.0 / (self.size + 1))
        for row, prefix in enumerate(prefixes):
            history = [START, *prefix]
            for n, order in enumerate(self.orders):
                context = self._number(history[len(history) - n :]) if n <= len(history) else -1
                total, left = order.after
                if context < 0 or total[context] == 0:
                    continue
                low, high = np.searchsorted(order.keys, [context * BASE, (context + 1) * BASE])
                tokens = order.keys[low:high] % BASE
                sure = (order.counts[low:high] - order.taken[low:high]) / total[context]
                p[row] *= left[context]
                ours = tokens != START  # START has a count of 0: it is never predicted
                np.add.at(p[row], np.where(tokens[ours] == END, self.size, tokens[ours]), sure[ours])
        return p

    def _number(self, ngram: Sequence[int]) -> int:
        """Return an n-gram's number, 0 for the empty one, -1 if it never occurred."""
        number = np.zeros(1, dtype=np.int64)
        for order, token in zip(self.orders, ngram, strict=False):
            number = order.find(number, np.array([token]))
        return int(number[0])


def _flat(sentences: Sequence[Sequence[int]]) -> tuple[Ids, Ids]:
    """Return (M,) all tokens with starts and ends, and (M,) their sentences' numbers."""
    ids = [token for sentence in sentences for token in (START, *sentence, END)]
    lengths = [len(sentence) + 2 for sentence in sentences]
    return np.array(ids, dtype=np.int64), np.repeat(np.arange(len(sentences)), lengths)


def _inside(sentence: Ids, n: int) -> NDArray[np.bool_]:
    """Return (M,) whether the n tokens that start at each place share a sentence."""
    fits = np.zeros(len(sentence), dtype=np.bool_)
    reach = len(sentence) - n + 1
    if reach > 0:
        fits[:reach] = sentence[:reach] == sentence[n - 1 :]
    return fits
