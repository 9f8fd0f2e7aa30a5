"""Under declared noise of any defence, no attack claims more than without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from leakaudit.audit.scoring.score import score
from leakaudit.client.facts import Granted
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.errors import AnatomyError
from leakaudit.plugins import Defense, Reconstruction
from leakaudit.plugins.testing.attacks import ticking
from leakaudit.registry import attacks, defenses
from tests.support import tiny
from tests.support.any_defense import STEPS, at_drawn_knobs


def _adds_noise(kind: type[Defense]) -> bool:
    step, _ = STEPS["classification"]
    return kind().added_noise(step, step.update()) > 0


NOISY = [kind for _, kind in defenses if _adds_noise(kind)]
"""Defences that add noise at their default knobs, whatever they are called."""

READERS = [pytest.param(kind, id=name) for name, kind in attacks if kind.goal == "words"]
GUESSERS = [pytest.param(kind, id=name) for name, kind in attacks if kind.goal in ("words", "text")]

MIN_TOKENS = 3
"""Tokens of a sentence whose recovery counts: fewer than usual, so that chance has an easier time."""


def _guess(attack: Any, seen: Observation) -> Reconstruction | None:
    """Return a guess after fifteen looks at the clock; None if there is none.

    An attack is not applicable, or finds that only when it reads the update.
    """
    if not attack.applies(seen):
        return None
    try:
        guess: Reconstruction | None = attack(seen, torch.Generator().manual_seed(0), ticking(15))
    except AnatomyError:
        return None
    return guess


def _events(guess: Reconstruction | None, step: ClientStep) -> set[str]:
    """Return the events of a guess that is scored against the batch of a step."""
    if guess is None:
        return set()
    special = step.facts.vocabulary.wordless_ids
    return set(score(guess, step.truth.sequences(), None, None, tiny.bert_tokenizer(), special, MIN_TOKENS).events)


def _lengths_granted(step: ClientStep, seen: Observation) -> Observation:
    """Return the observation with what searches need where noise hides it."""
    return seen.granting(Granted(lengths=tuple(map(len, step.truth.sequences()))))


def test_noise_is_found_by_what_a_defence_says_and_not_by_its_name() -> None:
    """The registered ones that draw a noise are all tried here."""
    assert {kind.name for kind in NOISY} >= {"dp-sgd", "gaussian-noise", "laplace-noise"}


@pytest.mark.parametrize("attack", READERS)
@pytest.mark.parametrize("kind", NOISY)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_attack_names_more_words_under_declared_noise(kind: type[Defense], attack: Any, data: st.DataObject) -> None:
    """Noise makes every row non-zero; that must not name the vocabulary."""
    fitting = [step for step, _ in STEPS.values() if attack().applies(step.observe())]
    step = data.draw(st.sampled_from(fitting))
    defense = data.draw(at_drawn_knobs(kind))
    assume(not defense.is_identity())
    clean = _guess(attack(), step.observe())
    noised = _guess(attack(), defense(step, step.observe(), torch.Generator().manual_seed(1)))
    assert clean is not None and (noised is None or len(noised.tokens or ()) <= len(clean.tokens or ()))


@pytest.mark.parametrize("attack", GUESSERS)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_attack_has_more_events_on_wrong_words_under_declared_noise(attack: Any, data: st.DataObject) -> None:
    """The guess is scored against a batch that it was not made from."""
    for step, other in STEPS.values():
        defense = data.draw(st.sampled_from(NOISY).flatmap(at_drawn_knobs))
        seen = _lengths_granted(step, step.observe())
        clean = _events(_guess(attack(), seen), other)
        noised = _events(_guess(attack(), defense(step, seen, torch.Generator().manual_seed(1))), other)
        assert noised <= clean
