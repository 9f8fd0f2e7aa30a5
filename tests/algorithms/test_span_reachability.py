"""What `span` says was in reach, on small random models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from leakaudit.algorithms.span.candidates import Candidates
from leakaudit.algorithms.span.problem import SpanProblem, span_problem_of
from leakaudit.algorithms.span.reachability import (
    bag_of_words_reach,
    dropout_reach,
    prefix_reach,
    ranked_reach,
    span_reach,
)
from leakaudit.algorithms.span.sequence_assembly import FARTHEST_INSIDE
from leakaudit.attacks.span import Span
from leakaudit.client.batches import make_batch, public_facts, with_random_state
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.plugins.budget import Budget
from tests.support import tiny

TEXTS = ("the old dog chased a small cat near the river .", "never saw three big horse under blue tree")
HIDDEN = 96


def _model(kind: str = "bert", layers: int = 2, dropout: float = 0.0) -> Any:
    if kind == "gpt2":
        config = tiny.hf.GPT2Config(
            vocab_size=len(tiny.VOCABULARY), n_embd=HIDDEN, n_layer=layers, n_head=6, n_positions=tiny.POSITIONS,
            pad_token_id=0, bos_token_id=3, eos_token_id=3, initializer_range=0.2,
        )  # fmt: skip
        make = tiny.hf.GPT2LMHeadModel
    else:
        config = tiny.hf.BertConfig(
            vocab_size=len(tiny.VOCABULARY), hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=6,
            intermediate_size=2 * HIDDEN, max_position_embeddings=tiny.POSITIONS, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout, initializer_range=0.2,
        )  # fmt: skip
        make = tiny.hf.BertForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make._from_config(config, attn_implementation="eager").eval()


def _step(
    model: Any, texts: Sequence[str] = TEXTS, *, frozen: str = "embeddings", training: bool = False
) -> ClientStep:
    language_model = type(model).__name__.startswith("GPT2")
    tokenizer = tiny.gpt2_tokenizer() if language_model else tiny.bert_tokenizer()
    task: Any = "causal-lm" if language_model else "classification"
    labels = None if language_model else [i % 2 for i in range(len(texts))]
    batch = make_batch(tokenizer, list(texts), labels, task, tiny.POSITIONS)
    batch = with_random_state(batch, 3) if training else batch
    names = frozenset(name for name, _ in model.named_parameters() if frozen and frozen in name)
    facts = public_facts(model, tokenizer, task=task, training=training, frozen=names)
    return ClientStep(model, Truth((batch,)), StepRecipe(training=training), facts)


def _problem(seen: Observation, keep: int = 64, budget: float = 60.0, max_positions: int = 0) -> SpanProblem:
    rng = torch.Generator().manual_seed(0)
    return span_problem_of(seen, keep=keep, beam=8, max_positions=max_positions, rng=rng, budget=Budget(budget))


def _inside(problem: SpanProblem) -> Candidates:
    pairs = problem.scan()
    return pairs.take((pairs.distance < FARTHEST_INSIDE).nonzero().flatten())


def _pairs(*pairs: tuple[int, int]) -> Candidates:
    """Return (token, position) pairs as readers pass them."""
    found = torch.tensor(pairs)
    return Candidates(found[:, 0], found[:, 1], torch.zeros(len(pairs)), torch.zeros(len(pairs), HIDDEN))


def test_every_true_sequence_of_an_exact_update_is_in_reach_and_passes() -> None:
    """Two sentences, dropout off, nothing granted."""
    step = _step(_model())
    problem = _problem(step.observe())
    reach = span_reach(problem, _inside(problem), FARTHEST_INSIDE)
    for ids in step.truth.sequences():
        assert all(reach.tokens(ids)) and reach.passes(ids) is True


def test_a_token_of_another_batch_is_not_in_reach_and_its_sequence_does_not_pass() -> None:
    """One word replaced: that token only, and the sequence as a whole."""
    step = _step(_model())
    problem = _problem(step.observe())
    reach = span_reach(problem, _inside(problem), FARTHEST_INSIDE)
    (ids, _) = step.truth.sequences()
    wrong = (*ids[:3], tiny.VOCABULARY["fish"], *ids[4:])
    assert reach.tokens(wrong) == tuple(place != 3 for place in range(len(ids)))
    assert reach.passes(wrong) is False


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_the_second_block_refuses_sequences_mixed_from_true_pairs(kind: str) -> None:
    """Each pair lies in the first block's span; the second reads the whole sequence."""
    step = _step(_model(kind))
    problem = _problem(step.observe())
    inside = _inside(problem)
    reach = replace(span_reach(problem, inside, FARTHEST_INSIDE), last=frozenset(range(len(tiny.VOCABULARY))))
    one, other = step.truth.sequences()
    mixed = (*one[:4], *other[4:])
    assert all(reach.tokens(mixed)) and reach.passes(mixed) is False
    assert reach.passes(one) and reach.passes(other)


