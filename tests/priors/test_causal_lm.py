"""`causal-lm` and `victim`: likelihoods against a loop over tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.algorithms.language_models import token_scorer
from leakaudit.algorithms.language_models.token_scorer import TokenScorer
from leakaudit.errors import PriorError
from leakaudit.models.vocabulary import Vocabulary, vocabulary_of
from leakaudit.plugins.prior_loading import load_prior
from leakaudit.plugins.prior_protocol import tokenizer_vocabulary
from leakaudit.priors.causal_lm import CausalLM
from tests.support import tiny

TEXTS = ["the old dog chased a cat", "a bird", "the fish liked the new red house near a tree", "never"]
BEGIN, END, PAD = (tiny.VOCABULARY[f"[{role}]"] for role in ("CLS", "SEP", "PAD"))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny.gpt2_lm()


@pytest.fixture(scope="module")
def folder(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a language model with the tokens of the tiny BERT."""
    place = tmp_path_factory.mktemp("lm")
    model.save_pretrained(place)  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return tokenizer_vocabulary(tiny.bert_tokenizer())


def _by_hand(model: nn.Module, framed: list[int], given: int) -> float:
    """Return the mean nats after the first `given` tokens, by one pass each."""
    nats = []
    for place in range(given, len(framed)):
        logits = model(input_ids=torch.tensor([framed[:place]])).logits[0, -1]
        nats.append(-float(logits.log_softmax(dim=0)[framed[place]]))
    return sum(nats) / len(nats)


