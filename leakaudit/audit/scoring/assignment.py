"""One-to-one assignment of guesses to true sequences.

No guess counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from leakaudit.plugins.metric_protocol import Guess, Pair
from leakaudit.plugins.overlap import clipped_overlap, rouge_f

TIE_BREAK = 1e-3
"""Weight of token overlap, relative to ROUGE-1.

Our choice: so small a weight only decides between pairs of equal ROUGE-1. Such pairs occur in scripts that ROUGE's tokenizer does not know.
"""


def match(
    guesses: Sequence[Guess],
    truths: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    special_ids: AbstractSet[int] = frozenset(),
    masked: Sequence[Sequence[int]] | None = None,
) -> list[Pair]:
    """Assign each guess to at most one true sequence.

    The assignment has as many exact pairs as possible and, among such assignments, the highest sum of ROUGE-1 F (Hungarian method).
    Guesses without a true sequence are dropped. An attack therefore loses nothing here if it guesses too many sequences.

    Args:
        guesses: N guessed sequences.
        truths: B true sequences.
        decode: function from token ids to text.
        special_ids: left out of both sides before anything is compared.
        masked: for each true sequence, the tokens that a mask hid from the model; None if no token was hidden.

    Returns:
        B pairs, in the order of `truths`.
    """
    true_ids = [_without(special_ids, ids) for ids in truths]
    hidden = [_without(special_ids, ids) for ids in masked or [()] * len(truths)]
    guess_ids = [_without(special_ids, guess.token_ids) for guess in guesses]
    true_texts, guess_texts = [decode(ids) for ids in true_ids], [decode(ids) for ids in guess_ids]
    rows, columns = linear_sum_assignment(_weights(true_ids, guess_ids, true_texts, guess_texts), maximize=True)
    assigned: dict[int, int] = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    pairs = []
    for i, (ids, text) in enumerate(zip(true_ids, true_texts, strict=True)):
        if i not in assigned:
            pairs.append(Pair(ids, (), text, "", masked_ids=hidden[i]))
            continue
        j = assigned[i]
        known = (guesses[j].own_score, guesses[j].proved)
        pairs.append(Pair(ids, guess_ids[j], text, guess_texts[j], *known, masked_ids=hidden[i]))
    return pairs


def _weights(
    true_ids: Sequence[tuple[int, ...]],
    guess_ids: Sequence[tuple[int, ...]],
    true_texts: Sequence[str],
    guess_texts: Sequence[str],
) -> NDArray[np.float64]:
    """Return (B, N) weights of the pairs of a true sequence and a guess."""
    weights = np.zeros((len(true_ids), len(guess_ids)))  # (B, N)
    for i in range(len(true_ids)):
        for j in range(len(guess_ids)):
            likeness = rouge_f("rouge1", true_texts[i], guess_texts[j]) or 0.0
            overlap = clipped_overlap(true_ids[i], guess_ids[j]) / max(1, len(true_ids[i]), len(guess_ids[j]))
            # One exact pair weighs more than the likeness of all other pairs together.
            exact = (len(true_ids) + 1) * (true_ids[i] == guess_ids[j])
            weights[i, j] = exact + likeness + TIE_BREAK * overlap
    return weights


def _without(special_ids: AbstractSet[int], ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(token for token in ids if token not in special_ids)
