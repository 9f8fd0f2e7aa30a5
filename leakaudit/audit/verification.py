"""Verification that an observed update comes from the recorded batch.

The step is computed again. Every declared defence computes how it may have changed the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from leakaudit.audit.comparison import Update, UpdateComparison
from leakaudit.audit.known_factors import why_scaled
from leakaudit.audit.weight_difference import OTHER_ROUNDING, WeightDifference
from leakaudit.client.step import ClientStep
from leakaudit.errors import SnapshotError
from leakaudit.models.tensors import coarsest_dtype
from leakaudit.results.schema import Verification, VerificationStatus

TOLERANCE = {"bf16": 3e-2, "bfloat16": 3e-2, "fp16": 1e-2, "float16": 1e-2}
"""Largest relative error at which a recomputed update counts as the same.

It depends on the coarsest precision among autocast, facts and weights. Our choice: autocast steps (bf16) had an error of 5e-3 with eager
instead of fused attention; the update of a wrong batch has an error above 0.3.
"""


FLOAT32_TOLERANCE = 1e-3
"""Largest relative error for every other precision. Float32 steps had errors of 1e-8 to 1e-6."""


ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative rounding error of multiplying a gradient of this dtype by a factor.

It is half the distance between two neighbouring numbers.
"""


NOISE_TOLERANCE = 0.1
"""Largest relative error of a residual's standard deviation.

The error is relative to the standard deviation of the declared noise. Our choice.
"""


STANDARD_ERRORS = 5.0
"""Largest distance of a noised update's projection from 1, in standard errors.

The update is projected on the recomputed update. By chance, the projection is further away in one of two million steps. The update of
another batch has a projection below 1, with any noise.
"""


SAME_DIRECTION = 0.2
"""Smallest cosine with the recomputed update, for a step without random state.

A step with a smaller cosine is a mismatch. Our choice: with another dropout mask the cosine is 0.8 or more at the usual rate of 0.1.
"""


