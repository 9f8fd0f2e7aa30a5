"""`pooler-features`: moments against known features, and the whole attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count, permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from leakaudit.algorithms.matching import feature_matcher
from leakaudit.algorithms.matching.descent import Descent
from leakaudit.algorithms.matching.feature_matcher import FeatureMatcher, best_assignment
from leakaudit.algorithms.matching.feature_refinement import SearchResult
from leakaudit.algorithms.matching.objective import Objective
from leakaudit.algorithms.matching.pooler_moments import (
    PoolerUpdate,
    decompose,
    features_by_tensor,
    features_in_span,
    features_solved,
    signed,
    third_moment,
)
from leakaudit.algorithms.matching.run import Recipe
from leakaudit.algorithms.matching.search import Found
from leakaudit.algorithms.matching.starts import Start
from leakaudit.attacks import pooler_features
from leakaudit.attacks.pooler_features import PoolerFeatures, Reading, read_features
from leakaudit.audit.active_server import WidePooler, on_active_server
from leakaudit.client.facts import Granted
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.plugins.budget import Budget
from tests.support import tiny

TEXTS = ["the old dog chased a cat", "a bird found the red house", "three fish saw two horses"]
SMALL: dict[str, Any] = {"preset": "fast", "steps": 40, "n_init": 5, "round_every": 20}
DIMENSION, FEATURES = 24, 40
"""d' and D of the made-up poolers."""


RECIPE = Recipe(Objective("cosine"), Descent(1, 0.1), Start())


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def cosines(found: Tensor, true: Tensor, *, signs: bool = False) -> Tensor:
    """Return the best one-to-one cosines of found and true features.

    By absolute value unless signs count.
    """
    cosine = functional.normalize(found, dim=1) @ functional.normalize(true[:, : found.shape[1]], dim=1).T
    cosine = cosine if signs else cosine.abs()
    ways = [cosine[range(len(found)), list(way)] for way in permutations(range(len(true)), len(found))]
    return max(ways, key=lambda way: float(way.min()))


def slope_of(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def slope(z: Tensor) -> Tensor:
        live = z.detach().requires_grad_()
        with torch.enable_grad():
            found: Tensor = torch.autograd.grad(activation(live).sum(), live)[0]
        return found

    return slope


SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "selu": slope_of(functional.selu),
    "cube+square": lambda z: 3 * z.square() + 2 * z,
}


def made_up(sequences: int, activation: str, deviation: float, outputs: int = 20_000) -> tuple[PoolerUpdate, Tensor]:
    """Return the update of a pooler on known features (Eq. 7), and the features.

    The features are random around a common part, of length 8.
    """
    drawn = torch.randn(sequences, FEATURES, generator=rng(), dtype=torch.float64) + 0.5
    x = 8 * functional.normalize(drawn, dim=1)
    w = deviation * torch.randn(outputs, DIMENSION, generator=rng(), dtype=torch.float64)
    r = torch.tensor([0.6, -0.3, -0.5, 0.8], dtype=torch.float64)[:sequences] / outputs
    gradients = (SLOPES[activation](w @ x[:, :DIMENSION].T) * r) @ x
    return PoolerUpdate(gradients, w, deviation), x


@pytest.mark.parametrize("components", [1, 2, 4])
def test_a_sum_of_third_powers_is_taken_apart(components: int) -> None:
    """Signs and lengths are exact for any angles and weights of either sign.

    The space has more dimensions than there are vectors.
    """
    vectors = torch.randn(components, 9, generator=rng(), dtype=torch.float64)
    vectors[0] *= -2
    tensor = torch.einsum("na,nb,nc->abc", vectors, vectors, vectors)
    found, explained = decompose(tensor, components, rng())
    assert explained == pytest.approx(1.0, abs=1e-9)
    assert min(float((found - vectors[list(way)]).abs().max()) for way in permutations(range(components))) < 1e-4


