"""Error feedback: what is dropped from one update is sent with the next ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leakaudit.client.observation import Observation, Update, part_of
from leakaudit.client.step import ClientStep
from leakaudit.plugins.defense_protocol import Defense


@dataclass
class SentInOrder:
    """The updates of one run, sent one after the other under one defence.

    With error feedback (Karimireddy et al. 2019, Algorithm 2; on gradients, as the PowerSGD hook of torch) step t sends
    C(g(t) + e(t)) and keeps e(t + 1) = g(t) + e(t) - C(g(t) + e(t)), with C the defence and e(1) = 0. So a window of steps sends
    the sum of its gradients, but for the difference of the two memories at its ends. An adversary who adds up a window sees that sum.
    """

    defense: Defense
    """A defence of the update (`on_update`); `send` needs a prepared one."""
    left: dict[str, Tensor] = field(default_factory=dict)
    """Parameter name -> what earlier steps dropped, in the units of the update. It is private: it never leaves the training."""

    def send(self, update: Update, rng: torch.Generator) -> Update:
        """Return what is sent at the next step, and remember what is dropped.

        Args:
            update: parameter name -> update of this step. It is not changed.
            rng: source of all random numbers.
        """
        if not self.defense.error_feedback:
            return self.defense.changed(update, rng)
        carried = {name: g + self.left[name] if name in self.left else g for name, g in update.items()}
        sent = self.defense.changed(carried, rng)
        self.left |= {name: carried[name] - sent[name] for name in sent}
        return sent

    def send_part(self, update: Update, chosen: Collection[str] | None, rng: torch.Generator) -> Update:
        """Return what is sent at the next step if the defence changes a part of it.

        The defence is prepared for this update; the other parameters are sent as they are.

        Args:
            update: parameter name -> update of this step. It is not changed.
            chosen: names of the parameters that the defence changes; None for all.
            rng: source of all random numbers.
        """
        part = part_of(update, chosen)
        if not part:
            return update
        prepared = SentInOrder(self.defense.prepared(part, 1.0), self.left)
        return {**update, **prepared.send(part, rng)}


def mean_of_window(defense: Defense, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
    """Return the mean of the consecutive updates that a defence sends.

    The memory of the defence is empty before the first one.

    Args:
        defense: with error feedback, or without.
        step: a window of updates (`StepRecipe.window`).
        seen: the mean of these updates without the defence. It is not changed.
        rng: source of all random numbers.

    Raises:
        SnapshotError: an update cannot be computed.
    """
    order, chosen = SentInOrder(defense), defense.chosen(seen.model)
    total: dict[str, Tensor] = {}
    for clean in step.consecutive():
        for name, sent in order.send_part(clean, chosen, rng).items():
            total[name] = total[name] + sent if name in total else sent
    return seen.under(defense.declared(), {name: sent / step.recipe.window for name, sent in total.items()})
