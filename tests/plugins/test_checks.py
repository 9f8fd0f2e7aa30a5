"""The shipped checks find each broken promise and name it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from leakaudit.plugins import (
    APPLIES,
    AdditiveNoise,
    Applicability,
    Budget,
    ClientStep,
    Defense,
    Goal,
    GuessedSequence,
    Level,
    Observation,
    Pair,
    PriorError,
    Reconstruction,
    Scorer,
    Vocabulary,
    not_applicable,
)
from leakaudit.plugins.testing import check_attack, check_defense, check_metric, check_prior
from leakaudit.registry import Registry, attacks, metrics

ATTACKS: Registry[Any] = Registry("attack", unless_stated=attacks._unless_stated)
DEFENSES: Registry[Any] = Registry("defense")
METRICS: Registry[Any] = Registry("metric", unless_stated=metrics._unless_stated)
PRIORS: Registry[Any] = Registry("prior")


@dataclass(frozen=True)
class FirstWord:
    """Guesses the first word of the vocabulary."""

    label: ClassVar[str] = "first word"
    meaning: ClassVar[str] = "Guesses the first word of the vocabulary."
    goal: ClassVar[Goal] = "words"
    source: ClassVar[str] = "made for a test"
    threat_model: ClassVar[str] = "Sees nothing."
    false_event_rate: ClassVar[float] = 0.0

    def applies(self, seen: Observation) -> Applicability:
        """Always."""
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Return it."""
        return Reconstruction(tokens=(5,))


def _like(kind: type, registry: Registry[Any], **changed: Any) -> Any:
    """Return a registered frozen dataclass with other class attributes or methods."""
    made = dataclasses.make_dataclass("Changed", [], bases=(kind,), frozen=True, namespace={**vars_of(kind), **changed})
    made.__doc__ = kind.__doc__
    fresh: Registry[Any] = Registry(registry.kind, unless_stated=registry._unless_stated)
    return fresh.register("changed")(made)


def vars_of(kind: type) -> dict[str, str]:
    """Return the label and the meaning, which stand in each class itself."""
    return {name: value for name in ("label", "meaning") if (value := vars(kind).get(name)) is not None}


