"""From an observation to a reconstruction by gradient matching: what `dlg`, `tag` and both variants of LAMP do alike.

Letters: B sequences, C classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch

from leakaudit.attacks.embedding_rows import word_embedding
from leakaudit.attacks.matching_engine import MaskPlaces, Matcher
from leakaudit.attacks.matching_gradients import CandidateGradients
from leakaudit.attacks.matching_hybrid import Hybrid, hybrid_search
from leakaudit.attacks.matching_objective import Objective
from leakaudit.attacks.matching_search import Descent, Found, Rounds, Start, search
from leakaudit.attacks.matching_shape import BatchShape, guess_shape
from leakaudit.attacks.output_layer import number_of_classes
from leakaudit.attacks.precision import in_single_precision
from leakaudit.attacks.proof import prove
from leakaudit.attacks.reconstruction import APPLIES, Applicability, GuessedSequence, Reconstruction, not_applicable
from leakaudit.attacks.span import Span
from leakaudit.budget import Budget
from leakaudit.errors import AnatomyError
from leakaudit.snapshot import Observation

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Evidence = Literal["none", "span"]

Settings = TypeVar("Settings", bound="DataclassInstance")

EVIDENCE_SHARE = 0.5
"""Share of the budget that reading the evidence may take. Our choice."""

PROBE_LENGTH = 4
"""Tokens of the sequence that an attack is tried on before its evidence is read. Our choice."""


@dataclass(frozen=True)
class Recipe:
    """Everything that tells one attack by gradient matching from another."""

    objective: Objective
    descent: Descent
    start: Start
    rounds: Rounds | None = None
    """LAMP's."""
    hybrid: Hybrid | None = None
    """GRAB's."""
    dropout: bool = False
    """Learn dropout masks."""
    mask_weight: float = 0.0
    """What holds them at their mean, beside a gradient distance (`Matcher`)."""
    mask_places: MaskPlaces = "all"
    """Whose masks are learned."""
    aware: bool = True
    """Match norms, take out noise, fill in or mask entries and weigh parameters where the protocol declares clipping, noise or pruning."""
    fill: bool = True
    """Fill in what pruning removed instead of masking it."""
    relative: bool = True
    """Measure starts and steps in units of the word embedding."""
    length_weight: float = 0.0
    """alpha_reg of LAMP's regulariser."""
    exposure: str = "*"
    """Patterns of parameter names that are matched, joined by `+`."""

    evidence: Evidence = "none"
    """`span`: start from what exact recovery reads, however sure it is, and at the lengths that it finds."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return `exposure`, pattern by pattern."""
        return tuple(pattern.strip() for pattern in self.exposure.split("+"))


def can_match(seen: Observation, exposure: str, evidence: Evidence = "none") -> Applicability:
    """Say whether there is a gradient to match and a shape to match it with."""
    if "inputs_embeds" not in inspect.signature(seen.model.forward).parameters:
        return not_applicable(f"{type(seen.model).__name__} takes no `inputs_embeds`, so no dummy can be optimised")
    if not set(seen.update) - {word_embedding(seen)}:
        return not_applicable("no parameter beyond the word embedding has a shared update")
    single = in_single_precision(seen)
    try:
        number_of_classes(seen)
        if evidence == "span":
            reads = Span().applies(seen)
            if not reads:
                return not_applicable(f"there is no evidence to start from: {reads.reason}")
            lengths: tuple[int, ...] = (PROBE_LENGTH,)
        else:
            lengths = guess_shape(single).lengths
        CandidateGradients(single, lengths, exposure.split("+"))
    except AnatomyError as error:
        return not_applicable(str(error))
    return APPLIES


def match(seen: Observation, recipe: Recipe, rng: torch.Generator, budget: Budget) -> Reconstruction:
    """Search for a batch with the observed gradient and say what was found.

    Raises:
        AnatomyError: the batch's shape cannot be guessed, or no parameter can be matched.
    """
    read = Span()(seen, rng, budget.part(EVIDENCE_SHARE)).sequences or () if recipe.evidence == "span" else ()
    guesses = [guess.token_ids for guess in read]
    single = in_single_precision(seen)
    if guesses and seen.facts.granted.lengths is None:
        shape = BatchShape(tuple(map(len, guesses)), "span")
    else:
        shape = guess_shape(single)
    matcher = Matcher(
        single,
        shape.lengths,
        recipe.objective,
        length_weight=recipe.length_weight,
        exposure=recipe.patterns,
        dropout=recipe.dropout,
        mask_weight=recipe.mask_weight,
        mask_places=recipe.mask_places,
        aware=recipe.aware,
        fill=recipe.fill,
        relative=recipe.relative,
    )
    start = recipe.start if not guesses else replace(recipe.start, given=_fitting(guesses, shape.lengths))
    if recipe.hybrid is not None:
        found = hybrid_search(matcher, recipe.descent, start, recipe.hybrid, rng, budget)
    else:
        found = search(matcher, recipe.descent, start, recipe.rounds, rng, budget)
    return reconstruct(seen, matcher, shape, found, budget)


