"""The span attack on low-rank adapters and on local steps; nothing is granted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from leakaudit.algorithms.span.matching_pursuit import find_words
from leakaudit.algorithms.span.readers.local_steps import rounding_error, whitened_update
from leakaudit.attacks.span import Span
from leakaudit.audit.verification import verify
from leakaudit.client.batches import make_batch, public_facts
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.models.lora import add_lora, is_adapter
from leakaudit.models.structure import anatomy_of, input_stage_of
from leakaudit.plugins.attack_protocol import Reconstruction
from leakaudit.plugins.budget import Budget
from leakaudit.results.schema import VerificationStatus
from tests.support import tiny

TEXTS = ("the old dog chased a small cat near the river .", "never saw three big horse under blue tree")


def _model(rank: int | None = None, trained: bool = True) -> Any:
    model = tiny.wide_bert()
    if rank is not None:
        pytest.importorskip("peft")
        add_lora(model, rank)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name and trained:
                    parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    return model


def _step(model: Any, *batches: tuple[str, ...], **facts: Any) -> ClientStep:
    tokenizer = tiny.bert_tokenizer()
    made = [make_batch(tokenizer, list(b), [1] * len(b), "classification", tiny.POSITIONS) for b in batches]
    names = [name for name, _ in model.named_parameters()]
    lora = any(map(is_adapter, names))
    frozen = {n for n in names if (lora and not (is_adapter(n) or n.startswith("classifier"))) or "embeddings" in n}
    public = public_facts(model, tokenizer, task="classification", training=False, frozen=frozenset(frozen), **facts)
    return ClientStep(model, Truth(tuple(made)), StepRecipe(training=False), public)


def _attack(seen: Observation) -> Reconstruction:
    return Span()(seen, torch.Generator().manual_seed(0), Budget(600))


def _proved(step: ClientStep) -> bool:
    guess = _attack(step.observe())
    sequences = guess.sequences or ()
    return {s.token_ids for s in sequences} == set(step.truth.sequences()) and all(s.proved for s in sequences)


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_a_sentence_comes_back_from_adapters_of_fewer_rows_than_it_has_tokens(rank: int) -> None:
    """Twelve and a repeated word from two, four and sixteen rows: proved."""
    step = _step(_model(rank), TEXTS[:1])
    assert len(step.truth.sequences()[0]) == 13 and _proved(step)


def test_at_the_start_the_images_under_a_name_the_tokens() -> None:
    """B is zero, and so is the update of A; rank 16 holds the images of 13 tokens."""
    step = _step(_model(16, trained=False), TEXTS[:1])
    seen = step.observe()
    assert not any(bool(g.any()) for name, g in seen.update.items() if ".lora_A." in name)
    assert _proved(step)


def test_at_the_start_a_rank_that_the_tokens_fill_is_not_applicable_with_the_numbers() -> None:
    """The images of 13 tokens are all of 8 dimensions."""
    found = Span().applies(_step(_model(8, trained=False), TEXTS[:1]).observe())
    assert not found and "fills their rank (8, 8)" in found.reason


@pytest.mark.parametrize(("rank", "trained"), [(4, True), (32, True), (32, False)])
def test_several_sentences_show_their_words(rank: int, trained: bool) -> None:
    """At least in no order, from fewer rows than tokens, from more, and from images."""
    step = _step(_model(rank, trained), TEXTS)
    guess = _attack(step.observe())
    named = {token for sequence in guess.sequences or () if sequence.proved for token in sequence.token_ids}
    assert named | set(guess.tokens or ()) == {token for ids in step.truth.sequences() for token in ids}


def test_rows_of_another_kind_are_explained_by_no_words() -> None:
    """Random rows: the search ends and claims nothing."""
    model = _model(2)
    anatomy = anatomy_of(model)
    stage = input_stage_of(model, tiny.POSITIONS)
    rows = torch.randn(4, anatomy.hidden, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert find_words(stage, rows, tiny.POSITIONS, Budget(600)) is None


@pytest.mark.parametrize("rate", [1e-2, 1e-4])
def test_a_difference_of_weights_gives_the_sentence_and_proves_it(rate: float) -> None:
    """Rounding the weights is most of the error, and the proof rounds alike."""
    step = _step(_model(), TEXTS[:1], view="delta", learning_rate=rate)
    assert _proved(step)


def test_local_steps_show_the_words_of_all_their_batches() -> None:
    """Two steps of one text each: exactly their words are found."""
    step = _step(_model(), TEXTS[:1], TEXTS[1:], view="delta", learning_rate=1e-3, local_steps=2)
    seen = step.observe()
    weights = {name: p.detach() for name, p in seen.model.named_parameters()}
    rows = whitened_update(seen.update, anatomy_of(seen.model), weights, seen.facts)
    words = find_words(input_stage_of(seen.model, tiny.POSITIONS), rows, tiny.POSITIONS, Budget(600), noise=1.0)
    assert words is not None
    assert set(words.tokens.tolist()) == {token for ids in step.truth.sequences() for token in ids}
    assert _attack(seen).sequences


def test_the_difference_is_that_of_plain_sgd_and_leaves_the_model_alone() -> None:
    """Against torch's own optimizer on a copy."""
    model, twin = _model(), _model()
    step = _step(model, TEXTS[:1], TEXTS[1:], view="delta", learning_rate=0.1, local_steps=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update = step.update()
    shared = {name: p for name, p in twin.named_parameters() if name in step.facts.shared}
    optimizer = torch.optim.SGD(shared.values(), lr=0.1)
    for batch in step.truth.micro_batches:
        optimizer.zero_grad()
        twin(**batch.inputs).loss.backward()
        optimizer.step()
    for name, parameter in shared.items():
        assert torch.allclose(update[name], (before[name] - parameter.detach()) / 0.2, atol=1e-6)
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in model.named_parameters())
    assert verify(step, update).status is VerificationStatus.VERIFIED


def test_the_rounding_error_is_as_large_as_measured() -> None:
    """Over many entries of one size, against float64."""
    weight = torch.full((300, 300), 0.3)
    gradient = torch.randn(300, 300, generator=torch.Generator().manual_seed(0)) * 1e-3
    facts = replace_view(_step(_model(), TEXTS[:1]).facts)
    seen = (weight - (weight - 1e-3 * gradient)) / 1e-3
    measured = float((seen.double() - gradient.double()).std())
    assert rounding_error(weight, facts) == pytest.approx(measured, rel=0.05)
    assert rounding_error(weight, facts.model_copy(update={"view": "local"})) == 0.0


def replace_view(facts: Any) -> Any:
    return facts.model_copy(update={"view": "delta", "learning_rate": 1e-3})


def test_an_adapters_attack_ignores_what_it_is_not_shown() -> None:
    """Without B's update the guess from A's rows is the same."""
    seen = _step(_model(8), TEXTS[:1]).observe()
    hidden = {name: g for name, g in seen.update.items() if ".lora_B." not in name}
    one, two = _attack(seen), _attack(replace(seen, update=hidden))
    assert [s.token_ids for s in one.sequences or ()] == [s.token_ids for s in two.sequences or ()] != []
