"""Updates of which each tensor has a factor that only the client knows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from leakaudit.audit.comparison import UpdateComparison, pieces
from leakaudit.results.schema import Verification, VerificationStatus

LEAST_ENTRIES = 100
"""Entries of the largest tensor from which a fit of one factor a tensor says that an update comes from the batch.

A tensor of one entry fits always, and the bias of two classes does. Our choice: a random direction of 100 entries fits to 3 % less than once in
10^100 cases.
"""


def rescaled(found: UpdateComparison, tolerance: float) -> Verification | None:
    """Stamp a gradient whose tensors have factors of their own, of either sign.

    Noise hides such factors. In a difference of weights every entry has to be explained, which a fit of a whole tensor does not do. So the caller
    asks for neither.

    Args:
        found: the comparison with the expected update.
        tolerance: largest relative error that remains with the factors.
    """
    factors = TensorFactors.of(found)
    if factors.entries < LEAST_ENTRIES or factors.error > tolerance:
        return None
    return Verification(
        status=VerificationStatus.RESCALED,
        relative_error=factors.error,
        note=f"each of {factors.tensors} tensors is the recomputed one times a factor that nothing declared explains, from "
        f"{factors.smallest:.3g} to {factors.largest:.3g}; it is attacked as it was observed",
    )


@dataclass(frozen=True)
class TensorFactors:
    """How far each observed tensor is a multiple of the recomputed one."""

    error: float
    """||own - seen / k|| / ||own|| with the best factor k of each tensor; infinite where nothing can be compared.

    It is what verification measures without factors, so it is compared with the same tolerance. Tensors that are all zero in the observed
    update are left out.
    """
    smallest: float
    largest: float
    tensors: int
    """Number of tensors that were compared."""
    entries: int
    """Number of entries of the largest of them."""

    @classmethod
    def of(cls, found: UpdateComparison) -> TensorFactors:
        """Fit one factor to each tensor by least squares."""
        left = squares = 0.0
        factors, entries = [], 0
        for name, own in found.own.items():
            seen_seen = own_own = seen_own = 0.0
            for seen, mine in pieces({name: found.seen[name]}, {name: own}):
                seen_seen, own_own = seen_seen + float(seen @ seen), own_own + float(mine @ mine)
                seen_own += float(seen @ mine)
            if seen_seen and own_own:
                squares += own_own
                left += max(0.0, own_own - seen_own**2 / seen_seen)
                factors.append(seen_own / own_own)
                entries = max(entries, own.numel())
        error = math.sqrt(left / squares) if squares else math.inf
        return cls(error, min(factors, default=0.0), max(factors, default=0.0), len(factors), entries)