@pytest.mark.parametrize(("kind", "layers", "frozen"), [("bert", 2, "layer.1.attention.self"), ("gpt2", 1, "wte")])
def test_without_a_second_block_the_first_ones_span_decides(kind: str, layers: int, frozen: str) -> None:
    """It is frozen or does not exist: the mixed sequence passes, as in the attack."""
    step = _step(_model(kind, layers), frozen=frozen)
    problem = _problem(step.observe())
    reach = replace(span_reach(problem, _inside(problem), FARTHEST_INSIDE), last=frozenset(range(len(tiny.VOCABULARY))))
    one, other = step.truth.sequences()
    assert reach.passes((*one[:4], *other[4:])) is True
    assert reach.passes((*one[:3], tiny.VOCABULARY["fish"], *one[4:])) is False


def test_a_second_block_behind_dropout_is_not_used() -> None:
    """Dropout in the first block hides its inputs: it would refuse true sequences."""
    model = _model()
    model.bert.encoder.layer[0].output.dropout.p = 0.3
    step = _step(model, training=True)
    seen = step.observe()
    assert any(seen.facts.dropout.values())
    problem = _problem(seen)
    assert problem.dropout == 0.0
    reach = span_reach(problem, _inside(problem), FARTHEST_INSIDE)
    assert [reach.passes(ids) for ids in step.truth.sequences()] == [True, True]


def test_a_sequence_longer_than_the_attack_looks_does_not_pass() -> None:
    """The attack scans so many positions and no more; longer ones must not fail."""
    step = _step(_model())
    problem = _problem(step.observe(), max_positions=8)
    reach = span_reach(problem, _inside(problem), FARTHEST_INSIDE)
    (ids, _) = step.truth.sequences()
    assert len(ids) > 8 and reach.passes(ids) is False
    assert reach.tokens(ids) == tuple(place < 8 for place in range(len(ids)))
    assert reach.passes(()) is False


def test_the_last_token_of_a_language_model_is_in_reach_by_other_evidence_only() -> None:
    """It predicts nothing and gets no gradient; the rest of the sequence does."""
    step = _step(_model("gpt2"))
    problem = _problem(step.observe())
    (ids, _) = step.truth.sequences()
    blind = span_reach(problem, _inside(problem), FARTHEST_INSIDE)
    assert blind.tokens(ids) == tuple(place < len(ids) - 1 for place in range(len(ids)))
    assert blind.passes(ids) is False
    told = replace(span_reach(problem, _inside(problem), FARTHEST_INSIDE), last=frozenset({ids[-1]}))
    assert all(told.tokens(ids)) and told.passes(ids) is True


def test_inputs_without_positions_are_in_reach_wherever_they_stand() -> None:
    """A bag of words: tokens have no place, and nothing tests a sequence."""
    reach = bag_of_words_reach([7, 9])
    assert reach.tokens((9, 8, 7)) == (True, False, True) and reach.passes((9, 7)) is None


def test_with_only_images_spanned_the_pairs_are_the_test() -> None:
    """With adapters at their start the span of the inputs themselves is empty."""
    problem = _problem(_step(_model()).observe())
    blind = replace(problem, basis=replace(problem.basis, vectors=problem.basis.vectors[:0]))
    reach = span_reach(blind, _pairs((5, 0), (6, 1)), FARTHEST_INSIDE)
    assert (reach.passes((5, 6)), reach.passes((5, 7))) == (True, False)


def test_behind_masks_a_sequence_passes_if_each_of_its_pairs_was_found() -> None:
    """All fitted pairs are candidates; what was fitted and not found is refused."""
    problem = _problem(_step(_model()).observe())
    reach = dropout_reach(problem, _pairs((5, 0), (6, 1), (8, 1)), _pairs((5, 0), (6, 1)), all_tried=True)
    assert reach.tokens((5, 8)) == (True, True) and reach.tokens((9, 6)) == (False, True)
    assert [reach.passes(ids) for ids in ((5, 6), (5, 8), (9, 6))] == [True, False, False]


