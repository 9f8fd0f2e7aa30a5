"""What a step's declared defences make of its update, and the noise that they add."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from leakaudit.audit.comparison import Update
from leakaudit.client.noise_level import NoiseLevel
from leakaudit.client.observation import part_of
from leakaudit.client.step import ClientStep


def expected_update(
    step: ClientStep, defenses: Sequence[Any], bare: Update, observed: Update, tolerance: float
) -> tuple[Update, NoiseLevel]:
    """Return the update after declared defences, and the level of their noise.

    Args:
        step: the step that the update is said to come from.
        defenses: plugins in the order in which they apply (`leakaudit.plugins.Defense`).
        bare: parameter name -> update before the defences.
        observed: parameter name -> update as it was sent.
        tolerance: largest relative error of `bare`. It is the largest one that is possible, because a defence that jumps (a sign, a level) may
            turn a smaller error of one entry into a large one.

    Raises:
        SnapshotError: the step cannot be computed again under a defence.
    """
    update, levels = bare, dict.fromkeys(bare, 0.0)
    for plugin in defenses:
        update = plugin.expected(step, update, observed, tolerance)
        added = noise_added(step, plugin, update)
        levels |= {name: math.hypot(levels.get(name, 0.0), level) for name, level in added.items()}
    return update, NoiseLevel(levels)


def noise_added(step: ClientStep, plugin: Any, update: Update) -> dict[str, float]:
    """Return the level of a defence's noise on each parameter that gets it.

    Args:
        step: the step that made the update.
        plugin: the defence.
        update: parameter name -> update without its noise.
    """
    added = plugin.added_noise(step, update)
    return dict.fromkeys(part_of(update, plugin.chosen(step.model)), added) if added else {}
