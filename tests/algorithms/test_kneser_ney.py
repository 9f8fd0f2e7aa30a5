"""Modified Kneser-Ney against its definition, computed slowly with dictionaries."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest

from leakaudit.algorithms.language_models.kneser_ney import END, START, KneserNey

Gram = tuple[int, ...]


class Slow:
    """Chen and Goodman 1998, Sec. 3, written out: recursive, one n-gram at a time."""

    def __init__(self, sentences: Sequence[Sequence[int]], order: int, size: int) -> None:
        self.order, self.size = order, size
        framed = [(START, *sentence, END) for sentence in sentences]
        raw = {n: Counter(s[i : i + n] for s in framed for i in range(len(s) - n + 1)) for n in range(1, order + 1)}
        self.counts: dict[int, dict[Gram, int]] = {order: dict(raw[order])}
        for n in range(1, order):
            left: dict[Gram, set[int]] = defaultdict(set)
            for gram in raw[n + 1]:
                left[gram[1:]].add(gram[0])
            self.counts[n] = {g: raw[n][g] if g[0] == START else len(left[g]) for g in raw[n]}
        self.counts[1][(START,)] = 0
        self.discounts = {n: self._discounts(list(self.counts[n].values())) for n in self.counts}

    @staticmethod
    def _discounts(counts: list[int]) -> list[float]:
        n1, n2, n3, n4 = (counts.count(i) for i in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2) if n1 else 0.0
        found = [0.0]
        for i, n, above in ((1, n1, n2), (2, n2, n3), (3, n3, n4)):
            d = i - (i + 1) * y * above / n if n else 0.0
            found.append(d if 0 < d < i else i / 2)
        return found

    def p(self, token: int, context: Gram) -> float:
        if len(context) >= self.order:
            context = context[len(context) - self.order + 1 :]
        below = self.p(token, context[1:]) if context else 1 / (self.size + 1)
        n = len(context) + 1
        follows = {g[-1]: c for g, c in self.counts[n].items() if g[:-1] == context}
        total = sum(follows.values())
        if total == 0:
            return below
        discounts = self.discounts[n]
        freed = sum(discounts[min(c, 3)] for c in follows.values())
        count = follows.get(token, 0)
        return (count - discounts[min(count, 3)]) / total + freed / total * below


SIZE = 12


def _text(seed: int) -> list[list[int]]:
    """Return sentences of two to six of twelve tokens, with falling frequency."""
    rng = random.Random(seed)
    return [[min(rng.randrange(SIZE), rng.randrange(SIZE)) for _ in range(rng.randint(2, 6))] for _ in range(60)]


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_it_is_the_definition(order: int) -> None:
    """On the text itself and on one with n-grams that it has never seen."""
    text = _text(0)
    fast, slow = KneserNey.count(text, order, SIZE), Slow(text, order, SIZE)
    for sentence in [*text[:10], *_text(1)[:10], []]:
        framed = (START, *sentence, END)
        nats = [-math.log(slow.p(framed[i], framed[max(0, i - order + 1) : i])) for i in range(1, len(framed))]
        assert fast.nll([sentence])[0] == pytest.approx(sum(nats) / len(nats), rel=1e-9)


def test_many_sentences_at_once_are_scored_like_one_at_a_time() -> None:
    """No n-gram reaches from one sentence into the next."""
    model = KneserNey.count(_text(0), 3, SIZE)
    others = _text(2)
    assert model.nll(others) == pytest.approx([model.nll([sentence])[0] for sentence in others], rel=1e-12)
    assert model.nll([]) == []


def test_what_comes_next_sums_to_one_and_is_what_the_score_is_made_of() -> None:
    """The end of the sentence takes part."""
    model = KneserNey.count(_text(0), 3, SIZE)
    sentence = [3, 0, 7, 1]
    p = model.next_token([sentence[:n] for n in range(5)])
    assert p.sum(axis=1) == pytest.approx(np.ones(5), rel=1e-9)
    chosen = [*sentence, SIZE]
    nats = [-math.log(p[n, token]) for n, token in enumerate(chosen)]
    assert model.nll([sentence])[0] == pytest.approx(sum(nats) / 5, rel=1e-9)


def test_a_word_that_follows_many_is_likelier_in_a_new_place_than_one_that_follows_one() -> None:
    """The point of Kneser-Ney: 9 occurs as often as 8, but only ever after 7."""
    text = [[a, 8] for a in (0, 1, 2, 3, 4, 5)] + [[7, 9]] * 6
    p = KneserNey.count(text, 2, SIZE).next_token([[10]])[0]
    assert p[8] > 2 * p[9]


def test_a_text_of_one_pattern_leaves_something_for_what_never_occurred() -> None:
    """Its counts of counts give no usable discounts; no probability may become 0."""
    model = KneserNey.count([[1, 2, 3]] * 50 + [[1, 2, 4]] * 50, 3, SIZE)
    assert model.nll([[7, 8]])[0] < 50
    assert model.next_token([[1, 2]])[0].sum() == pytest.approx(1.0)


def test_a_text_of_one_word_is_enough() -> None:
    """No count of counts to take discounts from; sentences shorter than the order."""
    model = KneserNey.count([[4]], 5, SIZE)
    assert model.nll([[4]])[0] < model.nll([[5]])[0]
    assert model.next_token([[]]).sum() == pytest.approx(1.0)
