"""`sign`: send only the sign of every entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from leakaudit.plugins import ClientStep, Defense, Update, defense, root_mean_square, uncertainties

NEAR_ZERO = 10.0
"""An entry may have either sign if it is below this many times its error. Our choice: the tolerance bounds the error of all entries
together, but each wrong sign counts fully. The larger entries are enough to recognise another batch."""


@defense("sign")
@dataclass(frozen=True)
class Sign(Defense):
    """Send +1, 0 or -1 for every entry, as signSGD does.

    The sizes of all entries are lost, and so are those of whole matrices. An entry that is exactly zero stays zero. So the rows of the
    word embedding stay zero for tokens that are not in the batch.
    """

    entries: Literal["all", "none"] = "all"
    """With `none` the defence does nothing."""

    label: ClassVar[str] = "signs"
    meaning: ClassVar[str] = "Sends only the sign of every entry of the update."
    identity: ClassVar[Mapping[str, Any]] = {"entries": "none"}
    resized: ClassVar[bool] = True
    on_update = True
    source: ClassVar[str] = "signSGD (Bernstein et al. 2018, Algorithm 1)"
    protects: ClassVar[str] = "Hides how large any entry is."
    cost: ClassVar[str] = "Another optimiser: the server sees directions only; a thirty-second of the traffic."

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the signs."""
        return {name: tensor.sign() for name, tensor in update.items()}

    def sent_bytes(self, sent: Update) -> float:
        """Return the size of an update of signs, in bytes.

        It is one bit for an entry, and two bits where some entries are zero, because there are then three signs.
        """
        if self.is_identity():
            return super().sent_bytes(sent)
        has_zeros = any(bool((tensor == 0).any()) for tensor in sent.values())
        return (2 if has_zeros else 1) * sum(tensor.numel() for tensor in sent.values()) / 8

    def noise(self, sent: Update, before: float = 0.0) -> float:
        """Return the root mean square of `sent` if there was noise before.

        Signs of noise and of gradients look alike, so all of `sent` may be noise.
        """
        return root_mean_square(sent) if before > 0 and not self.is_identity() else before

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return the signs.

        If an entry may have either sign within its error, the observed sign is taken.
        """
        if self.is_identity():
            return recomputed
        off = uncertainties(recomputed, NEAR_ZERO * tolerance)
        return {
            name: observed[name].sign().clamp((gradient - off[name]).sign(), (gradient + off[name]).sign())
            for name, gradient in recomputed.items()
        }
