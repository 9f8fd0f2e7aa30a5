"""Reader for local steps whose difference of weights hides the gradients.

Adaptive optimizers divide a gradient by its own past, so several steps of Adam, or steps with moments of earlier rounds, leave no gradient in
the difference. Two things stay readable for any number K of steps:

- From fresh moments a row of the word embedding that had no gradient does not move, so the rows that moved name the words exactly.
- Without these rows, the leading directions of the difference still lean towards the inputs. They tell words of the batch from others, but
  not their positions; docs/decisions/adam_deltas.md has the figures.

So it returns words without order. (Own derivation.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.span.candidates import Scan
from leakaudit.algorithms.span.problem import SpanProblem, only_adapters
from leakaudit.algorithms.span.reachability import bag_of_words_reach
from leakaudit.algorithms.span.readers.bag_of_words import standing_out_words
from leakaudit.algorithms.span.subspace import stacked_update
from leakaudit.plugins.attack_protocol import Reconstruction

SCANNED = 16
"""Positions at which every word is tried. Our choice: a word that leans to the directions does so at every position."""

DIRECTIONS = 0.1
"""Leading directions, as a share of the hidden size.
Our choice: some tens of tokens, without knowing how many there are."""


def fits(problem: SpanProblem) -> bool:
    """Say whether the update comes from local steps that hide the gradients."""
    kind = problem.seen.facts.update_kind
    return kind not in ("gradient", "sgd") and not only_adapters(problem.seen.update, problem.anatomy)


def read(problem: SpanProblem) -> Reconstruction | None:
    """Return the words of the local steps; None if nothing tells them."""
    tokens = _leaning(problem) if problem.tokens is None else problem.tokens
    if tokens is None:
        return None
    around = problem.seen.facts.vocabulary.wordless_ids
    ids = tuple(sorted({token for token in tokens.tolist() if token not in around}))
    return Reconstruction(tokens=ids, diagnostics={"words": float(len(ids))}, reach=bag_of_words_reach(ids))


def _leaning(problem: SpanProblem) -> Tensor | None:
    """Return the words that lean to the leading directions more than chance explains.

    None if the inputs are not the sum of a token and a position.
    """
    if not problem.stage.additive:
        return None
    rows = stacked_update(problem.seen.update, problem.anatomy)
    count = max(1, int(DIRECTIONS * rows.shape[1]))
    vectors = torch.linalg.eigh(rows.T @ rows)[1].T[-count:]
    places = torch.arange(min(SCANNED, problem.stage.max_length), device=rows.device)
    outside = Scan(problem.stage, vectors, None, problem.keep, tuple(problem.special)).outside_share(places)
    return standing_out_words(outside.mean(dim=1), *vectors.shape)