def test_nothing_is_made_of_nothing() -> None:
    """A tensor of zeros."""
    found, explained = decompose(torch.zeros(4, 4, 4, dtype=torch.float64), 2, rng())
    assert not bool(found.any()) and explained == 0.0


def test_the_moment_is_symmetric_and_what_the_definition_says() -> None:
    """It equals a loop over outputs; the order of its three indices has no effect."""
    g, v = torch.randn(2, 7, 4, generator=rng(), dtype=torch.float64)
    t1 = sum(torch.einsum("a,bc->abc", g[j], torch.outer(v[j], v[j]) - torch.eye(4)) for j in range(7)) / 7
    assert isinstance(t1, Tensor)
    expected = (t1 + t1.permute(2, 0, 1) + t1.permute(1, 2, 0)) / 3
    found = third_moment(g, v)
    torch.testing.assert_close(found, expected)
    assert all(torch.allclose(found, found.permute(*way)) for way in permutations(range(3)))


def test_steins_lemma_holds() -> None:
    """For cube+square the moment tends to 6 s^2 sum r x^(3) over many outputs.

    The third derivative is 6; here it is the mean.
    """
    update, x = made_up(2, "cube+square", 0.1, outputs=400_000)
    r = torch.tensor([0.6, -0.3], dtype=torch.float64) / 400_000
    short = x[:, :DIMENSION]
    expected = 6 * 0.1**2 * torch.einsum("n,na,nb,nc->abc", r, short, short, short)
    found = third_moment(update.gradients[:, :DIMENSION], update.weights / 0.1)
    assert float((found - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize(
    ("sequences", "activation", "deviation", "least"),
    [
        (1, "selu", 1.0, 0.95),
        (1, "cube+square", 1.0, 0.95),
        (2, "cube+square", 0.1, 0.95),
        (4, "cube+square", 0.1, 0.9),
    ],
)
def test_the_papers_reading_finds_known_features(
    sequences: int, activation: str, deviation: float, least: float
) -> None:
    """In the features that the new outputs look at, up to signs."""
    update, x = made_up(sequences, activation, deviation)
    found = features_by_tensor(update, sequences, rng())
    assert found.rows.shape == (sequences, DIMENSION)
    assert float(cosines(found.rows, x).min()) > least


@pytest.mark.parametrize(
    ("sequences", "activation", "deviation"), [(1, "selu", 1.0), (2, "selu", 0.3), (4, "cube+square", 0.1)]
)
def test_within_the_span_they_come_back_in_all_coordinates(sequences: int, activation: str, deviation: float) -> None:
    """Unused coordinates are found as well, and closer than by the tensor alone."""
    update, x = made_up(sequences, activation, deviation)
    found = features_in_span(update, sequences, rng())
    assert found.rows.shape == (sequences, FEATURES)
    assert float(cosines(found.rows, x).min()) > 0.98
    assert float(cosines(found.rows, x).min()) >= float(
        cosines(features_by_tensor(update, sequences, rng()).rows, x).min()
    )


def test_solving_gives_signs_and_lengths() -> None:
    """Exactly, because the equations are."""
    update, x = made_up(4, "cube+square", 0.1)
    start = features_in_span(update, 4, rng())
    found = features_solved(update, start, SLOPES["cube+square"], torch.tensor([6.0]), x.mean(dim=0))
    assert found is not None and found.solved and found.explained > 1 - 1e-9
    assert float(cosines(found.rows, x, signs=True).min()) > 1 - 1e-6
    assert found.rows.norm(dim=1).tolist() == pytest.approx([8.0] * 4, rel=1e-4)


def test_equations_that_do_not_hold_have_no_solution() -> None:
    """With dropout of every output the solution does not explain the update."""
    update, x = made_up(2, "cube+square", 0.1)
    masks = (torch.rand(20_000, 2, generator=rng()) > 0.5).double()
    r = torch.tensor([0.6, -0.3], dtype=torch.float64)
    dropped = (SLOPES["cube+square"](update.weights @ x[:, :DIMENSION].T) * r * masks * 2) @ x
    harmed = PoolerUpdate(dropped, update.weights, update.deviation)
    start = features_in_span(harmed, 2, rng())
    assert float(cosines(start.rows, x).min()) > 0.95
    assert features_solved(harmed, start, SLOPES["cube+square"], torch.tensor([8.0]), x.mean(dim=0)) is None


def test_equal_texts_are_one_feature() -> None:
    """The span has fewer directions than there are sequences, and no more are named."""
    update, x = made_up(1, "cube+square", 0.1)
    found = features_in_span(update, 3, rng())
    assert found.rows.shape == (1, FEATURES)
    assert float(cosines(found.rows, x).min()) > 1 - 1e-6


def test_signs_are_those_of_a_reference() -> None:
    """Rows at a right angle to it keep theirs."""
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, -3.0]])
    assert signed(rows, torch.tensor([2.0, 0.0])).tolist() == [[1.0, 0.0], [1.0, 0.0], [0.0, -3.0]]


