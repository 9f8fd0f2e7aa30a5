"""The declared defences that a verified update contains."""

from __future__ import annotations

from leakaudit.audit.comparison import Update
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.step import ClientStep
from leakaudit.results.schema import Verification


def defenses_found(step: ClientStep, stamp: Verification, observed: Update) -> tuple[DeclaredDefense, ...]:
    """Return the defences that are in the update, with absolute numbers.

    Numbers that are declared relative to the update are computed for this step. If the step without a declared defence gives the
    observed update, the update does not contain that defence: for example, a trainer with Opacus may call `step` of the wrong optimizer.
    Such a step is audited as undefended, or as defended without noise.
    """
    left = [(declared, declared.known()) for declared in defenses_left(step, stamp)]
    return tuple(declared if plugin is None else plugin.settled(step, observed).declared() for declared, plugin in left)


def defenses_left(step: ClientStep, stamp: Verification) -> tuple[DeclaredDefense, ...]:
    """Return the defences that are in the update, as the protocol declares them."""
    found = []
    for declared in step.facts.defenses:
        plugin = declared.known()
        if declared.name in stamp.absent:
            continue
        if plugin is None:
            found.append(declared)
        elif declared.name not in stamp.noiseless:
            found += [] if plugin.is_identity() else [declared]
        elif not plugin.without_noise().is_identity():
            found.append(plugin.without_noise().declared())
    return tuple(found)