def _fitting(guesses: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> tuple[tuple[int, ...] | None, ...]:
    """Return for each length a guess that has it, each guess once."""
    left = list(guesses)
    found: list[tuple[int, ...] | None] = []
    for length in lengths:
        one = next((guess for guess in left if len(guess) == length), None)
        found.append(one)
        if one is not None:
            left.remove(one)
    return tuple(found)


def reconstruct(seen: Observation, matcher: Matcher, shape: BatchShape, found: Found, budget: Budget) -> Reconstruction:
    """Turn what a search found into sequences and class counts, and mark it as proved if the simulated step is the observed one.

    Labels that were granted are not returned as if they had been found.
    """
    guesses = [
        GuessedSequence(token_ids=tokens, confidence=likeness)
        for tokens, likeness in zip(found.tokens, found.likeness, strict=True)
    ]
    proof = prove(seen, guesses, budget)
    counts = proof.label_counts
    if counts is None:
        labels = matcher.labels(found.best.label_logits[0])
        counts = tuple(labels.count(label) for label in range(matcher.classes))
    facts = {
        "sequences": float(len(guesses)),
        "longest": float(max(shape.lengths)),
        "lengths_granted": float(shape.evidence == "granted"),
        "lengths_from_evidence": float(shape.evidence == "span"),
        "parameters": float(matcher.parameters),
    }
    return Reconstruction(
        sequences=tuple(sorted(proof.sequences, key=lambda guess: -guess.confidence)),
        label_counts=None if matcher.knows_labels else counts,
        stop=found.stop,
        facts=facts | found.facts | proof.facts,
    )


def check_knobs(
    attack: object, *, at_least_one: Sequence[str] = (), not_negative: Sequence[str] = (), positive: Sequence[str] = ()
) -> None:
    """Refuse knobs that leave nothing to do; one at None is the preset's.

    Raises:
        ValueError: names the knob.
    """
    rules: tuple[tuple[Sequence[str], str, Callable[[float], bool]], ...] = (
        (at_least_one, "be at least 1", lambda value: value < 1),
        (not_negative, "not be below 0", lambda value: value < 0),
        (positive, "be above 0", lambda value: value <= 0),
    )
    for knobs, rule, broken in rules:
        for knob in knobs:
            value = getattr(attack, knob)
            if value is not None and broken(value):
                raise ValueError(f"{knob} must {rule}, got {value}")


def with_knobs(preset: Settings, attack: object) -> Settings:
    """Return a preset, a dataclass, with the knobs of the same names that are set in an attack, which are not None."""
    given = {field.name: getattr(attack, field.name) for field in fields(preset)}
    return replace(preset, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class PlainMatching:
    """Knobs and course of DLG and TAG: normal starts, Adam, nearest tokens at the end."""

    steps: int = 2500
    """Adam steps (LAMP, Sec. 5)."""
    learning_rate: float = 0.5
    """Adam's step, relative to the root mean square of the word embedding's entries, without decay. LAMP, App. D, gives 0.1 in absolute
    terms, which for BERT is about 2 of that unit; 0.5 did best in our tuning on training sentences."""
    n_init: int = 10
    """Normal samples that are scored before the start. The papers take one; our choice of 10 costs as much as five steps."""
    restarts: int = 2
    """Best samples that get `trial_steps` steps side by side; the one with the lowest loss then goes on. Our choice."""
    trial_steps: int = 50
    """Steps in which restarts compete. Our choice: in that time the loss falls to about half."""
    patience: int = 200
    """Steps without a lower loss after which the attack stops as converged. Our choice."""
    labels: Literal["joint", "enumerate"] = "joint"
    """Labels that are not granted: optimised with the embeddings (DLG), or each assignment tried for `trial_steps`."""
    exposure: str = "*"
    """Parameters whose update is matched: patterns of names, joined by `+`, such as `*.layer.0.*`."""

    goal: ClassVar[Literal["text", "words", "labels"]] = "text"
    threat_model: ClassVar[str] = (
        "Sees one client's update and knows the weights; the client takes gradient steps without dropout on few sequences."
    )

    def __post_init__(self) -> None:
        """Refuse knobs that leave nothing to do."""
        whole = ("steps", "n_init", "restarts", "trial_steps", "patience")
        check_knobs(self, at_least_one=whole, positive=("learning_rate",))

    def applies(self, seen: Observation) -> Applicability:
        """Say whether there is a gradient to match and a shape to match it with."""
        return can_match(seen, self.exposure)

    def recipe(self, objective: Objective) -> Recipe:
        """Return the attack with one objective."""
        return Recipe(
            objective=objective,
            descent=Descent(self.steps, self.learning_rate, patience=self.patience),
            start=Start(self.n_init, restarts=self.restarts, trial_steps=self.trial_steps, labels=self.labels),
            exposure=self.exposure,
        )