def step_of(texts: list[str], **server: Any) -> ClientStep:
    """Return the step of a client on the tiny BERT with a wide pooler."""
    honest = tiny.client_step(
        tiny.bert(initializer_range=0.15), tiny.bert_tokenizer(), texts, [n % 2 for n in range(len(texts))]
    )
    return on_active_server(honest, WidePooler(**{"width": 8000, "dimension": 24, **server}))


def granted(step: ClientStep) -> Observation:
    """Return what is seen of it, labels and lengths granted."""
    lengths = tuple(map(len, step.truth.sequences()))
    labels = tuple(step.truth.labels() or ())
    return step.observe().granting(Granted(labels=labels, lengths=lengths))


def features_of(step: ClientStep, dense: str = "bert.pooler.dense") -> Tensor:
    """Return (B, D) what really goes into the pooler."""
    taken: list[Tensor] = []
    handle = step.model.get_submodule(dense).register_forward_pre_hook(lambda _, given: taken.append(given[0]))
    with torch.no_grad():
        step.model(**{k: v for k, v in step.truth.micro_batches[0].inputs.items() if k != "labels"})
    handle.remove()
    return taken[0].double()


@pytest.mark.parametrize(("texts", "server", "read", "least"), [
    (TEXTS[:1], {"activation": "selu", "deviation": 1.0}, "paper", 0.9),
    (TEXTS[:1], {}, "paper", 0.95),
    (TEXTS[:2], {}, "span", 0.95),
    (TEXTS, {}, "solve", 0.999),
])  # fmt: skip
def test_the_features_of_a_clients_step_are_read(
    texts: list[str], server: dict[str, Any], read: Any, least: float
) -> None:
    """Through the whole model, loss and float32; with the right signs."""
    step = step_of(texts, **server)
    found = read_features(granted(step), len(texts), read, rng())
    assert len(found.rows) == len(texts)
    assert float(cosines(found.rows, features_of(step), signs=True).min()) > least


def test_the_features_of_a_head_that_calls_a_function_are_read() -> None:
    """As in RoBERTa: the server puts a module between the head's layers."""
    torch.manual_seed(0)
    config = tiny.hf.RobertaConfig(
        vocab_size=len(tiny.VOCABULARY), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.15, pad_token_id=0,
    )  # fmt: skip
    model = tiny.hf.RobertaForSequenceClassification(config).eval()
    honest = tiny.client_step(model, tiny.bert_tokenizer(), TEXTS, [n % 2 for n in range(len(TEXTS))])
    step = on_active_server(honest, WidePooler(width=8000, dimension=24))
    found = read_features(granted(step), len(TEXTS), "solve", rng())
    assert float(cosines(found.rows, features_of(step, "classifier.dense"), signs=True).min()) > 0.999
    assert PoolerFeatures().applies(granted(step))


