"""The parts of the benchmark on language models: filters, scores, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from leakaudit.plugins import GuessedSequence, Reconstruction
from tests.benchmarks import decoder_victims
from tests.benchmarks.decoder_victims import fresh_model, perplexity, rows_of, train, train_tokenizer
from tests.benchmarks.film import printed_bag, rates_of
from tests.benchmarks.lm_clients import cells, found_by_any, line, means, nearest, nerr, scored
from tests.benchmarks.sentences import kept_rows, read_rows, write_rows

TEXTS = ("a cat sat here", "a dog ran to town today", "no")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a byte-level BPE without merges: one token a character."""
    return train_tokenizer([], size=0)


def test_the_filter_keeps_sentences_of_the_right_length(tokenizer: Any) -> None:
    """Both limits are included."""
    rows: list[dict[str, Any]] = [{"text": text} for text in TEXTS]
    assert [row["text"] for row in kept_rows(rows, tokenizer, 14, 22)] == [TEXTS[0]]
    assert len(kept_rows(rows, tokenizer, 14, 23)) == 2


def test_the_filter_wants_an_entity_only_where_the_data_names_some(tokenizer: Any) -> None:
    """A file without tags keeps all its rows."""
    rows: list[dict[str, Any]] = [{"text": "Bo sat", "spans": [[0, 2, "PERSON"]]}, {"text": "he sat", "spans": []}]
    assert [row["text"] for row in kept_rows(rows, tokenizer, 1, 9)] == ["Bo sat"]
    assert len(kept_rows([{"text": "Bo sat"}, {"text": "he sat"}], tokenizer, 1, 9)) == 2


def test_rows_are_written_and_read_unchanged(tmp_path: Path) -> None:
    """Text and spans survive."""
    rows = [{"text": "\u00e9t\u00e9", "spans": [[0, 3, "LOC"]]}]
    assert read_rows(write_rows(tmp_path / "deep" / "x.jsonl", rows)) == rows


def test_every_row_of_training_begins_where_a_text_begins() -> None:
    """So the first place of the model learns the first words of texts."""
    made = rows_of([(1, 2, 3), (4, 5)], end=0, length=4)
    rows = [next(made) for _ in range(20)]
    assert all(len(row) == 4 and row[0] in (1, 4) for row in rows)
    assert rows == [row for row, _ in zip(rows_of([(1, 2, 3), (4, 5)], end=0, length=4), range(20), strict=False)]


def test_a_training_that_was_cut_off_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint holds weights, moments and schedule."""
    monkeypatch.setattr(decoder_victims, "CHECKPOINT", 2)
    whole, cut = _tiny(), _tiny()
    train(whole, rows_of([(1, 2, 3)], 0, 8), 4, tmp_path / "whole")
    with pytest.raises(StopIteration):
        train(
            cut, iter([row for row, _ in zip(rows_of([(1, 2, 3)], 0, 8), range(48), strict=False)]), 4, tmp_path / "cut"
        )
    again = _tiny()
    train(again, rows_of([(1, 2, 3)], 0, 8), 4, tmp_path / "cut")
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert not list(tmp_path.iterdir())


def _tiny() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8, n_embd=16, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def test_random_weights_have_the_perplexity_of_the_vocabulary(tokenizer: Any) -> None:
    """A model that knows nothing gives each of V tokens about 1 / V."""
    found = perplexity(fresh_model(tokenizer, tied=False), tokenizer, TEXTS)
    assert found == pytest.approx(len(tokenizer), rel=0.2)


def test_a_first_guess_counts_for_the_text_that_it_is_nearest_to(tokenizer: Any) -> None:
    """The whole batch counts the text that was not guessed as 0."""
    truths = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS[:2]]
    guess = Reconstruction(sequences=(GuessedSequence(truths[1], 1.0),))
    found = scored(guess, truths, tokenizer, frozenset(), {TEXTS[1]: ("town",), TEXTS[0]: ("cat",)}, 1.0)
    assert found.first == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0, "nerr": 1.0}
    assert (found.whole["rougeL"], found.whole["exact"], found.whole["nerr"]) == (0.5, 0.5, 0.5)
    assert (found.whole["best"], found.whole["precision"]) == (1.0, 1.0)


def test_an_entity_counts_if_its_words_stand_together() -> None:
    """Case and punctuation do not count; parts of words do not either."""
    assert nerr(("New York", "Bo"), "in new york, bob") == 0.5
    assert nerr((), "anything") is None
    assert nearest("bo", ["x", "Bo went"], {"Bo went": ("Bo",)})["nerr"] == 1.0


def test_recall_and_precision_of_sentences() -> None:
    """Half of the texts are found, and two of three guesses are right."""
    recall, precision = found_by_any(["a b c d", "a b c x", "q"], ["a b c d", "e f g h"])
    assert (recall, precision) == pytest.approx((0.5, 2 / 3))


def test_a_bag_as_printed_leaves_out_what_noise_explains() -> None:
    """Without noise a row of zeros is the only one that is left out."""
    rows = torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.0, -9.0]])
    assert printed_bag(rows, 0.0) == {1, 2}
    assert printed_bag(rows, 1.0) == {2}
    assert rates_of(set(), {1}) == {"recall": 0.0}


def test_a_missing_number_is_a_dash_and_no_zero() -> None:
    """A mean is over the batches that have the number."""
    assert line(cells(means([{"nerr": 1.0}, {}]), ("nerr", "rougeL"))) == "| 1.00 | - |"