def _draws(self: Any, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
    return Reconstruction(tokens=(int(torch.randint(5, 40, ())),))


def _writes(self: Any, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
    next(iter(seen.update.values())).zero_()
    return Reconstruction(tokens=(5,))


def _trains(self: Any, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
    seen.model.train()
    return Reconstruction(tokens=(5,))


def _is_sure(self: Any, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
    return Reconstruction(tokens=(5,), sequences=(GuessedSequence((5,), own_score=7.0),))


def _asks_for_the_truth(self: Any, seen: Observation, rng: torch.Generator, budget: Budget, truth: Any) -> Any:
    return Reconstruction(tokens=(5,))


def _guess(**fields: Any) -> Any:
    def call(self: Any, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        return Reconstruction(**fields)

    return call


def _refusing(reason: str) -> Any:
    def applies(self: Any, seen: Observation) -> Applicability:
        return not_applicable(reason)

    return applies


def test_an_attack_that_keeps_its_promises_passes() -> None:
    """As a class and as an instance."""
    check_attack(_like(FirstWord, ATTACKS))
    check_attack(_like(FirstWord, ATTACKS)())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"goal": "sums"}, r"changed: `goal` is one of text, words, labels; found sums"),
        ({"reads": "weights"}, r"changed: `reads` is one of update, gradient, direction; found weights"),
        ({"threat_model": ""}, r"`threat_model` is a text that says something; found ''"),
        ({"label": "First word."}, r"`label` stands in the class itself, has at most 30 characters and no full stop"),
        ({"meaning": "guesses"}, r"`meaning` stands in the class itself and is a sentence"),
        ({"false_event_rate": 3.0}, r"`false_event_rate` is a probability; found 3\.0"),
        (
            {"applies": _refusing("no gradient of a river")},
            r"applies to one of: .*; found only refusals: no gradient of",
        ),
        ({"applies": _refusing("")}, r"a refusal has a reason, on a classifier"),
        (
            {"__call__": _draws},
            r"the same generator gives the same guess, on a classifier; found two different guesses",
        ),
        ({"__call__": _writes}, r"an attack leaves the update as it was, on a classifier; found other values"),
        ({"__call__": _trains}, r"an attack leaves the model as it was, on a classifier; found other training flags"),
        ({"__call__": _asks_for_the_truth}, r"an attack is called as `__call__\(self, seen: Observation, .*found"),
        ({"__call__": _guess(tokens=(5,), stop="tired")}, r"`stop` is one of budget, done, converged, .*found 'tired'"),
        ({"__call__": _guess(tokens=(5,), diagnostics={"loss": float("nan")})}, r"finite numbers.*others: loss"),
        ({"__call__": _guess()}, r"an attack whose goal is words fills `tokens`, on a classifier; found None"),
        ({"__call__": _guess(tokens=(10**6,))}, r"token ids are at least 0 and below \d+, .*found \[1000000\]"),
        ({"__call__": _is_sure}, r"an own score is from 0 to 1, on a classifier; found \[7\.0\]"),
    ],
)
def test_a_promise_that_an_attack_breaks_is_named(changed: dict[str, Any], message: str) -> None:
    """What was asked, where, and what was found."""
    with pytest.raises(AssertionError, match=message):
        check_attack(_like(FirstWord, ATTACKS, **changed))


def test_a_class_that_is_not_registered_is_told_so() -> None:
    """It would never be run."""
    with pytest.raises(AssertionError, match="FirstWord: a plugin is registered, with a decorator such as"):
        check_attack(dataclasses.make_dataclass("FirstWord", [], bases=(FirstWord,), frozen=True))


@dataclass(frozen=True)
class Halved(Defense):
    """Sends half of the update."""

    strength: float = 1.0

    label: ClassVar[str] = "halved"
    meaning: ClassVar[str] = "Sends half of the update."
    identity: ClassVar[Mapping[str, Any]] = {"strength": 0.0}
    resized: ClassVar[bool] = True
    source: ClassVar[str] = "made for a test"
    protects: ClassVar[str] = "Nothing."
    cost: ClassVar[str] = "Half of the learning rate."

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return half of it."""
        return seen if self.is_identity() else seen.under(self.declared(), self._halved(seen.update))

    def expected(
        self, step: ClientStep, recomputed: Mapping[str, Tensor], observed: Mapping[str, Tensor], tolerance: float
    ) -> Mapping[str, Tensor]:
        """Return half of it."""
        return self._halved(recomputed)

    def _halved(self, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor / 2 for name, tensor in update.items()}


@dataclass(frozen=True)
class Shy(AdditiveNoise):
    """Adds noise."""

    label: ClassVar[str] = "shy"
    meaning: ClassVar[str] = "Adds noise."
    source: ClassVar[str] = "made for a test"
    protects: ClassVar[str] = "Nothing."
    cost: ClassVar[str] = "Nothing."

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return noise on it."""
        sigma = AdditiveNoise.added_noise(self, step, seen.update)
        noisy = {name: g + sigma * torch.randn(g.shape, generator=rng) for name, g in seen.update.items()}
        return seen.under(self.declared(), noisy) if sigma else seen


def _in_place(self: Any, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
    for tensor in seen.update.values():
        tensor.mul_(0.5)
    return seen.under(self.declared(), seen.update)


def _silent(self: Any, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
    return seen if self.is_identity() else dataclasses.replace(seen, update=self._halved(seen.update))


@pytest.mark.parametrize("kind", [Halved, Shy])
def test_a_defence_that_keeps_its_promises_passes(kind: type) -> None:
    """One that scales, and one that adds noise."""
    check_defense(_like(kind, DEFENSES))


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        (Halved, {"cost": ""}, r"`cost` is a text that says something"),
        (Halved, {"__call__": _in_place}, r"at `identity` the observation is unchanged"),
        (Halved, {"__call__": _silent}, r"a defence declares its name and its knobs: `seen\.under\(.*found nothing"),
        (
            Halved,
            {"expected": Defense.expected},
            r"what is sent is `expected\(\.\.\.\)` plus noise of the standard deviation",
        ),
        (
            Shy,
            {"added_noise": Defense.added_noise},
            r"plus noise .*on a classifier; found .* between them, and a noise of 0",
        ),
        (Shy, {"noise": Defense.noise}, r"`noise\(sent\)` is at least the noise that was added, .*; found 0"),
        (Shy, {"without_noise": Defense.without_noise}, r"`without_noise\(\)` adds no noise, on a classifier; found"),
    ],
)
def test_a_promise_that_a_defence_breaks_is_named(kind: type, changed: dict[str, Any], message: str) -> None:
    """Otherwise honest steps would be a mismatch, and noise a list of words."""
    with pytest.raises(AssertionError, match=message):
        check_defense(_like(kind, DEFENSES, **changed))


@dataclass(frozen=True)
class SameStart:
    """Share of the true tokens that the guess begins with."""

    label: ClassVar[str] = "same start"
    meaning: ClassVar[str] = "Share of the true tokens that the guess begins with."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = "made for a test"

    def __call__(self, pair: Pair) -> float | None:
        """Return the share."""
        same = [a == b for a, b in zip(pair.true_ids, pair.guess_ids, strict=False)]
        return (same.index(False) if False in same else len(same)) / len(pair.true_ids)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"level": "word"}, r"changed: `level` is one of sequence, batch, step; found 'word'"),
        ({"higher_is_better": False}, r"a higher number is better for the attacker; found False"),
        ({"needs_guess": True}, r"without a guess there is nothing to measure.*: None; found 0\.0"),
        ({"__call__": lambda self, pair: 100.0}, r"the perfect guess scores 1; found 100\.0"),
        ({"__call__": lambda self, pair: 1.0}, r"no guess at all scores 0, unless `needs_guess` is stated; found 1\.0"),
    ],
)
def test_a_promise_that_a_metric_breaks_is_named(changed: dict[str, Any], message: str | None) -> None:
    """Numbers of different units could not be compared by one policy."""
    if message is None:
        check_metric(_like(SameStart, METRICS, **changed))
        return
    with pytest.raises(AssertionError, match=message):
        check_metric(_like(SameStart, METRICS, **changed))