def test_an_update_of_nothing_names_no_feature() -> None:
    """A certain label gives no update; the search then uses the gradient alone."""
    step = step_of(TEXTS[:1])
    seen = granted(step)
    silent = replace(seen, update={**seen.update, "bert.pooler.dense.weight": torch.zeros(8000, 32)})
    for read in ("paper", "span", "solve"):
        assert read_features(silent, 1, read, rng()).rows.shape[0] == 0
    lengths = tuple(map(len, step.truth.sequences()))
    matcher = FeatureMatcher(seen, lengths, RECIPE, torch.zeros(0, 32), "both", 1.0)
    dummy = matcher.candidates.random(2, rng())
    assert torch.isfinite(matcher.losses(dummy)).all()
    assert torch.isfinite(matcher.losses_and_derivatives(dummy)[0]).all()


def test_the_true_batch_has_no_feature_loss_and_the_derivative_is_right() -> None:
    """Against finite differences; whatever the order of the features."""
    step = step_of(TEXTS)
    seen = granted(step)
    features = features_of(step).flip(0)
    lengths = tuple(map(len, step.truth.sequences()))
    matcher = FeatureMatcher(seen, lengths, RECIPE, features, "continuous", 2.0)
    labels = torch.zeros(2, 3, matcher.classes)
    dummy = matcher.candidates.of_tokens([step.truth.sequences(), step.truth.sequences()[::-1]], labels)
    assert matcher._feature_losses(dummy.embeddings).detach()[0] == pytest.approx(0.0, abs=1e-5)
    noisy = dummy._replace(embeddings=dummy.embeddings + 0.05 * torch.randn(dummy.embeddings.shape, generator=rng()))
    plain = FeatureMatcher(seen, lengths, RECIPE, features, "none", 2.0)
    both, without = matcher.losses_and_derivatives(noisy), plain.losses_and_derivatives(noisy)
    slope = both[1].embeddings - without[1].embeddings
    direction = slope / slope.norm()
    ahead, behind = (
        matcher._feature_losses(noisy.embeddings + sign * 1e-2 * direction).detach().sum() for sign in (1, -1)
    )
    assert float((ahead - behind) / 2e-2) == pytest.approx(float((slope * direction).sum()), rel=0.05)
    torch.testing.assert_close(
        both[0] - without[0], matcher._feature_losses(noisy.embeddings).detach().double(), atol=1e-5, rtol=1e-4
    )


def test_every_sequence_is_completed_by_its_own_feature() -> None:
    """Whatever the order of the features; a sequence without one stays as it was."""
    step = step_of(TEXTS)
    true = [tuple(ids) for ids in step.truth.sequences()]
    damaged = [(*ids[:2], ids[3], ids[2], *ids[4:]) for ids in true]
    damaged[0] = (*damaged[0][:1], true[1][1], *damaged[0][2:])
    features = features_of(step).flip(0)
    matcher = FeatureMatcher(granted(step), tuple(map(len, true)), RECIPE, features, "continuous", 1.0)
    completed = matcher.completed(damaged, torch.zeros(3, matcher.classes), 8, rng(), Budget(600))
    assert completed.tokens == true and completed.right == {0, 1, 2}
    fewer = FeatureMatcher(granted(step), tuple(map(len, true)), RECIPE, features[:2], "continuous", 1.0)
    completed = fewer.completed(damaged, torch.zeros(3, fewer.classes), 8, rng(), Budget(600))
    assert completed.tokens == [damaged[0], *true[1:]] and completed.right == {1, 2}


