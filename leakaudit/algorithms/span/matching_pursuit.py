"""Which words, from fewer directions than tokens: the update of an adapter's A spans part of the inputs' space only.

A LoRA layer computes W x + s B A x, and the update of A is s B^T dy x^T: every one of its R rows is a combination of all inputs
x_i of the batch. Two adapters of rank 4 give 8 such rows, and 20 tokens do not lie in a space of 8 dimensions, so no token
passes the span check. But the rows have D coordinates each, and one and the same few tokens explain all of them: that is a
sparse regression with several right-hand sides, and it has one solution as long as there are clearly fewer tokens than
coordinates, whatever the number of rows. It is found greedily, by the token that lies nearest to the rows once what was found
before is projected out of both (rank-aware order recursive matching pursuit: Davies and Eldar, "Rank awareness in joint sparse
recovery", IEEE Trans. Inf. Theory 2012; with as many rows as tokens it is the span check).

Two inputs that share their token are nearly parallel, which would mislead the pursuit about positions. So positions come
second. With u = w_t + d_p and x = (gain * u - mean(u) gain) / std(u) + shift, a row is

    sum_i c_i x_i = sum_t a_t (gain * w_t) + sum_p b_p (gain * d_p) + (..) gain + (..) shift,
    a_t = sum over the i with token t of c_i / std_i,      b_p = the same over the i at position p.

The last three sums live in a space that is known beforehand, of as many dimensions as positions; it is projected out, and what
is left is one vector per word of the vocabulary. Afterwards all a_t and b_p follow by least squares, and a word that occurs
once has the a_t of its position: a_t = b_p in every row. That gives the order. (Own derivation.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from leakaudit.models.structure import InputStage
from leakaudit.plugins.budget import Budget

FLOOR = 3e-6
"""Share of the strongest row below which what is left of the rows is rounding of float32 sums, where nothing else damaged them.
Measured (six-layer encoder, ranks 1 to 16, texts of a train split): 1e-8 to 1e-7 with all words found; an order of magnitude
above."""

NOISE_EDGE = 1.2
"""Factor over the largest singular value that noise alone has, by theory, up to which what is left counts as noise. Our choice."""

MOST_WORDS = 0.5
"""Share of the dimensions left by positions up to which a set of words is searched. Our choice: beyond it any set explains much,
and the pursuit was measured to end far below."""

SAME_WEIGHT = 0.1
"""Relative distance up to which a word and its position have the same weights. Measured (as above): 1e-6 to 1e-3 for true
pairs; the bound itself is our choice."""

UNUSED = 30.0
"""Factor over the weights of the last positions, which are rounding, above which a position is in use. Our choice."""

REPEATS = 4
"""Positions that one word may stand at. Our choice: subsets of positions are tried, and their number explodes."""


@dataclass(frozen=True)
class Words:
    """The distinct words of a batch, with their weights in each row."""

    tokens: Tensor
    """(M,) token ids."""
    weights: Tensor
    """(M, K) float64, a_t of the module's text."""
    places: Tensor
    """(P, K) float64, b_p."""

    def order(self) -> list[int] | None:
        """Return the token ids of one sequence in order, or None where they do not add up to one sequence."""
        return _order(self)


def find_words(stage: InputStage, rows: Tensor, positions: int, budget: Budget, noise: float = 0.0) -> Words | None:
    """Find the words that explain all rows, or None where none do: damaged rows, longer texts, too many words.

    Args:
        stage: how attention inputs come about; it has to be additive.
        rows: (F, D) float64, combinations of attention inputs.
        positions: P, how many a text may have.
        budget: looked at between words.
        noise: standard deviation of the errors on each entry of the rows, if known.
    """
    if not stage.additive or stage.norm is None or len(rows) == 0:
        return None
    rows = _principal(rows, noise)
    # Rotated rows have the same noise in every entry, K rows of it in D coordinates.
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
    tokens = torch.tensor(found, device=rows.device)
    columns = torch.cat([gain * stage.token_vectors[tokens].double(), known[1:]])
    solved = torch.linalg.lstsq(columns.T, rows.T, rcond=1e-10, driver="gelsd").solution  # (M + P + 1, K)
    weights, places = solved[: len(tokens)], solved[len(tokens) : len(tokens) + len(known) - 3]
    first = weights.sum(0) - places.sum(0)  # the first position adds nothing to the token, so it is the rest
    return Words(tokens, weights, torch.cat([first[None], places]))


def _principal(rows: Tensor, noise: float) -> Tensor:
    """Return (K, D): the rows' principal directions, each as long as it is strong, less those that are all noise or rounding."""
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
        floor: singular value up to which what is left of the signals is nothing.
        most: atoms to try.
        budget: looked at between atoms.
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
        )  # twice: once is not orthogonal to rounding
        new = new / new.norm()
        chosen = torch.cat([chosen, new])
        left = left - (atoms @ new[0].float()).square()
    return None


def _pruned(atoms: Tensor, signals: Tensor, floor: float, found: list[int]) -> list[int]:
    """Return the atoms less those, of least weight first, without which the rest still explain all signals."""
    kept = list(found)
    weights = torch.linalg.lstsq(atoms[kept].double().T, signals.T, driver="gelsd").solution.norm(dim=1)
    for index in weights.argsort().tolist():
        less = [atom for atom in kept if atom != found[index]]
        if (
            not less
            or float(torch.linalg.matrix_norm(_without(signals, _orthonormal(atoms[less].double())), ord=2)) > floor
        ):
            break
        kept = less
    return kept


def _order(words: Words) -> list[int] | None:
    """Match words to positions by their weights: one position a word first, then pairs, triples, fours."""
    used = _used(words.places)
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
    if len(open_words) == 1 and rest:  # one word often repeated
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


def _used(places: Tensor) -> int | None:
    """Return how many leading positions are in use, or None where all of them may be."""
    size = places.norm(dim=1)
    unused = size[len(size) // 2 :].median()
    used = int((size > UNUSED * unused).nonzero().max()) + 1 if bool((size > UNUSED * unused).any()) else 0
    return used if 0 < used <= len(size) // 2 else None
