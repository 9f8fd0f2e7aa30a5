"""`rare-rows` on language models: sentences grown along the head's rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.algorithms.padding import padded_batch
from leakaudit.algorithms.rare_rows.decoder_reader import decoder_applies, longest_sentence
from leakaudit.algorithms.rare_rows.next_token_rows import NextTokenRows
from leakaudit.algorithms.rare_rows.sentence_rows import find_tables, rows_of
from leakaudit.attacks.rare_rows import RareRows
from leakaudit.client.facts import PublicFacts
from leakaudit.client.observation import Observation
from leakaudit.models.vocabulary import Vocabulary
from leakaudit.plugins import Budget, Reconstruction
from tests.support.tiny import generator, gpt2_classifier, hf

WORDS, HIDDEN, LONGEST = 400, 64, 12
Sentences = tuple[tuple[int, ...], ...]


def _gpt2(tied: bool) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=WORDS, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=32, tie_word_embeddings=tied,
        initializer_range=0.15, attn_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _seeded(lambda: hf.GPT2LMHeadModel(config))


def _llama() -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.15, attn_implementation="eager",
        tie_word_embeddings=False,
    )  # fmt: skip
    return _seeded(lambda: hf.LlamaForCausalLM(config))


def _seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = make().eval()
    return model


@cache
def _sentences(count: int = 24) -> Sentences:
    """Return sentences of 4 to LONGEST tokens; few tokens are frequent, as words are."""
    rng = generator(1)
    often = 1.0 / torch.arange(1, WORDS, dtype=torch.float64)
    lengths = torch.randint(4, LONGEST + 1, (count,), generator=rng).tolist()
    return tuple(tuple((torch.multinomial(often, n, True, generator=rng) + 1).tolist()) for n in lengths)


def _observe(model: nn.Module, sentences: Sentences, frozen: tuple[str, ...] = (), **facts: Any) -> Observation:
    """Return what a client sends for sentences, the mean loss's gradient."""
    names = [name for name, _ in model.named_parameters() if name not in frozen]
    public = PublicFacts(
        task="causal-lm", training_mode=False, shared=tuple(names), frozen=frozen,
        vocabulary=Vocabulary(size=WORDS, special={"pad": 0}, max_length=32),
    )  # fmt: skip
    seen = Observation({}, model, public.model_copy(update=facts))
    ids, mask = padded_batch(seen, sentences)
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    gradients = torch.autograd.grad(loss, [model.get_parameter(name) for name in names])
    return replace(seen, update=dict(zip(names, gradients, strict=True)))


def _recover(seen: Observation, seconds: float = 300.0) -> Reconstruction:
    return RareRows()(seen, generator(0), Budget(seconds))


def _exact(found: Reconstruction, sentences: Sentences) -> int:
    guessed = [guess.token_ids for guess in found.sequences or ()]
    return sum(min(guessed.count(one), sentences.count(one)) for one in set(sentences))


@pytest.mark.parametrize("tied", [False, True])
def test_the_rows_of_all_sentences_are_the_clients_update(tied: bool) -> None:
    seen = _observe(_gpt2(tied), _sentences())
    tables = find_tables(seen)
    made = rows_of(seen, _sentences(), tables)
    assert made.targets == sum(map(len, _sentences())) - len(_sentences())
    torch.testing.assert_close(made.head / -made.targets, seen.update[tables.head], atol=1e-5, rtol=1e-4)


def test_untied_tables_give_back_every_sentence_beyond_the_hidden_size() -> None:
    sentences = _sentences()
    assert sum(map(len, sentences)) > 2 * HIDDEN
    found = _recover(_observe(_gpt2(False), sentences))
    print("untied", _exact(found, sentences), len(sentences), found.diagnostics)
    assert _exact(found, sentences) >= 0.8 * len(sentences)


def test_tied_tables_give_back_sentences_beyond_the_hidden_size() -> None:
    sentences = _sentences()
    found = _recover(_observe(_gpt2(True), sentences))
    print("tied", _exact(found, sentences), len(sentences), found.diagnostics)
    assert _exact(found, sentences) >= 0.5 * len(sentences)


def test_a_model_without_position_vectors_is_read_as_well() -> None:
    sentences = _sentences()
    found = _recover(_observe(_llama(), sentences))
    print("llama", _exact(found, sentences), len(sentences), found.diagnostics)
    assert _exact(found, sentences) >= 0.5 * len(sentences)