def test_a_local_minimum_is_kept_only_if_the_gradient_comes_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local minimum does not replace a true batch, but improves a wrong one."""
    step = step_of(TEXTS)
    true = [tuple(ids) for ids in step.truth.sequences()]
    features = features_of(step) + 0.05 * torch.randn(3, 32, generator=rng())  # none is reproduced by any words
    matcher = FeatureMatcher(granted(step), tuple(map(len, true)), RECIPE, features, "continuous", 1.0)
    wrong = [(*ids[:1], ids[2], *ids[2:]) for ids in true]
    for ends, guess, expected in ((wrong, true, true), (true, wrong, true)):
        monkeypatch.setattr(
            feature_matcher, "search_tokens", lambda _, row, *__, ends=ends: SearchResult(ends[row], 0.1)
        )
        assert matcher.completed(guess, torch.zeros(3, matcher.classes), 8, rng(), Budget(600)).tokens == expected


@pytest.mark.parametrize(
    ("phase", "discrete", "continuous"),
    [("none", 0, 0), ("discrete", 1, 0), ("continuous", 0, 1), ("both", 1, 1), ("words", 0, 0)],
)
def test_features_count_in_the_phases_that_were_asked_for(phase: Any, discrete: int, continuous: int) -> None:
    """`losses` choose starts and orders; the other losses move embeddings."""
    step = step_of(TEXTS[:1])
    seen, lengths = granted(step), tuple(map(len, step.truth.sequences()))
    one, plain = (FeatureMatcher(seen, lengths, RECIPE, features_of(step), way, 1.0) for way in (phase, "none"))
    dummy = plain.candidates.random(2, rng())
    extra = one._feature_losses(dummy.embeddings).detach().double()
    torch.testing.assert_close(one.losses(dummy) - plain.losses(dummy), discrete * extra, atol=1e-5, rtol=1e-4)
    found = one.losses_and_derivatives(dummy)[0] - plain.losses_and_derivatives(dummy)[0]
    torch.testing.assert_close(found, continuous * extra, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("count_", [2, 5])
def test_features_are_assigned_one_to_one(count_: int) -> None:
    """It equals the best of all ways; large batches give each sequence one feature."""
    cosine = torch.rand(3, 5, count_, generator=rng())
    ways = [cosine[:, list(way), range(count_)].mean(dim=1) for way in permutations(range(5), count_)]
    torch.testing.assert_close(best_assignment(cosine), torch.stack(ways).amax(dim=0))
    many = torch.eye(8)[None].repeat(2, 1, 1)[:, torch.randperm(8, generator=rng())]
    assert best_assignment(many).tolist() == [1.0, 1.0]
    assert best_assignment(torch.ones(1, 8, 8).index_fill_(1, torch.arange(1, 8), 0.0)).tolist() == [0.125]


def test_a_batch_is_searched_for_with_the_features_that_were_read() -> None:
    """Number and lengths of sequences are right; diagnostics describe the features."""
    step = step_of(TEXTS[:2])
    guess = PoolerFeatures(**SMALL)(granted(step), rng(), Budget(600))
    assert guess.sequences is not None and guess.label_counts is None
    assert sorted(len(s.token_ids) for s in guess.sequences) == sorted(map(len, step.truth.sequences()))
    assert guess.diagnostics["features"] == 2.0 and guess.diagnostics["features_solved"] == 1.0
    assert guess.diagnostics["features_explain"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("attempts", "right", "steps"), [(1, 1, 5.0), (2, 1, 10.0), (3, 2, 15.0), (4, 2, 15.0)])
def test_a_sequence_that_reproduces_its_feature_is_held_while_others_are_searched_for(
    monkeypatch: pytest.MonkeyPatch, attempts: int, right: int, steps: float
) -> None:
    """The best of several searches is returned.

    The first ends with one right sequence, the second with no other, the third with the other.
    """
    step = step_of(TEXTS[:2])
    true = [tuple(ids) for ids in step.truth.sequences()]
    wrong = [(*ids[:1], *ids[1:-1][::-1], *ids[-1:]) for ids in true]
    ends = iter([[true[0], wrong[1]], [true[0], wrong[1]], true])
    free: list[list[bool]] = []

    def ended(matcher: FeatureMatcher, *_: Any) -> Found:
        free.append([bool(matcher.free_places(row)) for row in range(2)])
        return Found(matcher.candidates.random(1, rng()), next(ends), [1.0, 1.0], "done", {"steps": 5.0})

    def result_of(_: Any, row: int, number: int, guess: tuple[int, ...], *__: Any) -> SearchResult:
        return SearchResult(guess, 0.0 if guess in true else 0.1)

    monkeypatch.setattr(pooler_features, "search", ended)
    monkeypatch.setattr(feature_matcher, "search_tokens", result_of)
    guess = PoolerFeatures(**SMALL, attempts=attempts)(granted(step), rng(), Budget(600))
    assert guess.sequences is not None
    assert sum(sequence.token_ids in true for sequence in guess.sequences) == right
    assert (guess.diagnostics["steps"], guess.diagnostics["reproduced"]) == (steps, right)
    assert free == [[True, True], [False, True], [False, True]][: int(steps / 5)]


def test_same_seed_same_guess_and_nothing_is_left_behind() -> None:
    """What the contract tests ask of attacks that apply to an honest server's model."""
    step = step_of(TEXTS[:2])
    seen = granted(step)
    before = {name: value.clone() for name, value in seen.model.state_dict().items()}
    flags = [p.requires_grad for p in seen.model.parameters()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in seen.model.modules()]
    digest, state = seen.digest(), torch.get_rng_state()
    guesses = []
    for _ in range(2):
        ticks = count()
        guesses.append(PoolerFeatures(**SMALL)(seen, rng(), Budget(12, clock=lambda t=ticks: float(next(t)))))  # type: ignore[misc]
    assert guesses[0] == guesses[1] and guesses[0].stop == "budget"
    assert seen.digest() == digest and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in seen.model.state_dict().items())
    assert flags == [p.requires_grad for p in seen.model.parameters()]
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in seen.model.modules()]
    assert all(p.grad is None for p in seen.model.parameters())


