"""The parts of `span` on planted problems whose answers are known."""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.span.attention_evidence import COMPLETE, AttentionEvidence, Group
from leakaudit.algorithms.span.candidates import Candidates, Scan, distances
from leakaudit.algorithms.span.factoring import AttentionFactors
from leakaudit.algorithms.span.grouping import assemble
from leakaudit.algorithms.span.mask_regression import MaskSearch, find_masked
from leakaudit.algorithms.span.subspace import span_of
from leakaudit.models.structure import Head, anatomy_of, input_stage_of
from leakaudit.plugins.budget import Budget
from tests.support import tiny

WIDTH = 96


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _planted_update(rank: int, noise: float) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(rank, WIDTH, generator=_generator(1), dtype=torch.float64)
    outputs = torch.randn(3 * WIDTH, rank, generator=_generator(2), dtype=torch.float64)
    update = outputs @ inputs
    update += noise * update.norm() * torch.randn(update.shape, generator=_generator(3), dtype=torch.float64) / WIDTH
    return update, inputs


def test_the_rank_is_where_the_singular_values_fall_to_rounding() -> None:
    """Seventeen planted directions above a floor of 1e-8."""
    update, inputs = _planted_update(17, noise=1e-9)
    basis = span_of(update)
    assert basis.rank == 17 and not basis.noisy and basis.gap > 1e3
    assert float(distances(inputs, basis.vectors).max()) < 1e-6


def test_noise_in_every_direction_is_told_from_rounding() -> None:
    """A hundredth of noise fills all directions: the basis is marked noisy."""
    update, _ = _planted_update(5, noise=1e-2)
    basis = span_of(update)
    assert basis.noisy and 1 <= basis.rank <= 8


def test_the_scan_by_products_gives_the_distances_of_every_pair_computed_alone() -> None:
    """Against brute force over all tokens at four positions."""
    model = tiny.bert()
    stage = input_stage_of(model, tiny.POSITIONS)
    basis = torch.linalg.qr(torch.randn(stage.hidden, 7, generator=_generator(), dtype=torch.float64))[0].T
    block = Scan(stage, basis, None, keep=10).block(2, 6)
    assert stage.additive
    for position in range(2, 6):
        everything = torch.arange(stage.vocabulary)
        brute = distances(stage.inputs(everything, torch.full_like(everything, position)), basis)
        nearest = set(brute.argsort()[:10].tolist())
        assert set(block.tokens[block.positions == position].tolist()) == nearest


def test_attention_inputs_are_those_the_model_computes() -> None:
    """Token and position against a forward pass that is stopped at the block."""
    model = tiny.bert()
    stage = input_stage_of(model, tiny.POSITIONS)
    tokens, positions = torch.tensor([5, 9, 30]), torch.tensor([0, 3, 11])
    assert torch.allclose(stage.inputs(tokens, positions), stage._inputs_by_running(tokens, positions), atol=1e-5)


def _masked_problem(
    copies: list[int], false: int, rate: float = 0.1, width: int = 192
) -> tuple[Tensor, Candidates, dict[int, list[Tensor]]]:
    """Plant true inputs behind masks, some several times, among false ones.

    Tokens number the inputs.
    """
    generator = _generator(5)
    inputs = torch.randn(len(copies) + false, width, generator=generator, dtype=torch.float64)
    masked: dict[int, list[Tensor]] = {}
    for index, count in enumerate(copies):
        for _ in range(count):
            mask = (torch.rand(width, generator=generator) > rate).double()
            masked.setdefault(index, []).append(inputs[index] * mask / (1 - rate))
    rows = torch.stack([vector for vectors in masked.values() for vector in vectors])
    basis = torch.linalg.qr(rows.T)[0].T
    tokens = torch.arange(len(inputs))
    candidates = Candidates(tokens, torch.zeros_like(tokens), distances(inputs, basis), inputs)
    return basis, candidates, masked


def test_inputs_behind_dropout_masks_are_found_with_their_masks() -> None:
    """Exactly the twelve planted ones of 72, every coordinate of every mask."""
    basis, candidates, planted = _masked_problem([1] * 12, false=60)
    found = find_masked(basis, candidates, 0.1, _generator(), Budget(600))
    assert sorted(found.tokens.tolist()) == list(range(12))
    for token, vector in zip(found.tokens.tolist(), found.vectors, strict=True):
        assert torch.allclose(vector, planted[token][0], atol=1e-6)


def test_two_copies_of_one_input_are_told_apart_by_their_masks() -> None:
    """Both [CLS] of a batch of two are found, each with its own mask."""
    basis, candidates, planted = _masked_problem([2, *[1] * 8], false=30)
    found = find_masked(basis, candidates, 0.1, _generator(), Budget(600))
    assert sorted(found.tokens.tolist()) == [0, *range(9)]
    copies = found.vectors[found.tokens == 0]
    for mine in planted[0]:
        assert float((copies - mine).abs().amax(dim=1).min()) < 1e-6


def test_the_zero_vector_explains_nothing() -> None:
    """In a span of one direction, a mask that drops everything would fit any input."""
    basis, candidates, _ = _masked_problem([1], false=40)
    found = find_masked(basis, candidates, 0.1, _generator(), Budget(600))
    assert found.tokens.tolist() == [0]


