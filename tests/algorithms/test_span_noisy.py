"""Noisy updates: parts against brute force, and whole attacks on a small encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from leakaudit.algorithms.span import subspace
from leakaudit.algorithms.span.hypothesis_search import Hypothesis, Neighbours, Simulation, local_search
from leakaudit.algorithms.span.soft_ranking import Ranking
from leakaudit.algorithms.span.sparse_regression import JointFit
from leakaudit.algorithms.span.subspace import filled_in, noise_of, soft_span_of
from leakaudit.attacks.span import Span
from leakaudit.client.noise_level import NoiseLevel
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.models.structure import find_anatomy, input_stage_of
from leakaudit.plugins.attack_protocol import Reconstruction
from leakaudit.plugins.budget import Budget
from leakaudit.registry import defenses
from tests.support import tiny

TEXT = "the old dog chased a small cat near the river ."


def _step(model: Any | None = None) -> ClientStep:
    model = tiny.wide_bert() if model is None else model
    frozen = frozenset(name for name, _ in model.named_parameters() if "embeddings" in name)
    return tiny.client_step(model, tiny.bert_tokenizer(), [TEXT], [2], frozen=frozen)


def _read(step: ClientStep, name: str, **knobs: Any) -> Reconstruction:
    defended = dict(defenses)[name](**knobs)(step, step.observe(), torch.Generator().manual_seed(1))
    return Span()(defended, torch.Generator().manual_seed(0), Budget(600))


def _gradient(step: ClientStep, ids: tuple[int, ...], label: int) -> dict[str, Tensor]:
    """Return the gradient of one hypothesis by plain autograd."""
    names, parameters = zip(*step.model.named_parameters(), strict=True)
    with torch.enable_grad():
        loss = step.model(input_ids=torch.tensor([ids]), labels=torch.tensor([label])).loss
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: g.double() for n, g in zip(names, found, strict=True) if g is not None}


@pytest.mark.parametrize("kind", ["BERT", "GPT-2"])
def test_hypotheses_score_as_their_gradients_do_without_any_gradient_being_formed(kind: str) -> None:
    """<g, G> / |g| over all linear layers, against autograd.

    Hypotheses are padded to different lengths; Conv1D layers are stored transposed.
    """
    if kind == "BERT":
        step = _step(tiny.bert(num_labels=3))
    else:
        step = tiny.client_step(tiny.gpt2_classifier(num_labels=3), tiny.gpt2_tokenizer(), [TEXT], [2])
    seen = step.observe()
    simulation = Simulation(seen)
    hypotheses = [Hypothesis((2, 7, 9, 11, 3), 0), Hypothesis((2, 8, 3), 2)]
    found = simulation.explains(hypotheses)
    names = [layer.weight for layer in simulation.layers]
    for hypothesis, score in zip(hypotheses, found.tolist(), strict=True):
        own = _gradient(step, hypothesis.token_ids, hypothesis.label)
        inner = sum(float((own[n] * seen.update[n]).sum()) for n in names)
        norm = sum(float(own[n].square().sum()) for n in names) ** 0.5
        assert score == pytest.approx(inner / norm, rel=1e-3)


def test_every_linear_layer_is_found_and_nothing_else() -> None:
    """Two blocks of six, pooler and classifier; no tables and no gains."""
    step = _step()
    names = {layer.weight for layer in Simulation(step.observe()).layers}
    wanted = {n for n, p in step.model.named_parameters() if p.dim() == 2 and "embeddings" not in n}
    assert names == wanted and len(names) == 14


def test_a_local_search_ends_at_the_true_sentence() -> None:
    """Two words are wrong, without noise: one sweep over all words is enough."""
    step = _step()
    (truth,) = step.truth.sequences()
    start = Hypothesis((*truth[:3], truth[3] + 1, *truth[4:6], truth[6] + 1, *truth[7:]), 2)
    words = list(range(5, len(tiny.VOCABULARY)))
    everything = [words if position in (3, 5, 6) else [] for position in range(len(truth))]
    found = local_search(
        Simulation(step.observe()),
        start,
        Neighbours(moves=lambda base: [], propose=lambda base, width: everything, widths=(1,)),
        done=lambda base: False,
        most=5000,
        budget=Budget(600),
    )
    assert found.best.token_ids == truth
    assert found.runner_up < found.score


def test_noise_is_measured_beside_a_strong_signal() -> None:
    """A matrix of rank five a hundred times as strong, and noise of deviation 0.01."""
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(120, 5, generator=generator).double() @ torch.randn(5, 80, generator=generator).double()
    noise = 0.01 * torch.randn(120, 80, generator=generator).double()
    assert noise_of(low + noise) == pytest.approx(0.01, rel=0.1)
    assert noise_of(torch.zeros(4, 4).double()) > 0


def test_weights_of_directions_are_how_much_of_them_is_signal() -> None:
    """The predicted squared cosine of one planted direction is the measured one."""
    step = _step()
    anatomy = find_anatomy(step.model)
    measured, predicted = [], []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        true = torch.nn.functional.normalize(torch.randn(96, generator=generator), dim=0)
        update = {}
        for projection in anatomy.projections:
            left = torch.randn(96, generator=generator)
            update[projection.weight] = 1.3 * torch.outer(left, true) + torch.randn(96, 96, generator=generator)
        span = soft_span_of(update, anatomy, NoiseLevel(dict.fromkeys(update, 1.0)))
        measured.append(float(span.vectors[0] @ true.double()) ** 2)
        predicted.append(float(span.weights[0]))
    assert sum(predicted) / 12 == pytest.approx(sum(measured) / 12, abs=0.05)
    assert sum(measured) / 12 < 0.9  # noise does turn it


def test_what_pruning_removed_is_filled_in() -> None:
    """Rank three without the smaller half of its entries: the others determine them."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(120, 3, generator=generator).double() @ torch.randn(3, 60, generator=generator).double()
    cut = float(whole.abs().median())
    pruned = whole * (whole.abs() > cut)
    smallest = float(pruned[pruned != 0].abs().min())
    filled = filled_in(pruned, smallest)
    assert torch.equal(filled[pruned != 0], pruned[pruned != 0])
    assert float((filled - whole).norm()) < 0.2 * float((pruned - whole).norm())