def verify(
    step: ClientStep, observed: Update, *, repeated: Update | None = None, tolerance: float | None = None
) -> Verification:
    """Compute a step again and judge the observed update.

    This is honesty rule 2 of the architecture.

    Every declared defence computes how it may have changed the recomputed update (`Defense.expected`) and how much noise it adds. A step
    that cannot be computed again is `unverifiable`, and the note says why. An update is a `mismatch` only if it certainly does not come
    from the batch.

    Args:
        step: the step from which the update is said to come.
        observed: parameter name -> observed update.
        repeated: the step's update if it was computed in another way; None computes it with `step`.
        tolerance: largest relative error between equal updates; None uses the tolerance of a rebuilt model.
    """
    try:
        return _Verifier(step, observed, repeated, tolerance).stamp()
    except SnapshotError as error:
        return _unverifiable(f"not recomputed: {error}")
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
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

    def __init__(
        self, step: ClientStep, observed: Update, repeated: Update | None = None, tolerance: float | None = None
    ) -> None:
        device = next(step.model.parameters()).device
        self.step, self.observed = step, {name: update.to(device) for name, update in observed.items()}
        computed_in = str(coarsest_dtype(step.model.parameters())).removeprefix("torch.")
        # Adapters may have a finer precision than the model below them.
        self.precisions = (str(step.recipe.autocast), step.facts.dtype, computed_in)
        usual = max(TOLERANCE.get(kind, FLOAT32_TOLERANCE) for kind in self.precisions)
        self.tolerance = usual if tolerance is None else tolerance
        self.repeated = repeated
        self.rounding = max((ROUNDING.get(update.dtype, 0.0) for update in observed.values()), default=0.0)
        self.unknown = [declared.name for declared in step.facts.defenses if declared.known() is None]
        plugins = [plugin for plugin in step.facts.known_defenses if plugin is not None]
        self.active = [plugin for plugin in plugins if not plugin.is_identity()]
        self.sigma = 0.0
        """Standard deviation of the declared noise, in the update's units.

        `_expected` sets it.
        """
        self.weights: WeightDifference | None = None
        """Comparison of every entry of a difference of weights.

        `stamp` sets it; None for a gradient.
        """

    def stamp(self) -> Verification:
        """Compute the step again and return the first stamp that fits.

        Raises:
            SnapshotError: the step or an expected update cannot be computed.
        """
        bare = self.step.update() if self.repeated is None else self.repeated
        plain = UpdateComparison.of(self.observed, bare)
        if self.step.facts.view == "delta":
            self.weights = WeightDifference(self.step, self.observed, bare, self.tolerance, self.precisions)
        all_absent = _LeftOut(absent=(*self.unknown, *(plugin.name for plugin in self.active)))
        try:
            found = UpdateComparison.of(self.observed, self._expected(bare)) if self.active else plain
        except SnapshotError:
            if undefended := self._stamp_same(plain, all_absent):
                return undefended
            raise
        no_noise = _LeftOut(absent=tuple(self.unknown), noiseless=self._noises())
        return (
            self._stamp_empty(found)
            or self._stamp_noised(found)
            or self._stamp_same(found, no_noise)
            or self._stamp_same(plain, all_absent)
            or self._stamp_scaled(found, no_noise, found.scale, found.scaled_error)
            or self._stamp_scaled(plain, all_absent, plain.scale, plain.scaled_error)
            or self._stamp_rescaled(bare, no_noise, (plain.scale, found.scale))
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
        """Return `factor` times `bare` after all defences, without their noise.

        It also sets `sigma`.
        """
        update: Update = bare if factor == 1.0 else {name: factor * gradient for name, gradient in bare.items()}
        sigma = 0.0
        for plugin in self.active:
            update = plugin.expected(self.step, update, self.observed, self.tolerance)
            sigma = math.hypot(sigma, plugin.added_noise(self.step, update))
        self.sigma = sigma
        return update

    def _noises(self) -> tuple[str, ...]:
        """Return the names of the declared defences that add noise."""
        return tuple(plugin.name for plugin in self.active if plugin.added_noise(self.step, self.observed) > 0)

    def _stamp_noised(self, found: UpdateComparison) -> Verification | None:
        """Stamp an update that differs from the expected one by the declared noise."""
        if not self.sigma or self.unknown:
            return None
        if not _is_noise(found, self.sigma, self.tolerance):
            return None
        error = self.sigma / found.norm
        note = (
            f"as declared; the recomputed update is in it {found.scale:.2f} times, with a standard error of {error:.2g}"
        )
        if STANDARD_ERRORS * error >= 1:
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
        if factor <= 0 or not self._is_same(found, error, max(self.tolerance, self.rounding), factor):
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
        for factor in factors:
            for _ in range(2):
                if not 0 < factor < math.inf:
                    break
                again = UpdateComparison.of(self.observed, self._expected(bare, factor))
                if stamp := self._stamp_scaled(again, left_out, factor, again.error):
                    return stamp
                factor *= again.scale
        return None

    def _stamp_different(self, found: UpdateComparison) -> Verification:
        """Stamp an update that differs from the expected one, with the reason if known."""
        numbers = (found.error, found.scale) if found.norm else (None, None)
        if self.unknown:
            return _unverifiable(
                f"the declared {' and '.join(self.unknown)} is not registered here, so what it does to an update is not known; "
                f"cosine {found.cosine:.2f} with the update recomputed without it",
                *numbers,
            )
        if self._noise_is_changed():
            return _unverifiable("the declared noise was changed by a defence that was applied after it", *numbers)
        if self.repeated is None and _loses_dropout(self.step) and self._same_direction(found):
            return _unverifiable(f"dropout state was not kept; cosine {found.cosine:.2f}", *numbers)
        if self.weights is not None and not self.active and self.weights.is_open():
            return _unverifiable(f"{OTHER_ROUNDING}; cosine {found.cosine:.2f}", *numbers)
        note = f"cosine {found.cosine:.2f} with the update recomputed from the kept batch{self.weights.note(found) if self.weights else ''}"
        return Verification(
            status=VerificationStatus.MISMATCH,
            note=note + self._clipping_hint(found),
            relative_error=numbers[0],
            scale=numbers[1],
        )

    def _clipping_hint(self, found: UpdateComparison) -> str:
        """Return a hint if a factor before the declared noise would explain the update.

        Another batch may explain the update as well. Empty if such a factor would not explain it.
        """
        if not self.sigma or found.scale <= STANDARD_ERRORS * self.sigma / found.norm:
            return ""
        left = found.scaled_difference.std
        if not any(abs(left - level) <= NOISE_TOLERANCE * level for level in (self.sigma, found.scale * self.sigma)):
            return ""
        return (
            f"; the declared noise would fit if the gradient was multiplied by {found.scale:.2g} before the noise, or if this is another "
            "batch: give `max_grad_norm` if the loop clips"
        )

    def _noise_is_changed(self) -> bool:
        """Return whether a defence without noise was applied after one with noise."""
        noisy = [plugin.added_noise(self.step, self.observed) > 0 for plugin in self.active]
        return any(noisy) and not all(noisy[noisy.index(True) :])

    def _same_direction(self, found: UpdateComparison) -> bool:
        """Return whether the two updates may have the same direction, given the noise."""
        if not self.sigma:
            return found.cosine >= SAME_DIRECTION
        return found.scale + STANDARD_ERRORS * self.sigma / found.norm >= SAME_DIRECTION


def _loses_dropout(step: ClientStep) -> bool:
    """Return whether a repetition of the step draws other dropout masks."""
    return step.recipe.training and bool(step.facts.dropout) and not _repeats_dropout(step)


def _is_noise(found: UpdateComparison, sigma: float, tolerance: float) -> bool:
    """Return whether the difference is independent noise of `sigma`.

    The difference must be as large as declared and unrelated to the update. The projection of independent noise on the update g has the
    standard deviation sigma / |g| in units of g. Without the second condition, noise far larger than the signal would hide the update of
    another batch.

    Args:
        found: the observed and the recomputed update.
        sigma: declared standard deviation.
        tolerance: relative error of the recomputation itself.
    """
    if abs(found.difference.std - sigma) > NOISE_TOLERANCE * sigma:
        return False
    return abs(found.scale - 1) <= tolerance + STANDARD_ERRORS * sigma / found.norm


def _repeats_dropout(step: ClientStep) -> bool:
    """Return whether the recorded random states reproduce the dropout masks here.

    They do so only on the kind of device that drew the masks.
    """
    if not step.recipe.kept_rng:
        return False
    here = next(step.model.parameters()).device.type
    return all(batch.rng and ("cuda" if "cuda" in batch.rng else "cpu") == here for batch in step.truth.micro_batches)
