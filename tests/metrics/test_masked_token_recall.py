"""`masked_token_recall` against shares counted by hand."""

from __future__ import annotations

from leakaudit.audit.scoring.score import score
from leakaudit.metrics.masked_token_recall import MaskedTokenRecall
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction
from leakaudit.plugins.metric_protocol import Pair
from leakaudit.results.schema import Missing, Score
from tests.support import tiny

TOKENIZER = tiny.bert_tokenizer()


def test_only_what_goes_beyond_the_visible_words_counts() -> None:
    """5 is visible once and masked once: a guess that has it once has the visible one."""
    recall = MaskedTokenRecall()
    assert recall(Pair((5, 6, 5, 7), (5, 6), "", "", masked_ids=(5, 7))) == 0.0
    assert recall(Pair((5, 6, 5, 7), (5, 5, 6), "", "", masked_ids=(5, 7))) == 0.5
    assert recall(Pair((5, 6, 5, 7), (7, 5, 6, 5), "", "", masked_ids=(5, 7))) == 1.0
    assert recall(Pair((5, 6), (5, 6), "", "")) is None


def test_a_text_with_the_mask_in_it_is_not_exact() -> None:
    """What the model was shown came back whole, and nothing of the secret."""
    true = tuple(TOKENIZER("the old dog chased a cat .")["input_ids"])
    shown = tuple(TOKENIZER.mask_token_id if place in (2, 3) else token for place, token in enumerate(true))
    special = frozenset(TOKENIZER.all_special_ids)
    guess = Reconstruction(sequences=(GuessedSequence(shown),))
    scored = score(guess, [true], None, None, TOKENIZER, special, 6, [true[2:4]])
    assert scored.scores["exact"] == Score(value=0.0, n=1) and "exact_sequence" not in scored.events
    assert scored.scores["masked_token_recall"] == Score(value=0.0, n=1)
    whole = score(
        Reconstruction(sequences=(GuessedSequence(true),)), [true], None, None, TOKENIZER, special, 6, [true[2:4]]
    )
    assert whole.scores["masked_token_recall"] == Score(value=1.0, n=1) and "exact_sequence" in whole.events
    assert scored.scores["token_recall"] == Score(value=5 / 7, n=1)


def test_a_bag_names_masked_words_that_are_visible_nowhere() -> None:
    """Of 5 and 9 one is named; 6 is masked as well, and visible in the other text."""
    texts, masked = [(5, 6, 7), (6, 9)], [(5, 6), (9,)]
    bag = score(Reconstruction(tokens=(5, 6, 30)), texts, None, None, TOKENIZER, frozenset(), 6, masked)
    assert bag.scores["masked_token_recall"] == Score(value=0.5, n=2)
    bare = score(Reconstruction(tokens=(5, 6, 30)), texts, None, None, TOKENIZER, frozenset(), 6)
    assert bare.scores["masked_token_recall"] == Missing(missing="no token of the batch was masked")
