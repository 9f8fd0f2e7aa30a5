"""Matching pursuit of the batch's words in an update with fewer rows than tokens.

A LoRA layer computes W x + s B A x. The update of A is s B^T dy x^T: every one of its R rows is a combination of all
inputs x_i of the batch. Two adapters of rank 4 give 8 such rows, and 20 tokens do not lie in a space of 8 dimensions,
so no input need lie in the span of the rows. But the rows have D coordinates each, and the same few tokens explain all
of them. That is a sparse regression with several right-hand sides. It has one solution if there are clearly fewer tokens
than coordinates, whatever the number of rows. A greedy search finds it: in each step the tokens found so far are
projected out of the rows and of the candidates, and the candidate nearest to the rows is taken (rank-aware order
recursive matching pursuit: Davies and Eldar, "Rank awareness in joint sparse recovery", IEEE Trans. Inf. Theory 2012;
with as many rows as tokens it is the span check).

Two inputs with the same token are nearly parallel, so the pursuit would often choose a wrong position. So words are
found first, and positions second. With u = w_t + d_p and x = (gain * u - mean(u) gain) / std(u) + shift, a row is

    sum_i c_i x_i = sum_t a_t (gain * w_t) + sum_p b_p (gain * d_p) + (..) gain + (..) shift,
    a_t = sum over the i with token t of c_i / std_i,      b_p = the same over the i at position p.

The last three sums lie in a known space, with about as many dimensions as there are positions. It is projected out, and
one vector per word of the vocabulary remains. When the words are found, least squares gives all a_t and b_p. A word that
occurs once has the same weight as its position: a_t = b_p in every row. That gives the order. (Own derivation.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from leakaudit.algorithms.least_squares import solve_least_squares
from leakaudit.models.structure import InputStage
from leakaudit.plugins.budget import Budget

FLOOR = 3e-6
"""Share of the strongest row below which a residual is rounding of float32 sums.
Chosen on training sentences; see docs/decisions/span_constants.md."""

NOISE_EDGE = 1.2
"""A residual is noise up to this multiple of the largest singular value of noise alone.
Our choice."""

MOST_WORDS = 0.5
"""Most words, as a share of the dimensions that positions leave.
Our choice: beyond it any set of words explains much."""

SAME_WEIGHT = 0.1
"""Largest relative distance between the weights of a word and of its position.
Our choice; see docs/decisions/span_constants.md for the distances of true pairs."""

UNUSED = 30.0
"""A position is used if its weight is above this multiple of the last positions' weights, which are rounding.
Our choice."""

REPEATS = 4
"""Most positions at which one word may stand.
Our choice: subsets of positions are tried, and their number grows fast."""


@dataclass(frozen=True)
class Words:
    """The distinct words of a batch, with their weights in each row."""

    tokens: Tensor
    """(M,) token ids."""
    weights: Tensor
    """(M, K) float64: a_t of the module's docstring, for K rows."""
    places: Tensor
    """(P, K) float64: b_p."""

    def order(self, used: int | None = None) -> list[int] | None:
        """Return the token ids of one sequence in order, or None.

        None if they form no single sequence.

        Args:
            used: number of positions of the sequence, if it is known.
        """
        return _order(self, used or used_positions(self.places))

    def above(self, share: float) -> tuple[Words, int]:
        """Return the words with more weight than unused positions, and the used positions.

        Args:
            share: multiple of the weight of unused positions, of which the last quarter are taken to be.
        """
        size = self.places.norm(dim=1)
        least = share * size[-max(1, len(size) // 4) :].median()
        used = int((size > least).nonzero().max()) + 1 if bool((size > least).any()) else 0
        keep = self.weights.norm(dim=1) > least
        return Words(self.tokens[keep], self.weights[keep], self.places), used


def find_words(stage: InputStage, rows: Tensor, positions: int, budget: Budget, noise: float = 0.0) -> Words | None:
    """Return the words that explain all rows, or None if there are no such words.

    There are none if the rows are noisy, if texts have more positions, or if there are too many words.

    Args:
        stage: computes attention inputs; the result is None if it is not additive.
        rows: (F, D) float64, combinations of attention inputs.
        positions: P, the most positions of a text.
        budget: checked between words.
        noise: standard deviation of the errors on each entry of the rows, if known.
    """
    if not stage.additive or stage.norm is None or len(rows) == 0:
        return None
    rows = _principal(rows, noise)
    # The noise of rotated rows is the same in every entry: K rows in D coordinates.
    edge = NOISE_EDGE * noise * (len(rows) ** 0.5 + stage.hidden**0.5)
    floor = max(edge, FLOOR * float(rows[0].norm()))
    gain, shift = stage.norm.gain, stage.norm.shift
    known = torch.cat([gain * stage.position_vectors[:positions], gain[None], shift[None]])
    nuisance = _orthonormal(known)
    outside = _without(gain * stage.token_vectors.double(), nuisance).float()  # (V, D)
    most = int(MOST_WORDS * (stage.hidden - len(nuisance)))
    signals = _without(rows, nuisance)
    found = _pursue(outside, signals, floor, most, budget)
    if found is None:
        return None
    found = _pruned(outside, signals, floor, found)
    if not found:
        return None
    return word_weights(stage, torch.tensor(found, device=rows.device), rows, positions)


def word_weights(stage: InputStage, tokens: Tensor, rows: Tensor, positions: int) -> Words:
    """Return known words with their weights, and those of positions, in each row.

    Args:
        stage: computes attention inputs; additive.
        tokens: (M,) distinct token ids.
        rows: (K, D) float64, combinations of attention inputs.
        positions: P, the most positions of a text.
    """
    norm = stage.norm
    assert norm is not None
    gain, shift = norm.gain, norm.shift
    known = torch.cat([gain * stage.position_vectors[:positions], gain[None], shift[None]])
    columns = torch.cat([gain * stage.token_vectors[tokens].double(), known[1:]])
    solved = solve_least_squares(columns.T, rows.T, rcond=1e-10)  # (M + P + 1, K)
    weights, places = solved[: len(tokens)], solved[len(tokens) : len(tokens) + len(known) - 3]
    first = weights.sum(0) - places.sum(0)  # the first position has no column of its own: its weight is the rest
    return Words(tokens, weights, torch.cat([first[None], places]))


def _principal(rows: Tensor, noise: float) -> Tensor:
    """Return (K, D): the rows' principal directions times their strength.

    Directions that are noise or rounding are left out.
    """
    _, strength, directions = torch.linalg.svd(rows, full_matrices=False)
    edge = NOISE_EDGE * noise * (len(rows) ** 0.5 + rows.shape[1] ** 0.5)
    keep = strength > max(edge, FLOOR * float(strength[0]))
    rotated: Tensor = strength[keep, None] * directions[keep]
    return rotated


def _orthonormal(rows: Tensor) -> Tensor:
    _, strength, directions = torch.linalg.svd(rows, full_matrices=False)
    basis: Tensor = directions[strength > 1e-8 * strength[0]]
    return basis


def _without(vectors: Tensor, basis: Tensor) -> Tensor:
    """Return vectors (N, D) less their part in the span of orthonormal rows (R, D)."""
    rest: Tensor = vectors - (vectors @ basis.T) @ basis
    return rest


def _pursue(atoms: Tensor, signals: Tensor, floor: float, most: int, budget: Budget) -> list[int] | None:
    """Return the atoms that explain all signals, or None.

    Args:
        atoms: (V, D) float32.
        signals: (K, D) float64.
        floor: singular value up to which a residual counts as zero.
        most: most atoms.
        budget: checked between atoms.
    """
    length = atoms.square().sum(1)
    left = length.clone()
    chosen = torch.zeros(0, atoms.shape[1], dtype=torch.float64, device=atoms.device)
    found: list[int] = []
    while len(found) <= most and not budget.exhausted():
        _, strength, directions = torch.linalg.svd(_without(signals, chosen), full_matrices=False)
        open_ = directions[strength > floor]
        if len(open_) == 0:
            return found
        nearness = (atoms @ open_.T.float()).square().sum(1) / left.clamp_min(1e-3 * float(length.mean()))
        nearness[found] = -1.0
        best = int(nearness.argmax())
        found.append(best)
        new = _without(
            _without(atoms[best][None].double(), chosen), chosen
        )  # twice, because after one projection the result is not orthogonal to rounding
        new = new / new.norm()
        chosen = torch.cat([chosen, new])
        left = left - (atoms @ new[0].float()).square()
    return None


def _pruned(atoms: Tensor, signals: Tensor, floor: float, found: list[int]) -> list[int]:
    """Return the atoms that are needed to explain all signals.

    Atoms are removed one by one, the smallest weight first; the search ends at the first atom that is needed.
    """
    kept = list(found)
    weights = solve_least_squares(atoms[kept].double().T, signals.T).norm(dim=1)
    for index in weights.argsort().tolist():
        less = [atom for atom in kept if atom != found[index]]
        if (
            not less
            or float(torch.linalg.matrix_norm(_without(signals, _orthonormal(atoms[less].double())), ord=2)) > floor
        ):
            break
        kept = less
    return kept


def _order(words: Words, used: int | None) -> list[int] | None:
    """Match words to positions by their weights.

    Words with one position come first, then those with two, three and four.
    """
    if used is None or len(words.tokens) > used:
        return None
    places = words.places[:used]
    at: dict[int, int] = {}
    open_words = list(range(len(words.tokens)))
    for count in range(1, REPEATS + 1):
        taken = [p for p in range(used) if p not in at]
        if not open_words or len(taken) < count:
            break
        subsets = torch.tensor(list(combinations(taken, count)), device=places.device)  # (S, count)
        sums = places[subsets].sum(1)  # (S, K)
        distance = torch.cdist(words.weights[open_words], sums) / words.weights[open_words].norm(dim=1, keepdim=True)
        for row, column in _mutual(distance):
            where = subsets[column].tolist()
            if float(distance[row, column]) < SAME_WEIGHT and not any(p in at for p in where):
                at |= dict.fromkeys(where, open_words[row])
        open_words = [word for word in open_words if word not in at.values()]
    rest = [p for p in range(used) if p not in at]
    if len(open_words) == 1 and rest:  # one word repeated many times
        at |= dict.fromkeys(rest, open_words[0])
        open_words, rest = [], []
    if open_words or rest:
        return None
    return [int(words.tokens[at[p]]) for p in range(used)]


def _mutual(distance: Tensor) -> list[tuple[int, int]]:
    """Return the pairs (row, column) that are nearest to each other, nearest first."""
    if distance.numel() == 0:
        return []
    nearest_row, nearest_column = distance.argmin(0), distance.argmin(1)
    pairs = [(row, column) for row, column in enumerate(nearest_column.tolist()) if int(nearest_row[column]) == row]
    return sorted(pairs, key=lambda pair: float(distance[pair]))


def used_positions(places: Tensor) -> int | None:
    """Return how many leading positions are used, or None if all of them may be."""
    size = places.norm(dim=1)
    unused = size[len(size) // 2 :].median()
    used = int((size > UNUSED * unused).nonzero().max()) + 1 if bool((size > UNUSED * unused).any()) else 0
    return used if 0 < used <= len(size) // 2 else None
