"""Gradient matching from an observation to a reconstruction.

`dlg`, `tag`, both variants of LAMP and `grab` use it. A `Recipe` holds the settings in which they differ.

Letters: B sequences, C classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from leakaudit.algorithms.labels.output_layer import number_of_classes
from leakaudit.algorithms.matching.batch_shape import BatchShape, guess_shape
from leakaudit.algorithms.matching.candidate_gradients import CandidateGradients
from leakaudit.algorithms.matching.descent import Descent
from leakaudit.algorithms.matching.guessed_labels import labels_of
from leakaudit.algorithms.matching.hybrid_search import Hybrid, hybrid_search
from leakaudit.algorithms.matching.known_tokens import KnownTokens
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.objective import Matching, Objective
from leakaudit.algorithms.matching.permutation_rounds import Rounds
from leakaudit.algorithms.matching.search import Found, search
from leakaudit.algorithms.matching.starts import Start
from leakaudit.algorithms.matching.word_table import WordTable
from leakaudit.algorithms.precision import in_single_precision
from leakaudit.algorithms.resimulation import prove
from leakaudit.algorithms.span.recover import can_recover, recover
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import word_embedding
from leakaudit.plugins.attack_protocol import (
    APPLIES,
    Applicability,
    GuessedSequence,
    Reconstruction,
    not_applicable,
)
from leakaudit.plugins.budget import Budget

StartSource = Literal["none", "span"]

START_SHARE = 0.5
"""Share of the budget for exact recovery (`start=span`). Our choice."""

PROBE_LENGTH = 4
"""Tokens of the sequence with which `can_match` tests an attack if `start=span`. Our choice."""


@dataclass(frozen=True)
class Recipe(Matching):
    """All settings of one attack by gradient matching."""

    objective: Objective
    descent: Descent
    start: Start
    rounds: Rounds | None = None
    """LAMP's discrete rounds."""
    hybrid: Hybrid | None = None
    """GRAB's rounds."""
    start_source: StartSource = "none"
    """With `span`, start from the sequences that exact recovery reads, with their lengths, even if it is not sure of them."""


def can_match(
    seen: Observation, exposure: str, start_source: StartSource = "none", *, lowest_id: int = 0
) -> Applicability:
    """Return whether gradient and batch shape are known, so that matching applies."""
    if "inputs_embeds" not in inspect.signature(seen.model.forward).parameters:
        return not_applicable(f"{type(seen.model).__name__} takes no `inputs_embeds`, so no candidate can be optimised")
    if seen.facts.own_loss is False:
        return not_applicable(
            "the client's loss is not the one that the model computes itself, so the gradient of a guessed text tells nothing about it"
        )
    if not set(seen.update) - {word_embedding(seen.model)}:
        return not_applicable("no parameter beyond the word embedding has a shared update")
    single = in_single_precision(seen)
    try:
        _check_labels(seen)
        if start_source == "span":
            reads = can_recover(seen)
            if not reads:
                return not_applicable(f"there is no evidence to start from: {reads.reason}")
            lengths: tuple[int, ...] = (PROBE_LENGTH,)
        else:
            lengths = guess_shape(single).lengths
        words = WordTable(single, lengths, lowest_id=lowest_id)
        known = KnownTokens(seen.facts.vocabulary, lengths, words.table)
        CandidateGradients(single, lengths, labels_of(single, lengths, words, known), exposure.split("+"))
    except AnatomyError as error:
        return not_applicable(str(error))
    return APPLIES


def _check_labels(seen: Observation) -> None:
    """Refuse tasks whose labels a candidate cannot have.

    Raises:
        AnatomyError: labels are neither one class a sequence nor the next tokens.
    """
    if seen.facts.task in ("masked-lm", "encoder-decoder", "other"):
        raise AnatomyError(
            "matching knows labels that are one class a sequence, and those of a causal language model, which are the next "
            f"tokens; this task is {seen.facts.task}"
        )
    if seen.facts.task == "classification":
        number_of_classes(seen)


def reconstruct_by_matching(seen: Observation, recipe: Recipe, rng: torch.Generator, budget: Budget) -> Reconstruction:
    """Search for a batch with the observed gradient, and return the result.

    Raises:
        AnatomyError: the batch's shape cannot be guessed, or no parameter can be matched.
    """
    read = recover(seen, rng, budget.part(START_SHARE)).sequences or () if recipe.start_source == "span" else ()
    guesses = [guess.token_ids for guess in read]
    single = in_single_precision(seen)
    if guesses and seen.facts.granted.lengths is None:
        shape = BatchShape(tuple(map(len, guesses)), "span")
    else:
        shape = guess_shape(single)
    matcher = Matcher(single, shape.lengths, recipe.objective, recipe)
    start = recipe.start if not guesses else replace(recipe.start, given=_fitting(guesses, shape.lengths))
    if recipe.hybrid is not None:
        found = hybrid_search(matcher, recipe.descent, start, recipe.hybrid, rng, budget)
    else:
        found = search(matcher, recipe.descent, start, recipe.rounds, rng, budget)
    return reconstruct(seen, matcher, shape, found, budget)


def _fitting(guesses: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> tuple[tuple[int, ...] | None, ...]:
    """Return for each length a guess of that length, or None; each guess once."""
    left = list(guesses)
    found: list[tuple[int, ...] | None] = []
    for length in lengths:
        one = next((guess for guess in left if len(guess) == length), None)
        found.append(one)
        if one is not None:
            left.remove(one)
    return tuple(found)


def reconstruct(seen: Observation, matcher: Matcher, shape: BatchShape, found: Found, budget: Budget) -> Reconstruction:
    """Return the sequences and class counts of a search's result.

    Sequences are marked as proved if the simulated update is the observed one. Granted labels are not returned as label counts.
    """
    guesses = [
        GuessedSequence(token_ids=tokens, own_score=likeness)
        for tokens, likeness in zip(found.tokens, found.likeness, strict=True)
    ]
    proof = prove(seen, guesses, budget)
    counts = proof.label_counts
    if counts is None:
        labels = matcher.labels.likeliest(found.best.label_logits[0])
        counts = tuple(labels.count(label) for label in range(matcher.labels.classes))
    facts = {
        "sequences": float(len(guesses)),
        "longest": float(max(shape.lengths)),
        "lengths_granted": float(shape.evidence == "granted"),
        "lengths_from_evidence": float(shape.evidence == "span"),
        "parameters": float(matcher.parameters),
    }
    return Reconstruction(
        sequences=tuple(sorted(proof.sequences, key=lambda guess: -guess.own_score)),
        label_counts=counts if matcher.labels.enumerable else None,
        counts_told=proof.label_counts is not None or seen.noise_sigma == 0.0,
        stop=found.stop,
        diagnostics=facts | found.facts | proof.diagnostics,
    )