def _without_pooler(seen: Observation) -> Observation:
    return replace(seen, update={name: g for name, g in seen.update.items() if name != "bert.pooler.dense.weight"})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny.observe(TEXTS[:1]), "needs an active server that sent out a model with a wide pooler"),
        (
            lambda: _without_pooler(granted(step_of(TEXTS[:1]))),
            "is frozen or its update is not shared",
        ),
    ],
)
def test_it_says_why_it_does_not_apply(make: Callable[[], Any], reason: str) -> None:
    """An honest server, or a pooler that is not trained."""
    verdict = PoolerFeatures().applies(make())
    assert not verdict and reason in verdict.reason


def test_a_prior_that_cannot_be_used_is_a_reason() -> None:
    """Of other tokens, for example."""
    verdict = PoolerFeatures(prior="ngram").applies(granted(step_of(TEXTS[:1])))
    assert not verdict and "knows the 30522 tokens of another tokenizer" in verdict.reason


@pytest.mark.parametrize("knobs", [{"steps": 0}, {"feature_weight": -1.0}, {"learning_rate": 0.0}])
def test_knobs_that_leave_nothing_to_do_are_refused(knobs: dict[str, Any]) -> None:
    """Said before anything runs."""
    with pytest.raises(ValueError, match="must"):
        PoolerFeatures(**knobs)


def test_the_paper_preset_reads_and_uses_features_as_the_paper_does() -> None:
    """Sec. 4.2, 4.3 and App. B of Beyond Gradient and Priors.

    An option that is set overrides it; our own presets do not change.
    """
    assert PoolerFeatures(preset="paper").reading() == Reading("paper", "continuous", 0, 1)
    assert PoolerFeatures(preset="paper", phase="both").reading() == Reading("paper", "both", 0, 1)
    for preset in ("improved", "fast"):
        assert PoolerFeatures(preset=preset).reading() == Reading("solve", "words", 32, 3)
