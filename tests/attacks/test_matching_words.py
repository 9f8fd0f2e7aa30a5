"""Which neighbours of a guess are tried as tokens, and what of them is applied together."""

from __future__ import annotations

import pytest
import torch

from leakaudit.attacks import matching_words
from leakaudit.attacks.matching_engine import Matcher
from leakaudit.attacks.matching_metric import FLOOR, metric_of
from leakaudit.attacks.matching_objective import Objective
from leakaudit.attacks.matching_words import mend
from leakaudit.budget import Budget
from leakaudit.snapshot import Granted
from tests import tiny

TEXT = "the small dog saw one fish ."


def _rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _one_sentence() -> tuple[Matcher, tuple[int, ...]]:
    step = tiny.client_step(tiny.bert(initializer_range=0.1), tiny.bert_tokenizer(), [TEXT], [0])
    (ids,) = (tuple(sequence) for sequence in step.truth.sequences())
    seen = step.observe().granting(Granted(labels=(0,), lengths=(len(ids),)))
    return Matcher(seen, (len(ids),), Objective("cosine")), ids


@pytest.mark.parametrize("doubles", [0, matching_words.DOUBLES])
def test_a_word_is_found_where_another_stands_twice_and_those_between_one_place_off(
    monkeypatch: pytest.MonkeyPatch, doubles: int
) -> None:
    """No other word at any one place and no exchange of neighbours gets there."""
    matcher, ids = _one_sentence()
    guess = (ids[0], *ids[2:6], ids[5], *ids[6:])
    assert len(guess) == len(ids) and guess != ids
    words = [{place: [guess[place]] for place in matcher.free_places(0)}]
    words[0][1].append(ids[1])
    monkeypatch.setattr(matching_words, "ORDERS", 0)
    monkeypatch.setattr(matching_words, "DOUBLES", doubles)
    found = mend(matcher, [guess], torch.zeros(1, matcher.classes), words, _rng(), Budget(600))
    assert (found == (ids,)) == bool(doubles)


def test_what_gains_by_itself_is_applied_together_unless_it_is_about_the_same_place() -> None:
    """Nearest first: an exchange, the next that leaves its places alone, then the one after."""
    best = ((1, 2, 3, 4, 5),)
    exchange, overlaps, word, loses, last = (
        ((2, 1, 3, 4, 5),),
        ((1, 9, 3, 4, 5),),
        ((1, 2, 3, 9, 5),),
        ((1, 2, 8, 4, 5),),
        ((1, 2, 3, 4, 7),),
    )
    tried = [best, word, overlaps, exchange, loses, last]
    losses = [1.0, 0.5, 0.3, 0.2, 1.1, 0.9]
    assert matching_words._together(tried, losses) == [((2, 1, 3, 9, 5),), ((2, 1, 3, 9, 7),)]


@pytest.mark.parametrize(("noise", "floor"), [(0.0, FLOOR), (0.05, FLOOR), (0.4, 0.4), (7.0, 1.0)])
def test_a_metric_has_the_floor_of_noise_where_that_is_higher(noise: float, floor: float) -> None:
    """Singular values of 1, a half and a hundredth; where noise is larger than the update, all directions count alike."""
    metric = metric_of(3 * torch.tensor([1.0, 0.5, 0.01]), 3 * noise)
    assert metric.absent == pytest.approx(1 / floor)
    assert metric.present.tolist() == pytest.approx([1.0, 1 / max(0.5, floor), 1 / floor])