@torch.no_grad()
def test_a_batch_is_scored_like_one_token_after_the_other(
    model: nn.Module, folder: Path, vocabulary: Vocabulary
) -> None:
    """Texts of different lengths, with special tokens or without."""
    scorer = load_prior(str(folder), vocabulary=vocabulary)
    with_frame = tiny.bert_tokenizer()(TEXTS)["input_ids"]
    expected = [_by_hand(model, ids, 1) for ids in with_frame]
    assert scorer.nll(with_frame) == pytest.approx(expected, rel=1e-4)
    assert scorer.nll([[PAD, *ids[1:-1]] for ids in with_frame]) == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_small_passes_give_the_same(folder: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a pass changes memory only, not the answers."""
    ids = tiny.bert_tokenizer()(TEXTS)["input_ids"]
    scorer = load_prior(str(folder), vocabulary=vocabulary)
    at_once, next_at_once = scorer.nll(ids), scorer.next_token_nll(ids)
    monkeypatch.setattr(token_scorer, "LOGITS", 1)
    assert scorer.nll(ids) == pytest.approx(at_once, rel=1e-5)
    one_by_one = scorer.next_token_nll(ids)
    assert next_at_once is not None and one_by_one is not None
    torch.testing.assert_close(one_by_one, next_at_once, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_text_longer_than_the_model_is_scored_in_windows(folder: Path, vocabulary: Vocabulary) -> None:
    """Every token once; later ones with half a window before them."""
    scorer = load_prior(str(folder), vocabulary=vocabulary)
    ids = [7 + n % 20 for n in range(70)]
    assert vocabulary.max_length == tiny.POSITIONS == 32
    assert isinstance(scorer, TokenScorer)
    scored = scorer.totals([ids[:30], ids])
    assert [count for _, count in scored] == [31, 71]
    assert scored[1][0] == pytest.approx(71 / 31 * scored[0][0], rel=0.2)


@torch.no_grad()
def test_what_comes_next_is_the_models_last_word(model: nn.Module, folder: Path, vocabulary: Vocabulary) -> None:
    """After what begins a text, and after a longer prefix beside it."""
    scorer = load_prior(str(folder), vocabulary=vocabulary)
    nats = scorer.next_token_nll([[], [8, 9, 10]])
    assert nats is not None
    for row, prefix in enumerate([[BEGIN], [BEGIN, 8, 9, 10]]):
        logits = model(input_ids=torch.tensor([prefix])).logits[0, -1]
        torch.testing.assert_close(nats[row], -logits.log_softmax(dim=0), rtol=1e-4, atol=1e-4)


def test_a_victims_table_may_be_longer_than_its_tokenizer(folder: Path, vocabulary: Vocabulary) -> None:
    """Rows that stand for no token never follow, and scoring one of them is no crash."""
    size = vocabulary.size
    scorer = load_prior(str(folder), vocabulary=vocabulary.model_copy(update={"size": size + 3}))
    nats = scorer.next_token_nll([[7]])
    assert nats is not None and nats.shape == (1, size + 3)
    assert torch.isinf(nats[0, size:]).all() and torch.isfinite(nats[0, :size]).all()
    assert math.isfinite(scorer.nll([[7, size + 2]])[0])


@torch.no_grad()
def test_without_anything_around_a_text_its_first_token_is_given(model: nn.Module) -> None:
    """GPT-2 style; one word alone says nothing, so it is as unlikely as any."""
    scorer = TokenScorer(model, vocabulary_of(tiny.gpt2_tokenizer(), model))
    ids = tiny.gpt2_tokenizer()(TEXTS)["input_ids"]
    expected = [_by_hand(model, row, 1) for row in ids[:3]]
    assert scorer.nll(ids) == pytest.approx([*expected, math.log(len(tiny.VOCABULARY))], rel=1e-4)
    assert scorer.next_token_nll([[]]) is None


def _letters(folder: Path) -> Any:
    """Save and return a tokenizer of letters that shares no id with the others."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = {letter: number for number, letter in enumerate("~ abcdefghijklmnopqrstuvwxyz.")}
    inner = Tokenizer(models.WordLevel(letters, unk_token="~"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    made = tiny.hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="~", bos_token="~", eos_token="~", pad_token="~"
    )
    made.save_pretrained(folder)
    return made


@torch.no_grad()
def test_another_tokenizer_is_reached_through_text(model: nn.Module, tmp_path: Path, vocabulary: Vocabulary) -> None:
    """The likelihood of all letters, over the number of the victim's words."""
    theirs, own = tmp_path / "victim", tmp_path / "lm"
    tiny.bert_tokenizer().save_pretrained(theirs)
    model.save_pretrained(own)  # type: ignore[operator]
    letters = _letters(own)
    with pytest.raises(PriorError, match="name the folder of the victim's tokenizer"):
        load_prior(str(own), vocabulary=vocabulary)
    scorer = load_prior(f"causal-lm(path={own},tokenizer={theirs})", vocabulary=vocabulary)
    ids = letters("a bird", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6
    expected = _by_hand(model, [0, *ids], 1) * 6 / 2
    words = tiny.bert_tokenizer()(["a bird", ""])["input_ids"]
    assert scorer.nll(words) == pytest.approx([expected, math.log(vocabulary.size)], rel=1e-4)
    assert scorer.next_token_nll(words) is None
    with pytest.raises(PriorError, match="it has to be the victim's own"):
        load_prior(f"causal-lm(path={own},tokenizer={own})", vocabulary=vocabulary)


def test_a_folder_is_needed(vocabulary: Vocabulary) -> None:
    """And said to be."""
    with pytest.raises(PriorError, match=r"causal-lm\(path=FOLDER\)"):
        CausalLM().load(vocabulary)


def test_the_victim_is_its_own_prior_where_it_predicts_next_tokens(model: nn.Module) -> None:
    """A classifier or a masked language model is refused, whatever its name."""
    vocabulary = vocabulary_of(tiny.gpt2_tokenizer(), model)
    scorer = load_prior("victim", vocabulary=vocabulary, victim=model)
    ids = tiny.gpt2_tokenizer()(TEXTS[:2])["input_ids"]
    assert scorer.nll(ids) == TokenScorer(model, vocabulary).nll(ids)
    masked = tiny.hf.BertForMaskedLM(tiny.bert().config).eval()
    for other in (None, tiny.bert(), tiny.gpt2_classifier(), masked):
        with pytest.raises(PriorError, match="is not a causal language model"):
            load_prior("victim", vocabulary=vocabulary, victim=other)
