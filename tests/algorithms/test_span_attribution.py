"""Which pairs in the span are real: planted problems with known answers."""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.span.attribution import Attribution
from leakaudit.algorithms.span.isolation import isolate, whitening
from leakaudit.algorithms.span.sequence_gradient import sequence_gradients
from leakaudit.models.structure import anatomy_of
from tests.support import tiny


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _planted(real: list[tuple[int, int]], tokens: int, positions: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Plant pairs (token, position) whose vectors are sums, with a gradient each.

    Returns:
        Coordinates (N, R) of all pairs, token and position of each, the update (F, R) that the real ones make, and their
        gradients (F, len(real)).
    """
    generator = _generator(1)
    width = tokens + positions
    words = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    places = torch.randn(positions, width, generator=generator, dtype=torch.float64)
    token, position = torch.meshgrid(torch.arange(tokens), torch.arange(positions), indexing="ij")
    token, position = token.flatten(), position.flatten()
    vectors = words[token] + places[position]
    axes = torch.linalg.svd(vectors, full_matrices=False)
    coordinates = vectors @ axes.Vh[1e-9 * axes.S[0] < axes.S].T
    chosen = torch.tensor([t * positions + p for t, p in real])
    gradients = torch.randn(200, len(real), generator=generator, dtype=torch.float64)
    return coordinates, token, position, gradients @ coordinates[chosen], gradients


def test_an_isolating_direction_sees_its_own_group_only() -> None:
    """Its leverage is one, and all other groups vanish along it."""
    coordinates, token, _, _, _ = _planted([(0, 0)], tokens=6, positions=4)
    directions, leverage = isolate(coordinates, whitening(coordinates), token)
    assert torch.allclose(leverage, torch.ones(6, dtype=torch.float64))
    along = coordinates @ directions
    own = torch.nn.functional.one_hot(token, 6).bool()
    assert float(along[~own].abs().max()) < 1e-9
    assert torch.allclose(along[own], torch.ones(len(token), dtype=torch.float64))


def test_a_group_inside_the_others_span_has_no_direction() -> None:
    """Its leverage says so."""
    vectors = torch.eye(3, dtype=torch.float64)
    rows = torch.cat([vectors, vectors.sum(0, keepdim=True)])
    _, leverage = isolate(rows, whitening(rows), torch.tensor([0, 1, 2, 3]))
    assert float(leverage[3]) < 0.99


REAL = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 1), (5, 2), (6, 3), (7, 0), (7, 3)]
"""Nine pairs in three sequences of a kind; the token 7 stands at two places."""


def test_a_token_that_occurs_once_is_assigned_to_its_own_position() -> None:
    """All 32 pairs lie in the span of the nine real ones."""
    coordinates, token, position, update, _ = _planted(REAL, tokens=8, positions=4)
    attribution = Attribution.of(coordinates, token, position)
    assert bool(attribution.readable.all())
    assignments = attribution.solve(update, torch.ones(len(token), dtype=torch.bool))
    found = {(int(token[row]), int(position[row])) for row in assignments.assigned.nonzero().flatten()}
    assert found == set(REAL)
    assert not bool(assignments.open.any())


def test_a_token_that_occurs_twice_is_solved_from_the_residuals_at_its_positions() -> None:
    """At one of its positions everything else is known, so the rest is its own."""
    coordinates, token, position, update, gradients = _planted(REAL, tokens=8, positions=4)
    assignments = Attribution.of(coordinates, token, position).solve(update, torch.ones(len(token), dtype=torch.bool))
    for (t, p), gradient in zip(REAL, gradients.T, strict=True):
        found = assignments.gradients[:, assignments.own[t * 4 + p]]
        assert float((found - gradient).norm() / gradient.norm()) < 1e-9


TWICE = [*REAL, (7, 1), (8, 2), (8, 3)]
"""Token 7 stands at three of four places, 8 at two, and at 3 both do."""


def test_where_too_much_is_unknown_coefficients_still_point_to_real_pairs() -> None:
    """No ghost is certain, whatever its coefficient."""
    coordinates, token, position, update, _ = _planted(TWICE, tokens=9, positions=4)
    live = ~((token == 0) & (position == 0))  # an excluded pair, so that its position stays open
    assignments = Attribution.of(coordinates, token, position).solve(update, live)
    certain = {(int(token[row]), int(position[row])) for row in assignments.certain.nonzero().flatten()}
    assert certain <= set(TWICE)
    assert (0, 0) not in certain


def test_pairs_that_are_excluded_are_not_assigned() -> None:
    """A token whose true pair is excluded gets no other one."""
    coordinates, token, position, update, _ = _planted(REAL, tokens=8, positions=4)
    live = ~((token == 1) & (position == 1))
    assignments = Attribution.of(coordinates, token, position).solve(update, live)
    assert not bool(assignments.assigned[token == 1].any())


def test_the_sequences_of_a_batch_add_up_to_its_update() -> None:
    """Each logit's gradients, weighted by the loss gradient, sum to the update."""
    model = tiny.bert(num_labels=3)
    texts, labels = ["a dog saw a cat", "the bird ate", "one old fish"], [2, 0, 1]
    step = tiny.client_step(model, tiny.bert_tokenizer(), texts, labels)
    seen, anatomy = step.observe(), anatomy_of(model)
    sequences = step.truth.sequences()
    kept: list[Tensor] = []
    reader = model.get_submodule(anatomy.projections[0].module)
    handle = reader.register_forward_pre_hook(lambda _, given: kept.append(given[0].detach().double()))
    inputs = {k: v for k, v in step.truth.micro_batches[0].inputs.items() if k != "labels"}
    with torch.no_grad():
        probabilities = model(**inputs).logits.double().softmax(1)
    handle.remove()
    total = torch.zeros(())
    for row, (part, sequence) in enumerate(
        zip(sequence_gradients(seen, anatomy.projections, sequences), sequences, strict=True)
    ):
        weights = (probabilities[row] - torch.nn.functional.one_hot(torch.tensor(labels[row]), 3)) / len(texts)
        gradients = torch.einsum("c,clf->lf", weights[1:], part.gradients)
        total = total + gradients.T @ kept[0][row, : len(sequence)]
    observed = torch.cat([p.by_output(seen.update[p.weight]).double() for p in anatomy.projections])
    assert float((total - observed).norm() / observed.norm()) < 1e-5


def test_pairs_without_ghosts_are_assigned_one_by_one() -> None:
    """Where every pair adds a direction, each is certain, whatever token it shares."""
    coordinates, token, position, _, _ = _planted([(0, 0)], tokens=8, positions=4)
    chosen = torch.tensor([t * 4 + p for t, p in [(0, 0), (1, 1), (2, 1), (2, 2), (3, 3)]])
    axes = torch.linalg.svd(coordinates[chosen], full_matrices=False).Vh
    real = coordinates[chosen] @ axes.T
    attribution = Attribution.of(real, token[chosen], position[chosen])
    gradients = torch.randn(200, 5, generator=_generator(2), dtype=torch.float64)
    assignments = attribution.solve(gradients @ real, torch.ones(5, dtype=torch.bool))
    assert bool(assignments.assigned.all())