def test_a_missing_input_is_found_when_it_is_searched_again() -> None:
    """Three inputs are shown to the second search only; it also finds a second copy."""
    basis, candidates, planted = _masked_problem([2, *[1] * 9], false=30)
    shown = candidates.take(torch.tensor([*range(7), *range(10, 40)]))
    search = MaskSearch(basis, 0.1, _generator(), Budget(600), frozenset())
    search.consider(shown)
    before = search.count()
    assert before < len(basis)
    search.look_again(candidates)
    found = search.result()
    assert before < search.count() == len(basis)
    assert sorted(found.tokens.tolist()) == [0, *range(10)]
    for token, vector in zip(found.tokens.tolist(), found.vectors, strict=True):
        assert min(float((vector - true).abs().max()) for true in planted[token]) < 1e-6


def _planted_attention(
    sizes: list[int], heads: int = 6, width: int = 24
) -> tuple[AttentionFactors, Tensor, list[set[int]]]:
    """Plant sequences: dq and dk are combinations of their own keys and queries.

    The coefficients of dq sum to 0.
    """
    generator = _generator(9)
    count = sum(sizes)
    keys = torch.randn(heads, count, width, generator=generator, dtype=torch.float64)
    queries = torch.randn(heads, count, width, generator=generator, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    same = (owner[:, None] == owner[None, :]).double()
    a = torch.randn(heads, count, count, generator=generator, dtype=torch.float64) * same
    a -= same * a.sum(2, keepdim=True) / same.sum(1)[None, :, None]
    b = torch.randn(heads, count, count, generator=generator, dtype=torch.float64) * same
    one, zero = torch.ones(heads, count, 1).double(), torch.zeros(heads, count, 1).double()
    factors = AttentionFactors(torch.cat([keys, one], 2), queries, torch.cat([a @ keys, zero], 2), b @ queries)
    positions = torch.cat([torch.arange(size) for size in sizes])
    return factors, positions, [set((owner == s).nonzero().flatten().tolist()) for s in range(len(sizes))]


def test_planted_sequences_are_assembled_exactly() -> None:
    """Four sequences of different lengths come back row by row."""
    factors, positions, truth = _planted_attention([5, 9, 7, 12])
    groups = assemble(factors, positions, beam=8, budget=Budget(600))
    assert sorted(map(sorted, (group.members for group in groups))) == sorted(map(sorted, truth))
    assert all(group.residual < 1e-8 for group in groups)
    for group in groups:
        assert positions[list(group.members)].tolist() == list(range(len(group.members)))


def test_a_sequence_longer_than_the_head_is_found_by_elimination() -> None:
    """Thirty keys explain anything in a head of 24, so the short one is found first."""
    factors, positions, truth = _planted_attention([6, 30])
    groups = assemble(factors, positions, beam=8, budget=Budget(600))
    assert sorted(map(sorted, (group.members for group in groups))) == sorted(map(sorted, truth))


def test_a_sequence_ends_with_its_closing_token() -> None:
    """Nothing is added behind the given last rows, and no sequence stops before."""
    factors, positions, truth = _planted_attention([5, 9, 7, 12])
    closing = torch.zeros(len(positions), dtype=torch.bool)
    closing[[max(rows) for rows in truth]] = True
    groups = assemble(factors, positions, beam=8, budget=Budget(600), closing=closing)
    assert sorted(map(sorted, (group.members for group in groups))) == sorted(map(sorted, truth))
    wrong = torch.zeros(len(positions), dtype=torch.bool)
    wrong[[2, 7]] = True  # the third places of two sequences: then they are cut short, and nothing explains them
    for group in assemble(factors, positions, beam=8, budget=Budget(600), closing=wrong):
        places = positions[[row for row in group.members if wrong[row]]].tolist()
        assert all(place == int(positions[list(group.members)].max()) for place in places)


def test_a_wrong_member_is_exchanged_for_the_one_that_explains_the_others() -> None:
    """Two of nine members are of another sequence; single exchanges correct both."""
    factors, positions, truth = _planted_attention([9, 9])
    evidence = AttentionEvidence(factors.vectors, factors.updates, torch.arange(18), positions)
    wrong = list(range(9))
    wrong[3], wrong[6] = 12, 15
    corrected = evidence.exchanged(Group(tuple(wrong), 1.0), times=3)
    assert set(corrected.members) == truth[0]
    assert corrected.residual < COMPLETE
    assert evidence.exchanged(Group(tuple(wrong), 1.0), times=0).members == tuple(wrong)


def test_one_summed_gradient_in_three_does_not_hide_a_complete_sequence() -> None:
    """A token at two places has the sum of two gradients; the other two are enough."""
    factors, positions, truth = _planted_attention([6, 6])
    updates = factors.updates.clone()
    updates[:, 2] += updates[:, 9]
    known = torch.full((12,), -1)
    known[[1, 2, 4]] = torch.tensor([1, 2, 4])
    evidence = AttentionEvidence(factors.vectors, updates, known, positions)
    best = evidence.grow([1], torch.ones(12, dtype=torch.bool), beam=8, longest=12)[0]
    assert set(best.members) == truth[0]
    assert best.residual < COMPLETE


def test_a_spent_budget_assembles_nothing_and_does_not_hang() -> None:
    """The caller then falls back on positions."""
    factors, positions, _ = _planted_attention([5, 5])
    ticks = iter(float(i) for i in range(10_000))
    assert assemble(factors, positions, beam=8, budget=Budget(0.5, clock=lambda: next(ticks))) == []


def test_heads_partition_the_features_of_the_projections() -> None:
    """Indices of all heads are disjoint and cover every output feature."""
    anatomy = anatomy_of(tiny.bert())
    parts = [part for head in anatomy.heads for part in (head.query, head.key, head.value)]
    assert all(isinstance(head, Head) for head in anatomy.heads) and len(anatomy.heads) == 2
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(3 * tiny.HIDDEN))