def test_behind_masks_pairs_that_were_not_tried_in_time_are_not_refused() -> None:
    """A search that was cut short knows only what it found."""
    problem = _problem(_step(_model()).observe())
    reach = dropout_reach(problem, _pairs((5, 0), (6, 1), (8, 1)), _pairs((5, 0), (6, 1)), all_tried=False)
    assert (reach.passes((5, 6)), reach.passes((5, 8))) == (True, None)


def test_ranked_pairs_are_candidates_without_a_test() -> None:
    """Nothing passes or fails."""
    problem = _problem(_step(_model()).observe())
    reach = ranked_reach(problem, _pairs((5, 0), (6, 1)))
    assert reach is not None
    assert reach.tokens((5, 5)) == (True, False) and reach.passes((5, 6)) is None


def test_a_ranking_that_ruled_out_nothing_gives_no_reach() -> None:
    """All tokens of a small vocabulary were kept, so every true one is among them."""
    problem = _problem(_step(_model()).observe(), keep=len(tiny.VOCABULARY))
    everything = _pairs(*((token, place) for token in range(len(tiny.VOCABULARY)) for place in range(2)))
    assert ranked_reach(problem, everything) is None


def test_asking_leaves_no_trace() -> None:
    """The same questions in another order get the same answers."""
    step = _step(_model())
    seen = step.observe()
    problem = _problem(seen)
    reach = span_reach(problem, _inside(problem), FARTHEST_INSIDE)
    one, other = step.truth.sequences()
    questions = [one, (*one[:4], *other[4:]), other]
    before = {name: p.detach().clone() for name, p in seen.model.named_parameters()}
    first = [(reach.tokens(ids), reach.passes(ids)) for ids in questions]
    again = [(reach.tokens(ids), reach.passes(ids)) for ids in reversed(questions)]
    assert first == again[::-1]
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in seen.model.named_parameters())
    assert not seen.model.training


def test_a_sequence_grown_word_by_word_passes_if_its_prefixes_do() -> None:
    """The test gets the tokens with a gradient, never too many, and never none."""
    problem = _problem(_step(_model("gpt2")).observe())
    asked: list[list[int]] = []

    def test(ids: torch.Tensor) -> bool:
        asked.append(ids.tolist())
        return ids.tolist() == [5, 6]

    allowed = {0: torch.tensor([5]), 1: torch.tensor([6, 7])}
    reach = prefix_reach(problem, allowed, test, last=[9])
    assert reach.tokens((5, 7, 9)) == (True, True, True) and reach.tokens((6, 6, 8)) == (False, True, False)
    assert (reach.passes((5, 6, 9)), reach.passes((5, 7, 9)), reach.passes((5, 6, 8))) == (True, False, False)
    assert reach.passes((5,) * (tiny.POSITIONS + 2)) is False and reach.passes((9,)) is False
    assert asked == [[5, 6], [5, 7], [5, 6]]


@pytest.mark.parametrize("kind", ["encoder", "dropout", "decoder"])
def test_every_reader_says_what_was_in_reach(kind: str) -> None:
    """The true sequences are in reach; one with a foreign word is not."""
    model = _model("gpt2") if kind == "decoder" else _model(dropout=0.1 if kind == "dropout" else 0.0)
    step = _step(model, TEXTS[:1], training=kind == "dropout", frozen="" if kind == "decoder" else "embeddings")
    guess = Span()(step.observe(), torch.Generator().manual_seed(0), Budget(600))
    (ids,) = step.truth.sequences()
    assert guess.reach is not None
    assert all(guess.reach.tokens(ids)) and guess.reach.passes(ids) is True
    wrong = (*ids[:3], tiny.VOCABULARY["fish"], *ids[4:])
    assert guess.reach.passes(wrong) is False


def test_under_noise_nothing_passes_or_fails() -> None:
    """Pairs are ranked and nothing is tested, so no sequence gets a verdict."""
    step = _step(_model(), TEXTS[:1])
    seen = step.observe()
    generator = torch.Generator().manual_seed(1)
    noisy = {name: g + 0.5 * g.std() * torch.randn(g.shape, generator=generator) for name, g in seen.update.items()}
    guess = Span()(replace(seen, update=noisy), torch.Generator().manual_seed(0), Budget(600))
    assert guess.sequences
    assert guess.reach is None or guess.reach.passes(step.truth.sequences()[0]) is None
