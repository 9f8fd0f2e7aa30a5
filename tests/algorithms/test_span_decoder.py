"""The `span` attack on small random decoders; nothing is granted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from leakaudit.algorithms.resimulation import prove
from leakaudit.algorithms.span.candidates import distances
from leakaudit.algorithms.span.readers.decoder import PrefixRunner
from leakaudit.algorithms.span.residuals import ROUNDING_UNITS, ResidualScale
from leakaudit.algorithms.span.subspace import stacked_update
from leakaudit.algorithms.span.unnormalised_inputs import widened
from leakaudit.attacks.span import Span
from leakaudit.client.batches import with_random_state
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.errors import AnatomyError
from leakaudit.models.loading import Task
from leakaudit.models.structure import Norm, anatomy_of, find_tail, prefix_readers
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction
from leakaudit.plugins.budget import Budget
from tests.support import tiny
from tests.support.span_steps import TEXTS as SHORT_TEXTS
from tests.support.span_steps import span_step, trained_looking

HIDDEN = 96
TEXTS = [
    "the old dog chased a small cat near the river .",
    "the old dog saw three big fish",
    "never saw three big horse under blue tree",
    "fish and bird ate",
]
COMMON = {
    "vocab_size": len(tiny.VOCABULARY), "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": tiny.POSITIONS, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0,
    "initializer_range": 0.15,  # weights as far from zero as trained ones
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Llama": {"intermediate_size": 2 * HIDDEN, "num_key_value_heads": 2},
    "GPTNeoX": {"intermediate_size": 2 * HIDDEN, "use_parallel_residual": True},
    "OPT": {"ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN, "dropout": 0.0},
    "Gemma": {"intermediate_size": 2 * HIDDEN, "num_key_value_heads": 2, "head_dim": 16},
}


def _decoder(shape: str, head: str = "ForCausalLM", **more: Any) -> Any:
    config = getattr(tiny.hf, f"{shape}Config")(**{**COMMON, **SHAPES[shape], **more})
    name = {"GPT2ForCausalLM": "GPT2LMHeadModel"}.get(shape + head, shape + head)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(tiny.hf, name)._from_config(config, attn_implementation="eager").eval()


def _step(model: Any, texts: Sequence[str], task: Task = "causal-lm", frozen: str = "embed", **more: Any) -> ClientStep:
    labels = [i % 2 for i in range(len(texts))] if task == "classification" else None
    names = frozenset(name for name, _ in model.named_parameters() if frozen and (frozen in name or "wte" in name))
    return tiny.client_step(model, tiny.gpt2_tokenizer(), list(texts), labels, task=task, frozen=names, **more)


def _attack(seen: Observation, seconds: float = 60.0) -> Reconstruction:
    return Span()(seen, torch.Generator().manual_seed(0), Budget(seconds))


def _recovered(guess: Reconstruction) -> Counter[tuple[int, ...]]:
    return Counter(sequence.token_ids for sequence in guess.sequences or ())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("frozen", ["embed", ""])
def test_a_language_models_batch_comes_back_to_the_last_token_with_a_proof(shape: str, frozen: str) -> None:
    """Two of four texts begin alike; each last token is only a target."""
    step = _step(_decoder(shape), TEXTS, frozen=frozen)
    guess = _attack(step.observe())
    assert _recovered(guess) == Counter(step.truth.sequences())
    assert all(sequence.proved for sequence in guess.sequences or ())


@pytest.mark.parametrize("shape", ["GPT2", "Llama"])
def test_a_decoders_classifier_shows_texts_and_labels(shape: str) -> None:
    """Every token is in the span there, and the sequence ends where the head reads."""
    step = _step(_decoder(shape, "ForSequenceClassification", num_labels=2), TEXTS, task="classification")
    guess = _attack(step.observe())
    assert _recovered(guess) == Counter(step.truth.sequences())
    assert all(sequence.proved for sequence in guess.sequences or ()) and guess.label_counts == (2, 2)


@pytest.mark.parametrize("task", ["causal-lm", "classification"])
def test_equal_texts_and_beginnings_of_others_are_counted(task: Task) -> None:
    """They add no prefix: only the number of continuations shows them."""
    texts = [TEXTS[0], TEXTS[0], "the old dog", "fish and bird ate", "fish and bird ate a cat"]
    head = "ForCausalLM" if task == "causal-lm" else "ForSequenceClassification"
    step = _step(_decoder("Llama", head), texts, task=task)
    # Equal texts of different classes pull in opposite directions: they get the same one here.
    if task == "classification":
        step = tiny.client_step(_decoder("Llama", head), tiny.gpt2_tokenizer(), texts, [1, 1, 0, 1, 0])
    assert _recovered(_attack(step.observe())) == Counter(step.truth.sequences())


def test_clipping_changes_nothing() -> None:
    """Neither the span nor the proportions of targets."""
    step = _step(_decoder("Llama"), TEXTS, max_grad_norm=0.01)
    guess = _attack(step.observe())
    assert _recovered(guess) == Counter(step.truth.sequences()) and guess.sequences and guess.sequences[0].proved


def test_a_text_that_starts_with_one_word_repeated_comes_back() -> None:
    """Without positions, equal words look like one until another word follows."""
    step = _step(_decoder("Llama"), ["dog dog dog saw a cat", "bird ate fish"])
    assert _recovered(_attack(step.observe())) == Counter(step.truth.sequences())


def test_without_the_last_layer_the_prefixes_still_come_back() -> None:
    """All but the last token, and nothing is claimed to be proved."""
    step = _step(_decoder("Llama"), TEXTS[2:])
    seen = step.observe()
    tail = find_tail(seen.model).layer.weight
    hidden = replace(seen, update={name: g for name, g in seen.update.items() if name not in (tail, "lm_head.weight")})
    guess = _attack(hidden)
    assert _recovered(guess) == Counter(ids[:-1] for ids in step.truth.sequences())
    assert not any(sequence.proved for sequence in guess.sequences or ())


def test_the_residual_scale_tells_one_wrong_word_from_rounding() -> None:
    """True prefixes are within a few units; one wrong word is far outside."""
    step = _step(_decoder("Llama"), TEXTS)
    seen = step.observe()
    anatomy = anatomy_of(seen.model)
    group = next(g for g in prefix_readers(seen.model) if "mlp" in g[0].module)
    scale = ResidualScale.of(stacked_update(seen.update, replace(anatomy, projections=group)))
    runner = PrefixRunner(seen.model, group[0].module)

    def distance(ids: Sequence[int]) -> float:
        (_, _, given), *_ = runner.extend(torch.tensor([ids[:-1]], dtype=torch.long), torch.tensor([ids[-1]]))
        return float(scale(given))

    (ids, *_) = step.truth.sequences()
    assert max(distance(ids[:length]) for length in range(1, len(ids))) < ROUNDING_UNITS
    wrong = (*ids[:4], (ids[4] + 1) % len(tiny.VOCABULARY), *ids[5:-1])
    assert distance(wrong) > 10 * ROUNDING_UNITS


def test_the_cache_gives_what_whole_prefixes_give() -> None:
    """Row by row, for every pair of prefix and token."""
    model = _decoder("Llama")
    runner = PrefixRunner(model, prefix_readers(model)[-1][0].module)
    assert runner.cached
    prefixes, tokens = torch.tensor([[5, 9, 7], [8, 6, 11]]), torch.tensor([12, 13, 14])
    ((_, _, quick),) = runner.extend(prefixes, tokens)
    runner.cached = False
    ((rows, columns, plain),) = runner.extend(prefixes, tokens)
    assert rows.tolist() == [0, 0, 0, 1, 1, 1] and columns.tolist() == [0, 1, 2] * 2
    torch.testing.assert_close(quick, plain, rtol=1e-4, atol=1e-5)


def test_an_encoder_has_no_prefixes() -> None:
    """Its later inputs depend on what follows, and the reason says so."""
    with pytest.raises(AnatomyError, match="not on those after"):
        prefix_readers(tiny.bert())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_encoder_without_positions_shows_its_words_without_order(dropout: float) -> None:
    """Relative positions: a bag of words and no sequences."""
    config = tiny.hf.DebertaV2Config(
        vocab_size=len(tiny.VOCABULARY), hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=6,
        intermediate_size=2 * HIDDEN, max_position_embeddings=tiny.POSITIONS, relative_attention=True,
        position_biased_input=False, pos_att_type=["p2c", "c2p"], hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, type_vocab_size=0, num_labels=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny.hf.DebertaV2ForSequenceClassification._from_config(config, attn_implementation="eager").eval()
    step = _trained(tiny.client_step(model, tiny.bert_tokenizer(), TEXTS[1:3], [0, 1], training=dropout > 0))
    seen = step.observe()
    assert Span().applies(seen)
    guess = _attack(seen)
    words = {token for ids in step.truth.sequences() for token in ids} - set(seen.facts.vocabulary.wordless_ids)
    assert guess.sequences is None and set(guess.tokens or ()) == words


def test_noise_alone_names_no_word_of_an_input_without_positions() -> None:
    """In 99 updates of 100 no word is named, because one word would look like a leak."""
    seen = _step(_decoder("Llama", num_hidden_layers=1), TEXTS[3:]).observe()
    rng, named = torch.Generator().manual_seed(0), 0
    for _ in range(60):
        noise = {name: torch.randn(g.shape, generator=rng) for name, g in seen.update.items()}
        noisy = seen.under(DeclaredDefense(name="gaussian-noise", parameters={"sigma": 1.0}), noise)
        named += bool(_attack(noisy).tokens)
    assert named <= 5  # P(6 or more of 60 at 1 %) is 3e-5


def test_a_language_models_wrong_last_token_is_not_proved() -> None:
    """The true batch is; the same with another last token is not."""
    step = _step(_decoder("GPT2"), TEXTS[:2])
    seen = step.observe()
    one, two = step.truth.sequences()
    assert prove(seen, [GuessedSequence(one), GuessedSequence(two)], Budget(600)).sequences[0].proved
    wrong = [GuessedSequence(one), GuessedSequence((*two[:-1], two[-1] + 1))]
    assert not prove(seen, wrong, Budget(600)).sequences[0].proved


def test_a_spent_budget_gives_the_prefixes_so_far() -> None:
    """Marked as stopped by the budget."""
    ticks = iter(float(i) for i in range(100_000))
    seen = _step(_decoder("Llama"), TEXTS).observe()
    guess = Span()(seen, torch.Generator().manual_seed(0), Budget(6.0, clock=lambda: next(ticks)))
    assert guess.stop == "budget"


DROPOUT: dict[str, Any] = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


@pytest.mark.parametrize("count", [1, 2])
def test_a_gpt2_classifiers_texts_are_found_behind_dropout_before_the_normalisation(count: int) -> None:
    """Every later layer has masks as well, so nothing is claimed to be proved."""
    model = _decoder("GPT2", "ForSequenceClassification", **DROPOUT)
    step = _trained(_step(model, TEXTS[2 : 2 + count], task="classification", training=True))
    guess = _attack(step.observe())
    assert _recovered(guess) == Counter(step.truth.sequences())
    assert not any(sequence.proved for sequence in guess.sequences or ())


def test_behind_dropout_a_language_models_last_token_is_guessed_and_not_proved() -> None:
    """No attention reads it, and the last layer's input is known up to its masks."""
    step = _trained(_step(_decoder("GPT2", **DROPOUT), TEXTS[2:3], training=True))
    guess = _attack(step.observe())
    assert _recovered(guess) == Counter(step.truth.sequences())
    assert all(not sequence.proved and sequence.own_score < 1.0 for sequence in guess.sequences or ())