def test_words_are_found_together_that_no_direction_names_alone() -> None:
    """Six planted rows among forty candidates each, with much noise."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(40, 64, generator=generator).double() for _ in range(6)]
    true = [3, 17, 0, 39, 8, 21]
    rows = torch.stack([x[i] for x, i in zip(inputs, true, strict=True)])
    stacked = 0.5 * torch.randn(100, 6, generator=generator).double() @ rows + torch.randn(100, 64, generator=generator)
    pools = [torch.arange(40)] * 6
    fit = JointFit(stacked.T @ stacked, 100, pools, inputs)
    found = fit.solve(Budget(600))
    assert list(found.token_ids) == true
    assert found.score >= fit.sketch(Budget(600)).score > 0


def test_linear_and_quadratic_forms_are_those_of_the_inputs() -> None:
    """|x|^2 and x . row of every token at every position, against the inputs."""
    step = _step()
    stage = input_stage_of(step.model, tiny.POSITIONS)
    assert stage.additive
    vectors = torch.eye(96).double()[:4]
    ranking = Ranking.of(stage, vectors, torch.ones(4).double(), 3)
    rows = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).double()
    tokens = torch.arange(stage.vocabulary)
    for position in range(3):
        x = stage.inputs(tokens, torch.full_like(tokens, position))
        torch.testing.assert_close(ranking.squared_norms[:, position].double(), x.square().sum(1), rtol=1e-3, atol=1e-3)
        inner = ranking.inner_products(rows)[:, position].double()
        torch.testing.assert_close(inner, x @ rows[position], rtol=1e-3, atol=1e-3)
        share = x[:, :4].square().sum(1) / x.square().sum(1)
        expected = (share - share.mean()) / share.std()
        torch.testing.assert_close(ranking.soft[:, position].double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("gaussian-noise", {"scale": 0.03}),
        ("laplace-noise", {"scale": 0.03}),
        ("prune", {"share": 0.5}),
        ("round", {"dtype": "bf16"}),
        ("quantize", {"bits": 8}),
    ],
)
def test_a_sentence_with_little_noise_comes_back_with_confidence_and_without_proof(name: str, knobs: Any) -> None:
    """Its length, too; nothing is granted."""
    step = _step()
    guess = _read(step, name, **knobs)
    assert guess.sequences is not None
    (found,) = guess.sequences
    assert found.token_ids == step.truth.sequences()[0]
    assert found.own_score > 0.8 and not found.proved


def test_noise_that_hides_everything_leaves_little_confidence() -> None:
    """A hundred times the signal."""
    guess = _read(_step(), "gaussian-noise", scale=100.0)
    assert guess.sequences is not None
    assert all(sequence.own_score < 0.5 for sequence in guess.sequences)


def test_an_observation_is_left_as_it_was() -> None:
    """Neither the update nor the model's gradients change."""
    step = _step()
    seen: Observation = dict(defenses)["sign"]()(step, step.observe(), torch.Generator())
    before = seen.digest()
    Span()(seen, torch.Generator().manual_seed(0), Budget(600))
    assert seen.digest() == before
    assert all(p.grad is None for p in seen.model.parameters())


def test_a_spectrum_that_is_not_found_at_first_is_found_at_the_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates pruned to a hundredth, which are mostly zeros, need it."""
    rows = torch.zeros(5, 12, dtype=torch.float64)
    rows[:, :3] = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = rows.T @ rows
    plain, tries = torch.linalg.eigh, iter([True, False])

    def gives_up_once(matrix: Tensor) -> tuple[Tensor, Tensor]:
        if next(tries):
            raise RuntimeError("failed to converge")
        values, vectors = plain(matrix)
        return values, vectors

    expected = plain(gram).eigenvalues
    monkeypatch.setattr(torch.linalg, "eigh", gives_up_once)
    values, vectors = subspace.spectrum(gram)
    torch.testing.assert_close(values, expected, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(vectors @ torch.diag(values) @ vectors.T, gram, atol=1e-10, rtol=1e-9)
