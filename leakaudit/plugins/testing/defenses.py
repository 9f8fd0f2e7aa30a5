"""Checks of what every defence promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from leakaudit.client.observation import part_of, root_mean_square
from leakaudit.client.step import ClientStep
from leakaudit.plugins.defense_protocol import Defense
from leakaudit.plugins.testing.promises import ModelState, can_be_shown, describes_itself, instance, promise
from leakaudit.plugins.testing.steps import classifier_step, language_model_step

STEPS: Mapping[str, Callable[[], ClientStep]] = {
    "a classifier": classifier_step,
    "a language model": language_model_step,
}
"""Description of a step -> function that makes a new one at each call."""

TOLERANCE = 1e-5
"""Largest relative error of a recomputed update. Our choice: float32 rounding is 1e-7 for one entry, and grows in sums."""

NOISE_ERROR = 0.1
"""Largest relative error of a noise level. Our choice: verification rejects a noise level that is wrong by more than a tenth."""


def check_defense(defense: Any) -> None:
    """Check a defence against what every defence promises.

    Args:
        defense: the class, or an instance if a knob has to be set.

    Raises:
        AssertionError: a promise is broken. The message says what was asked and what was found.
    """
    defense = instance(defense)
    describes_itself(defense, "protects", "cost")
    can_be_shown(defense)
    promise(
        isinstance(defense, Defense),
        defense,
        "a defence has all that `leakaudit.plugins.Defense` lists: inherit from it",
    )
    for what, make in STEPS.items():
        _is_the_identity_at_no_strength(defense, what, make())
        _declares_itself_and_changes_nothing(defense, what, make())
        _accounts_for_what_it_does(defense, what, make())


def _is_the_identity_at_no_strength(defense: Any, what: str, step: ClientStep) -> None:
    """Check that the defence does nothing at `identity`.

    Otherwise an audit would compare two undefended runs that differ.
    """
    promise(
        isinstance(defense.identity, Mapping), defense, "`identity` maps knobs to the values at which it does nothing"
    )
    seen, zero = step.observe(), type(defense)(**defense.identity)
    promise(zero.is_identity(), defense, "`is_identity` is true for the knobs of `identity`", dict(defense.identity))
    same = zero(step, seen, torch.Generator().manual_seed(0))
    unchanged = same.digest() == seen.digest() and same.facts == seen.facts
    promise(
        unchanged, defense, f"at `identity` the observation is unchanged, on {what}", "another update or other facts"
    )


def _declares_itself_and_changes_nothing(defense: Any, what: str, step: ClientStep) -> None:
    """Check that the defence changes nothing in place and declares itself."""
    seen = step.observe()
    digest, before = seen.digest(), ModelState.of(seen.model)
    defended = defense(step, seen, torch.Generator().manual_seed(0))
    promise(seen.digest() == digest, defense, f"a defence leaves the update that it is handed as it was, on {what}")
    changed = before.changed(seen.model)
    promise(not changed, defense, f"a defence leaves the model as it was, on {what}", f"other {', '.join(changed)}")
    sent = set(defended.update)
    promise(set(defended.facts.shared) == sent, defense, f"`facts.shared` names what is sent, on {what}", sent)
    if defense.is_identity():
        return
    promise(defended.digest() != digest, defense, f"away from `identity` a defence changes the update, on {what}")
    if defense.of_step:
        undeclared = defended.facts.defenses == seen.facts.defenses
        promise(undeclared, defense, f"another recipe of the step is not declared as a defence, on {what}")
        return
    declared = defended.facts.defenses[-1] if defended.facts.defenses else None
    knobs = defense.declared().parameters
    complete = declared and declared.name == defense.name and knobs.items() <= declared.parameters.items()
    promise(
        complete,
        defense,
        f"a defence declares its name and its knobs: `seen.under(self.declared(), update)`, on {what}",
        declared or "nothing",
    )


def _accounts_for_what_it_does(defense: Any, what: str, step: ClientStep) -> None:
    """Check that the sent update is that of `expected` plus the stated noise.

    Verification relies on this. Otherwise it would mistake a step that declares and applies the defence for a step of another batch.
    """
    if defense.of_step:
        return  # a run with it is verified as a run with that recipe
    clean = step.update()
    seen = defense(step, step.observe(), torch.Generator().manual_seed(3))
    sent = {name: seen.update.get(name, torch.zeros_like(g)) for name, g in clean.items()}
    made = defense.expected(step, clean, sent, TOLERANCE)
    chosen = defense.chosen(step.model)
    error = root_mean_square(part_of({name: sent[name] - made[name] for name in sent}, chosen))
    sigma = defense.added_noise(step, made)
    close = abs(error - sigma) <= NOISE_ERROR * sigma + 10 * TOLERANCE * root_mean_square(sent)
    asked = "what is sent is `expected(...)` plus noise of the standard deviation `added_noise(...)`"
    promise(close, defense, f"{asked}, on {what}", f"{error:.3g} between them, and a noise of {sigma:.3g}")
    if sigma > 0:
        quiet = defense.without_noise().added_noise(step, made)
        promise(quiet == 0, defense, f"`without_noise()` adds no noise, on {what}", f"{quiet:.3g}")
        _tells_its_noise(defense, what, sigma, part_of(seen.update, chosen))


def _tells_its_noise(defense: Any, what: str, sigma: float, sent: Mapping[str, Tensor]) -> None:
    """Check the noise level that attacks ask for.

    If the stated level were below the real one, attacks would name words by chance.
    """
    told = defense.noise(sent)
    enough = told >= (1 - NOISE_ERROR) * sigma
    promise(
        enough, defense, f"`noise(sent)` is at least the noise that was added, {sigma:.3g}, on {what}", f"{told:.3g}"
    )
    promise(
        type(defense).noise.__doc__, defense, "`noise` has a docstring that says how the level follows from the knobs"
    )