@dataclass(frozen=True)
class LongWords:
    """Finds every token as likely as its number is high."""

    source: ClassVar[str] = "made for a test"
    knows: ClassVar[str] = "Nothing."

    def load(self, vocabulary: Vocabulary, victim: torch.nn.Module | None = None) -> Scorer:
        """Return the scorer."""
        return _Scorer()


class _Scorer:
    def nll(self, sequences: Any) -> list[float]:
        return [1.0 + sum(sequence) for sequence in sequences]

    def next_token_nll(self, prefixes: Any) -> None:
        return None


class _Counting(_Scorer):
    """A scorer that answers otherwise each time."""

    def __init__(self) -> None:
        self.calls = 0

    def nll(self, sequences: Any) -> list[float]:
        self.calls += 1
        return [float(self.calls) for _ in sequences]


def _counting(self: Any, vocabulary: Vocabulary, victim: torch.nn.Module | None = None) -> Scorer:
    return _Counting()


def _sees_the_update(self: Any, vocabulary: Vocabulary, update: Mapping[str, Tensor]) -> Scorer:
    return _Scorer()


def _of_other_tokens(self: Any, vocabulary: Vocabulary, victim: torch.nn.Module | None = None) -> Scorer:
    raise PriorError("it knows other tokens")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"knows": ""}, r"changed: `knows` is a text that says something"),
        ({"load": _counting}, r"the same question gets the same answer; found"),
        ({"load": _sees_the_update}, r"`load` takes the vocabulary and the public model, and nothing else; found"),
        ({"load": _of_other_tokens}, r"found it knows other tokens\. Hand over an instance that knows them"),
    ],
)
def test_a_promise_that_a_prior_breaks_is_named(changed: dict[str, Any], message: str | None) -> None:
    """A prior is language and nothing else."""
    if message is None:
        check_prior(_like(LongWords, PRIORS, **changed))
        return
    with pytest.raises(AssertionError, match=message):
        check_prior(_like(LongWords, PRIORS, **changed))
