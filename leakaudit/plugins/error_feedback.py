"""Error feedback: what is dropped from one update is sent with the next ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from leakaudit.client.observation import Update
from leakaudit.plugins.defense_protocol import Defense


@dataclass
class SentInOrder:
    """The updates of one run, sent one after the other under one defence.

    With error feedback (Karimireddy et al. 2019, Algorithm 2; on gradients, as the PowerSGD hook of torch) step t sends
    C(g(t) + e(t)) and keeps e(t + 1) = g(t) + e(t) - C(g(t) + e(t)), with C the defence and e(1) = 0. So a window of steps sends
    the sum of its gradients, but for the difference of the two memories at its ends. An adversary who adds up a window sees that sum.
    """

    defense: Defense
    """A prepared defence of the update (`on_update`)."""
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
