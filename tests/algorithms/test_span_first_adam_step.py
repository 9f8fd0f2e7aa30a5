"""The span attack on whole layers after local steps of AdamW; nothing is granted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.algorithms.adam_step import AdamStep, clipping_factor, known_rows, step_disagreement
from leakaudit.algorithms.gradient_estimate import as_gradient, invert_adam
from leakaudit.algorithms.resimulation import DISAGREES, prove
from leakaudit.attacks.span import Span
from leakaudit.client.observation import Observation
from leakaudit.client.optimizer import ClientOptimizer, ParameterGroup
from leakaudit.client.step import ClientStep
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.testing.small_models import client_step
from tests.support import tiny

EPS = 1e-8
ONE = ["the old dog chased a small cat ."]
TWO = ["the old dog chased a small cat .", "a bird saw the river ."]


def _step(
    texts: list[str],
    rate: float,
    steps: int = 1,
    *,
    clip: float | None = 0.01,
    model: nn.Module | None = None,
    **more: Any,
) -> ClientStep:
    """Return the local steps of a client with a fresh AdamW.

    Each of several steps takes one text. Gradients are clipped, so that their entries are as small as those of a large model.
    """
    model = tiny.wide_bert() if model is None else model
    names = tuple(name for name, _ in model.named_parameters() if name not in more.get("frozen", ()))
    group = ParameterGroup(
        parameters=names,
        learning_rates=(rate,) * steps,
        options={"betas": (0.9, 0.999), "eps": EPS, "weight_decay": 0.01, "amsgrad": False},
    )
    optimizer = ClientOptimizer(algorithm="AdamW", groups=(group,))
    made = client_step(
        model,
        tiny.bert_tokenizer(),
        texts,
        list(range(len(texts))),
        view="delta",
        local_steps=steps,
        learning_rate=rate,
        optimizer=optimizer,
        max_grad_norm=clip,
        **more,
    )
    made = replace(made, recipe=made.recipe.model_copy(update={"max_grad_norm": clip}))
    if steps == 1:
        return made
    batch = made.truth.micro_batches[0]
    parts = tuple(
        replace(batch, inputs={name: value[row : row + 1] for name, value in batch.inputs.items()})
        for row in range(len(texts))
    )
    return replace(made, truth=replace(made.truth, micro_batches=parts))


def _read(seen: Observation) -> Reconstruction:
    attack = Span()
    assert attack.applies(seen)
    return attack(seen, tiny.generator(), Budget(60))


@pytest.mark.parametrize("rate", [5e-5, 1e-3])
def test_one_text_is_read_and_proved(rate: float) -> None:
    """A first step of AdamW gives the text exactly, whatever the learning rate."""
    step = _step(ONE, rate)
    found = _read(step.observe())
    assert [(s.token_ids, s.proved) for s in found.sequences or ()] == [(step.truth.sequences()[0], True)]


def test_one_text_with_large_gradients_is_read_by_its_rows() -> None:
    """Where every movement is a sign, words and positions still move alike."""
    step = _step(ONE, 5e-5, clip=None)
    found = _read(step.observe())
    assert [(s.token_ids, s.proved) for s in found.sequences or ()] == [(step.truth.sequences()[0], True)]


def test_two_texts_are_read_and_proved() -> None:
    """Several texts are told apart."""
    step = _step(TWO, 1e-3)
    found = _read(step.observe())
    assert {s.token_ids for s in found.sequences or ()} == set(step.truth.sequences())
    assert all(s.proved for s in found.sequences or ())


def test_a_guess_with_one_wrong_word_is_not_proved() -> None:
    """If one word of a guess is wrong, most entries move otherwise than it predicts."""
    step = _step(ONE, 5e-5)
    seen, (right,) = step.observe(), step.truth.sequences()
    wrong = (*right[:3], tiny.ids_of("bird")[1], *right[4:])
    errors = {}
    for name, ids in (("right", right), ("wrong", wrong)):
        proof = prove(seen, [GuessedSequence(ids)], Budget(60))
        assert proof.sequences[0].proved is (name == "right")
        errors[name] = proof.diagnostics["resimulation_error"]
    assert errors["right"] < DISAGREES / 5
    assert errors["wrong"] > 5 * DISAGREES


def test_words_of_several_steps_are_those_whose_rows_moved() -> None:
    """After several steps of Adam the words are exact, and no sentence is claimed."""
    step = _step(TWO, 1e-3, steps=2)
    found = _read(step.observe())
    known = step.facts.vocabulary.wordless_ids
    assert found.sequences is None
    assert set(found.tokens or ()) == {token for ids in step.truth.sequences() for token in ids} - known


def test_a_regression_removes_nearly_all_rounding() -> None:
    """Rows in a known space have errors far below their entries', and as stated."""
    generator = tiny.generator()
    basis = torch.linalg.qr(torch.randn(200, 10, generator=generator, dtype=torch.float64))[0].T
    gradient = 1e-4 * torch.randn(30, 10, generator=generator, dtype=torch.float64) @ basis
    moved = gradient / (gradient.abs() + EPS)
    off = torch.full_like(moved, 1e-5)
    seen = moved + 3**0.5 * off * (2 * torch.rand(moved.shape, generator=generator, dtype=torch.float64) - 1)
    estimate, _ = invert_adam(seen, off, EPS)
    found, error = known_rows(seen, off, EPS, basis)
    rough, fine = (float((g - gradient).norm() / gradient.norm()) for g in (estimate, found))
    assert fine < rough / 20
    stated = float(error.square().mean().sqrt() / gradient.square().mean().sqrt())
    assert 0.5 < stated / fine < 2.0


def test_the_clipping_factor_of_a_right_guess_is_found() -> None:
    """A client that clips scales its gradient by one factor, which the step tells."""
    step = _step(ONE, 5e-5, clip=None)
    plain = replace(step, facts=step.facts.model_copy(update={"view": "local", "optimizer": None})).update()
    clipped = replace(step, recipe=step.recipe.model_copy(update={"max_grad_norm": 0.01})).observe()
    adam = AdamStep.of(clipped)
    assert adam is not None
    norm = torch.stack([g.norm() for g in plain.values()]).norm()
    matrices = {name: g for name, g in plain.items() if g.dim() == 2 and bool(g.any())}
    assert clipping_factor(adam, matrices) == pytest.approx(0.01 / float(norm), rel=1e-4)
    assert step_disagreement(adam, matrices) < DISAGREES
    assert step_disagreement(adam, {name: -g for name, g in matrices.items()}) == 1.0


def test_an_estimate_is_made_once_for_an_observation() -> None:
    """Many attacks read the same estimate."""
    seen = _step(ONE, 1e-3).observe()
    assert as_gradient(seen)[0] is as_gradient(seen)[0]
    assert AdamStep.of(seen) is AdamStep.of(as_gradient(seen)[0])