def test_masked_vectors_before_the_normalisation_lie_in_the_widened_space() -> None:
    """It has two dimensions more than inputs: for the mean and for the shift."""
    generator = torch.Generator().manual_seed(1)
    gain, shift = torch.rand(2, 24, generator=generator, dtype=torch.float64) + 0.5
    norm = Norm(centred=True, eps=1e-5, gain=gain, shift=shift)
    masked = torch.randn(5, 24, generator=generator, dtype=torch.float64)
    masked = masked * (torch.rand(5, 24, generator=generator) > 0.1)
    basis = widened(torch.linalg.qr(norm.apply(masked).T).Q.T, norm)
    assert basis.shape == (7, 24)
    assert float(distances(masked, basis).max()) < 1e-10
    assert float(distances(torch.randn(5, 24, generator=generator, dtype=torch.float64), basis).min()) > 0.1


def _trained(step: ClientStep) -> ClientStep:
    """Fix the step's dropout masks."""
    (batch,) = step.truth.micro_batches
    return replace(step, truth=Truth((with_random_state(batch, 3),)))


@pytest.mark.parametrize("count", [1, 2])
def test_a_gpt2_classifiers_batch_comes_back_exactly(count: int) -> None:
    """Nothing granted: no labels, no lengths, no batch size."""
    step = span_step("GPT-2", count)
    guess = _attack(step.observe(), 600)
    assert guess.sequences is not None
    assert set(step.truth.sequences()) <= {sequence.token_ids for sequence in guess.sequences}
    assert all(sequence.proved for sequence in guess.sequences)


def test_the_last_token_of_a_language_models_text_comes_back_as_a_target() -> None:
    """Its query, key and value get no gradient, but the last layer predicted it."""
    step = tiny.client_step(trained_looking(tiny.gpt2_lm()), tiny.gpt2_tokenizer(), SHORT_TEXTS[:1], task="causal-lm")
    guess = _attack(step.observe(), 600)
    (true,) = step.truth.sequences()
    assert guess.sequences is not None
    assert [sequence.token_ids for sequence in guess.sequences] == [true]
