"""Verification that an observed update comes from the recorded batch.

The step is computed again. Every declared defence computes how it may have changed the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from leakaudit.audit.accuracy import ROUNDING, Accuracy, distance_of_orders, loses_dropout
from leakaudit.audit.comparison import Update, UpdateComparison
from leakaudit.audit.declared_noise import (
    NOISE_TOLERANCE,
    STANDARD_ERRORS,
    clipping_hint,
    fits_levels,
    noise_is_changed,
    opposite_direction,
    root_mean_square_level,
    same_direction,
)
from leakaudit.audit.expected_update import expected_update
from leakaudit.audit.known_factors import refined_factors, why_scaled
from leakaudit.audit.tensor_factors import rescaled
from leakaudit.audit.weight_difference import OTHER_ROUNDING, WeightDifference
from leakaudit.client.noise_level import NoiseLevel
from leakaudit.client.step import ClientStep
from leakaudit.errors import ModelError, SnapshotError
from leakaudit.results.schema import Verification, VerificationStatus

ROUNDED = 0.98
"""Smallest cosine at which coarse rounding that is not repeated here may be all that differs.

Our choice: it is an error of a fifth. TF32 (10 bits) moved updates of a T5 by 1e-2 and more (`docs/measurements/gpu.md`).
"""


def verify(step: ClientStep, observed: Update, *, repeated: Update | None = None) -> Verification:
    """Compute a step again and judge the observed update.

    This is honesty rule 2 of the architecture.

    Every declared defence computes how it may have changed the recomputed update (`Defense.expected`) and how much noise it adds. A step
    that cannot be computed again is `unverifiable`, and the note says why. An update is a `mismatch` only if it certainly does not come
    from the batch.

    Where the verdict depends on how much of the error is rounding, the step is computed once more with another order of additions. An error
    that rounding does not explain, but that other hardware might, makes the step `unverifiable`.

    Args:
        step: the step from which the update is said to come.
        observed: parameter name -> observed update.
        repeated: the step's update if it was computed in another way; None computes it with `step`.

    Raises:
        torch.OutOfMemoryError: the GPU has no room to compute the step, which says nothing about it.
    """
    try:
        return _Verifier(step, observed, repeated).stamp()
    except (ModelError, SnapshotError) as error:
        return _unverifiable(f"not recomputed: {error}")
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        if repeated is None and isinstance(error, torch.OutOfMemoryError):
            raise
        # The note has only the type: a message of the model's own code may quote its inputs.
        return _unverifiable(f"recomputing raised {type(error).__name__}")


def _unverifiable(note: str, relative_error: float | None = None, scale: float | None = None) -> Verification:
    return Verification(status=VerificationStatus.UNVERIFIABLE, note=note, relative_error=relative_error, scale=scale)


@dataclass(frozen=True)
class _LeftOut:
    """Declared defences that an expected update leaves out.

    If the observed update equals the expected one, it does not contain them.
    """

    absent: tuple[str, ...] = ()
    """Names of defences that are left out as a whole."""
    noiseless: tuple[str, ...] = ()
    """Names of defences whose noise is left out."""


class _Verifier:
    """Comparison of an observed update with the result of a step and its defences."""

    def __init__(self, step: ClientStep, observed: Update, repeated: Update | None = None) -> None:
        device = next(step.model.parameters()).device
        self.step, self.observed = step, {name: update.to(device) for name, update in observed.items()}
        self.accuracy = Accuracy.of(step)
        self.tolerance = self.accuracy.largest
        """Largest relative error that counts as rounding; `stamp` narrows it."""
        self.repeated = repeated
        self.rounding = max((ROUNDING.get(update.dtype, 0.0) for update in observed.values()), default=0.0)
        self.unknown = [declared.name for declared in step.facts.defenses if declared.known() is None]
        plugins = [plugin for plugin in step.facts.known_defenses if plugin is not None]
        self.active = [plugin for plugin in plugins if not plugin.is_identity()]
        self.all_absent = _LeftOut(absent=(*self.unknown, *(plugin.name for plugin in self.active)))
        self.levels = NoiseLevel({})
        """Declared noise of each parameter; `_expected` sets it."""
        self.sigma = 0.0
        """Standard deviation of the declared noise over all entries, in the update's units.

        `_expected` sets it.
        """
        self.weights: WeightDifference | None = None
        """Comparison of every entry of a difference of weights.

        `stamp` sets it; None for a gradient.
        """

    def stamp(self) -> Verification:
        """Compute the step again and judge the update.

        Raises:
            SnapshotError: the step cannot be computed, or an expected update cannot while the update has defences.
        """
        bare = self.step.update() if self.repeated is None else self.repeated
        plain = UpdateComparison.of(self.observed, bare)
        if self.step.facts.view == "delta":
            self.weights = WeightDifference(
                self.step, self.observed, bare, self.accuracy.largest, self.accuracy.precisions
            )
        try:
            found = UpdateComparison.of(self.observed, self._expected(bare)) if self.active else plain
        except SnapshotError:
            found = None
            if not self._stamp_same(plain, self.all_absent):
                raise
        loose = self._first_stamp(plain, found)
        if self.repeated is not None or self.weights is not None or not loose.status.bounds:
            return loose
        self.tolerance = self.accuracy.tight
        strict = self._first_stamp(plain, found)
        if _agree(strict, loose):
            return strict
        if why := self.accuracy.why_unmeasured(self.step):
            return loose.model_copy(update={"note": "; ".join(filter(None, (loose.note, why)))})
        updates = [(plain.own, None), *([(found.own, self._expected)] if self.active and found else [])]
        distance = distance_of_orders(self.step, updates)
        self.tolerance = self.accuracy.limit(distance)
        measured = self._first_stamp(plain, found)
        return measured if measured.status.bounds else _beyond_rounding(loose, distance, _inputs_rounded(self.step))

    def _first_stamp(self, plain: UpdateComparison, found: UpdateComparison | None) -> Verification:
        """Return the first stamp that fits, at the present tolerance.

        Args:
            plain: the comparison with the recomputed update without defences.
            found: the comparison with the expected update; None if it cannot be computed.
        """
        if found is None:
            return self._stamp_same(plain, self.all_absent) or self._stamp_different(plain)
        no_noise = _LeftOut(absent=tuple(self.unknown), noiseless=self._noises())
        return (
            self._stamp_empty(found)
            or self._stamp_noised(found)
            or self._stamp_same(found, no_noise)
            or self._stamp_same(plain, self.all_absent)
            or self._stamp_scaled(found, no_noise, found.scale, found.scaled_error)
            or self._stamp_scaled(plain, self.all_absent, plain.scale, plain.scaled_error)
            or self._stamp_rescaled(plain.own, no_noise, (plain.scale, found.scale))
            or self._stamp_different(found)
        )

    def _stamp_empty(self, found: UpdateComparison) -> Verification | None:
        """Stamp a step whose observed or recomputed update is all zero.

        The step is a mismatch unless both are zero or a declared defence is unknown.
        """
        empty = [found.seen_norm == 0.0, found.norm == 0.0]
        if not any(empty) or (self.unknown and not empty[0]):
            return None
        if all(empty) or self.unknown:
            return _unverifiable("the observed update is all zero, so it could come from any batch")
        return Verification(
            status=VerificationStatus.MISMATCH, note="the observed or the recomputed update is all zero"
        )

    def _expected(self, bare: Update, factor: float = 1.0) -> Update:
        """Return `factor` times `bare` after all defences; set `levels` and `sigma`."""
        scaled: Update = bare if factor == 1.0 else {name: factor * gradient for name, gradient in bare.items()}
        update, self.levels = expected_update(self.step, self.active, scaled, self.observed, self.accuracy.largest)
        self.sigma = root_mean_square_level(self.levels, update)
        return update

    def _noises(self) -> tuple[str, ...]:
        """Return the names of the declared defences that add noise."""
        return tuple(plugin.name for plugin in self.active if plugin.added_noise(self.step, self.observed) > 0)

    def _stamp_noised(self, found: UpdateComparison) -> Verification | None:
        """Stamp an update that differs from the expected one by the declared noise."""
        if not self.sigma or self.unknown:
            return None
        if not fits_levels(found, self.levels, self.tolerance):
            return None
        error = self.sigma / found.norm
        note = (
            f"as declared; the recomputed update is in it {found.scale:.2f} times, with a standard error of {error:.2g}"
        )
        if STANDARD_ERRORS * error >= 1 and self.levels.is_even:
            note += ": the noise is so large that the update of another batch would pass as well"
        return Verification(
            status=VerificationStatus.NOISED,
            relative_error=found.error,
            scale=1.0,
            sigma=found.difference.std,
            note=note,
        )

    def _stamp_same(self, found: UpdateComparison, left_out: _LeftOut) -> Verification | None:
        """Stamp an update that equals the expected one without `left_out`."""
        if not self._is_same(found, found.error, self.tolerance):
            return None
        left_out = self._certainly(left_out, found)
        return Verification(
            status=VerificationStatus.VERIFIED,
            relative_error=found.error,
            scale=1.0,
            note=self._missing_note(left_out),
            absent=left_out.absent,
            noiseless=left_out.noiseless,
        )

    def _is_same(self, found: UpdateComparison, error: float, tolerance: float, factor: float = 1.0) -> bool:
        """Return whether an update equals `factor` times the expected one.

        Every entry of a difference of weights has to, up to rounding, unless a declared defence is expected in it.
        """
        if self.weights is None or found.own is not self.weights.own:
            return error <= tolerance
        return self.weights.explained(error, factor)

    def _stamp_scaled(
        self, found: UpdateComparison, left_out: _LeftOut, factor: float, error: float
    ) -> Verification | None:
        """Stamp an update that is `factor` times the expected one without `left_out`.

        Args:
            found: the comparison with the expected update.
            left_out: defences that the expected update leaves out.
            factor: observed over expected update.
            error: relative error that remains with this factor.
        """
        # Only a gradient that was multiplied is rounded by that.
        rounding = self.rounding if abs(factor - 1) > self.rounding else 0.0
        if factor <= 0 or not self._is_same(found, error, max(self.tolerance, rounding), factor):
            return None
        left_out = self._certainly(left_out, found)
        return Verification(
            status=VerificationStatus.SCALED,
            relative_error=error,
            scale=factor,
            note="; ".join(
                filter(None, (why_scaled(self.step, found, factor, self.rounding), self._missing_note(left_out)))
            ),
            absent=left_out.absent,
            noiseless=left_out.noiseless,
        )

    def _certainly(self, left_out: _LeftOut, found: UpdateComparison) -> _LeftOut:
        """Return the defences that are certainly left out.

        If the difference is as large as the declared noise, the noise may be in the update and is not returned.
        """
        room = found.difference.std >= (1 - NOISE_TOLERANCE) * self.sigma
        return replace(left_out, noiseless=()) if self.sigma and room else left_out

    def _missing_note(self, left_out: _LeftOut) -> str:
        """Return a note on the declared defences that the update lacks, or ""."""
        only_noise = {plugin.name for plugin in self.active if plugin.without_noise().is_identity()}
        whole = [*left_out.absent, *(name for name in left_out.noiseless if name in only_noise)]
        missing = [*whole, *(f"noise of {name}" for name in left_out.noiseless if name not in only_noise)]
        if not missing:
            return ""
        said = f"the declared {' and '.join(missing)} is not in the update"
        return said if len(whole) < len(self.unknown) + len(self.active) else f"{said}: it was sent undefended"

    def _stamp_rescaled(self, bare: Update, left_out: _LeftOut, factors: Sequence[float]) -> Verification | None:
        """Stamp an update whose gradient was scaled before its defences.

        It finds updates whose defences do not simply multiply the result by the same factor.

        Args:
            bare: the step's update without defences.
            left_out: defences that the expected update leaves out.
            factors: guesses of the factor. Each is refined once, because it contains the errors of the defences.
        """
        if not self.active or any(plugin.resized for plugin in self.active):
            return None
        for guess in factors:
            for factor, again in refined_factors(guess, lambda k: self._compared(bare, k), self.accuracy):
                if stamp := self._stamp_scaled(again, left_out, factor, again.error):
                    return stamp
        return None

    def _compared(self, bare: Update, factor: float) -> UpdateComparison:
        return UpdateComparison.of(self.observed, self._expected(bare, factor))

    def _stamp_different(self, found: UpdateComparison) -> Verification:
        """Stamp an update that differs from the expected one, with the reason if known."""
        numbers = (found.error, found.scale) if found.norm else (None, None)
        if self.unknown:
            return _unverifiable(
                f"the declared {' and '.join(self.unknown)} is not registered here, so what it does to an update is not known; "
                f"cosine {found.cosine:.2f} with the update recomputed without it",
                *numbers,
            )
        if noise_is_changed([plugin.added_noise(self.step, self.observed) > 0 for plugin in self.active]):
            return _unverifiable("the declared noise was changed by a defence that was applied after it", *numbers)
        if why := _why_other_here(self.step, self.accuracy, found, self.sigma, computed=self.repeated is None):
            return _unverifiable(f"{why}; cosine {found.cosine:.2f}", *numbers)
        if self.weights is not None and not self.active and self.weights.is_open():
            return _unverifiable(f"{OTHER_ROUNDING}; cosine {found.cosine:.2f}", *numbers)
        # Every entry of a difference of weights has to be explained, and a factor for a small tensor explains anything.
        if not self.sigma and self.weights is None and (stamp := rescaled(found, max(self.tolerance, self.rounding))):
            return stamp
        note = f"cosine {found.cosine:.2f} with the update recomputed from the kept batch{self.weights.note(found) if self.weights else ''}"
        return Verification(
            status=VerificationStatus.MISMATCH,
            note=note + clipping_hint(found, self.sigma),
            relative_error=numbers[0],
            scale=numbers[1],
        )


def _why_other_here(
    step: ClientStep, accuracy: Accuracy, found: UpdateComparison, sigma: float, *, computed: bool
) -> str:
    """Return why the client's own computation may differ from the one here.

    Empty if what differs here cannot explain the update.
    """
    if computed and loses_dropout(step) and not opposite_direction(found, sigma):
        return "the dropout masks cannot be drawn again here"
    if (rounded := _inputs_rounded(step)) and same_direction(found, sigma):
        return rounded
    coarse = computed and accuracy.is_coarse and found.cosine >= ROUNDED
    return accuracy.why_unmeasured(step) if coarse else ""


def _inputs_rounded(step: ClientStep) -> str:
    """Return a clause on quantised layers that round their inputs, or ""."""
    names = step.recipe.rounding_layers
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"the client's quantised layers {names[0]!r}{more} round their inputs to 8 bits, and the step was computed again with their "
        "matrices alone"
    )


def _beyond_rounding(loose: Verification, distance: float, cause: str) -> Verification:
    """Return the stamp of an update that fits at the largest tolerance only.

    Args:
        loose: the stamp at that tolerance.
        distance: between replays in two orders of additions.
        cause: what is known to make a difference; empty if nothing is.
    """
    cause = (
        cause
        or "it was changed after the backward pass, or other hardware trained; verify it on the machine that trained"
    )
    return _unverifiable(
        f"the update is {loose.relative_error:.1e} off, and computing it with another order of additions changes it by {distance:.1e}: {cause}",
        loose.relative_error,
        loose.scale,
    )


def _agree(one: Verification, two: Verification) -> bool:
    """Return whether two stamps say the same of an update, up to its numbers."""
    return (one.status, one.absent, one.noiseless) == (two.status, two.absent, two.noiseless)
