"""LAMP's discrete transformations: new orders of a sequence's tokens.

Balunovic et al., NeurIPS 2022, Sec. 4.3. All four only reorder tokens, so their result is a permutation: entry p is
the position from which the token at p comes. The same permutation reorders the optimizer's state. Equal results are scored
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Permutation = tuple[int, ...]


def swap(order: Permutation, i: int, j: int) -> Permutation:
    """Exchange the tokens at positions i and j.

    >>> swap((0, 1, 2, 3), 0, 2)
    (2, 1, 0, 3)
    """
    moved = list(order)
    moved[i], moved[j] = moved[j], moved[i]
    return tuple(moved)


def move_token(order: Permutation, i: int, j: int) -> Permutation:
    """Move the token at position i to just after the token at position j.

    >>> move_token((0, 1, 2, 3), 0, 2)
    (1, 2, 0, 3)
    """
    return move_subsequence(order, i, i, j)


def move_subsequence(order: Permutation, i: int, j: int, p: int) -> Permutation:
    """Move the tokens at positions i to j to just after the token at position p.

    The positions i and j are included, and p lies outside of them.

    >>> move_subsequence((0, 1, 2, 3, 4), 0, 1, 3)
    (2, 3, 0, 1, 4)
    """
    rest = [place for place in range(len(order)) if not i <= place <= j]
    cut = rest.index(p) + 1
    return tuple(order[place] for place in (*rest[:cut], *range(i, j + 1), *rest[cut:]))


def move_prefix(order: Permutation, i: int) -> Permutation:
    """Move all tokens up to position i, included, to the end.

    >>> move_prefix((0, 1, 2, 3), 1)
    (2, 3, 0, 1)
    """
    return (*order[i + 1 :], *order[: i + 1])


def _draw_swap(order: Permutation, rng: torch.Generator) -> Permutation:
    return swap(order, *_places(len(order), 2, rng))


def _draw_move_token(order: Permutation, rng: torch.Generator) -> Permutation:
    return move_token(order, *_places(len(order), 2, rng))


def _draw_move_subsequence(order: Permutation, rng: torch.Generator) -> Permutation:
    i, j = sorted(_places(len(order), 2, rng))
    outside = [place for place in range(len(order)) if not i <= place <= j]
    if not outside:
        return order
    return move_subsequence(order, i, j, outside[_places(len(outside), 1, rng)[0]])


def _draw_move_prefix(order: Permutation, rng: torch.Generator) -> Permutation:
    return move_prefix(order, *_places(len(order), 1, rng))


TRANSFORMS: tuple[Callable[[Permutation, torch.Generator], Permutation], ...] = (
    _draw_swap,
    _draw_move_token,
    _draw_move_subsequence,
    _draw_move_prefix,
)
"""The four transformations. Each draws its positions uniformly."""


def draw_orders(places: Sequence[int], length: int, draws: int, rng: torch.Generator) -> list[Permutation]:
    """Return the different new orders among random transformations.

    Each of the four kinds is drawn equally often.

    Args:
        places: positions of the tokens that may move.
        length: T of the sequence.
        draws: n_d.
        rng: draws the positions.

    Returns:
        Orders of the whole sequence, without the present one.
    """
    present = tuple(range(len(places)))
    found: dict[Permutation, None] = {}
    if len(places) > 1:
        for number in range(draws):
            moved = TRANSFORMS[number % len(TRANSFORMS)](present, rng)
            if moved != present:
                found[moved] = None
    whole = []
    for moved in found:
        order = list(range(length))
        for place, source in zip(places, moved, strict=True):
            order[place] = places[source]
        whole.append(tuple(order))
    return whole


def shuffled(places: Sequence[int], length: int, rng: torch.Generator) -> Permutation:
    """Return a random order of the given positions; other tokens stay."""
    order = list(range(length))
    for place, source in zip(places, torch.randperm(len(places), generator=rng).tolist(), strict=True):
        order[place] = places[source]
    return tuple(order)


def _places(count: int, number: int, rng: torch.Generator) -> list[int]:
    """Return `number` different positions, or all if there are fewer."""
    return torch.randperm(count, generator=rng)[:number].tolist()
