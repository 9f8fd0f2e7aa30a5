"""Checks whether an observed update comes from the batch that was kept.

The step is computed again, and every declared defence says what it may have made of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import check_finite
from leakaudit.client.step import ClientStep
from leakaudit.errors import SnapshotError
from leakaudit.models.tensors import coarsest_dtype
from leakaudit.results.schema import Verification, VerificationStatus

TOLERANCE = {"bf16": 3e-2, "bfloat16": 3e-2, "fp16": 1e-2, "float16": 1e-2}
"""Relative error up to which a recomputed update counts as the same, by autocast or else the weights' precision. Our choice: autocast steps
were measured at 5e-3 (bf16) with eager instead of fused attention; a wrong batch is above 0.3."""

FLOAT32_TOLERANCE = 1e-3
"""The same for every other precision: float32 steps were measured at 1e-8 to 1e-6."""

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error that multiplying a gradient of this type by a factor may add: half the distance of two neighbouring numbers."""

NOISE_TOLERANCE = 0.1
"""Relative error up to which a residual's standard deviation is the declared one."""

STANDARD_ERRORS = 5.0
"""How far the projection of a noised update on the recomputed one may lie from 1, in standard errors: by chance it does so
once in two million steps, while the update of another batch, hidden in however much noise, projects on less than 1."""

FACTOR_TOLERANCE = 1e-3
"""How near a factor must lie to a known one to be given its name. Our choice: two such factors are never that close."""

SAME_DIRECTION = 0.2
"""Cosine between observed and recomputed update below which a step whose random state was not kept is a mismatch. Our
choice: another dropout mask leaves 0.8 or more at the usual rate of 0.1."""

Update = Mapping[str, Tensor]


def verify(
    step: ClientStep, observed: Update, *, repeated: Update | None = None, tolerance: float | None = None
) -> Verification:
    """Compute a step again and stamp the observed update (architecture, honesty rule 2).

    Every declared defence says what it may have made of the recomputed update (`Defense.expected`) and how much noise it adds. What
    cannot be computed again is `unverifiable`, with the reason in the note; only an update that is known not to come from the
    batch is a `mismatch`.

    Args:
        step: where the update is said to come from.
        observed: parameter name -> observed update.
        repeated: the step's update, where it was computed again by other means; None to compute it with `step`.
        tolerance: relative error up to which the two are one; None for what a rebuilt model needs.
    """
    try:
        return _Stamping(step, observed, repeated, tolerance).stamp()
    except SnapshotError as error:
        return _unverifiable(f"not recomputed: {error}")
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        # The type only: a message of the model's own code may quote its inputs.
        return _unverifiable(f"recomputing raised {type(error).__name__}")


def relative_error(observed: Update, recomputed: Update) -> float:
    """Return ||observed - recomputed|| / ||recomputed|| over all entries.

    It is infinite if the second is zero.

    Raises:
        NonFiniteUpdateError: the second is not finite.
    """
    return _Compared.of(observed, recomputed).error


def error_up_to_a_factor(observed: Update, recomputed: Update) -> float:
    """Return the relative error up to the best factor k.

    That is ||observed - k recomputed|| / (k ||recomputed||); it is infinite if k is not above zero.

    Raises:
        NonFiniteUpdateError: the second is not finite.
    """
    found = _Compared.of(observed, recomputed)
    return found.scaled_error if found.scale > 0 else float("inf")


def defenses_found(step: ClientStep, stamp: Verification, observed: Update) -> tuple[DeclaredDefense, ...]:
    """Return the declared defences that are in the update, with all that is relative to the step or its update filled in.

    Where a step comes out the same when it is computed again without a defence, that defence is not in its update, whatever the
    protocol says (this happened to users of Opacus who trained through a trainer that stepped the wrong optimizer). Such a step is
    audited as what it is: undefended, or defended without noise.
    """
    left = [(declared, declared.known()) for declared in defenses_left(step, stamp)]
    return tuple(declared if plugin is None else plugin.settled(step, observed).declared() for declared, plugin in left)


def defenses_left(step: ClientStep, stamp: Verification) -> tuple[DeclaredDefense, ...]:
    """Return the declared defences that are in the update, as the protocol declares them."""
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


def _unverifiable(note: str, relative_error: float | None = None, scale: float | None = None) -> Verification:
    return Verification(status=VerificationStatus.UNVERIFIABLE, note=note, relative_error=relative_error, scale=scale)


PIECE = 1 << 20
"""Entries that are compared at a time, so that their float64 copies take a few megabytes, whatever the model's size. Our choice."""


@dataclass(frozen=True)
class _Compared:
    """An observed and a recomputed update, as sums over their entries.

    The sums are in float64, and neither update is copied.
    """

    seen: Update
    own: Update
    entries: int
    seen_norm: float
    norm: float
    """Of the recomputed one."""
    product: float
    """<seen, own>."""
    difference: _Moments
    """Of seen - own."""

    @classmethod
    def of(cls, observed: Update, recomputed: Update) -> _Compared:
        check_finite(recomputed)
        sums = [0.0] * 5
        for seen, own in _pieces(observed, recomputed):
            left = seen - own
            found = torch.stack([seen @ seen, own @ own, seen @ own, left.sum(), left @ left]).tolist()
            sums = [total + more for total, more in zip(sums, found, strict=True)]
        entries = sum(tensor.numel() for tensor in recomputed.values())
        return cls(
            seen=observed,
            own=recomputed,
            entries=entries,
            seen_norm=math.sqrt(sums[0]),
            norm=math.sqrt(sums[1]),
            product=sums[2],
            difference=_Moments(entries, sums[3], sums[4]),
        )

    @property
    def error(self) -> float:
        """||seen - own|| / ||own||; infinite where own is zero."""
        return self.difference.norm / self.norm if self.norm else float("inf")

    @property
    def scale(self) -> float:
        """K = <seen, own> / <own, own>; 0 where own is zero."""
        return self.product / self.norm**2 if self.norm else 0.0

    @cached_property
    def scaled_difference(self) -> _Moments:
        """Of seen - k own, read from the entries.

        From the sums its square would come out with an error of 1e-8.
        """
        total = squares = 0.0
        for seen, own in _pieces(self.seen, self.own):
            left = seen - self.scale * own
            total, squares = total + float(left.sum()), squares + float(left @ left)
        return _Moments(self.entries, total, squares)

    @property
    def scaled_error(self) -> float:
        """||seen - k own|| / (|k| ||own||); infinite where k is zero."""
        return self.scaled_difference.norm / (abs(self.scale) * self.norm) if self.scale else float("inf")

    @property
    def cosine(self) -> float:
        """Between the two; 0 where one of them is zero."""
        length = self.norm * self.seen_norm
        return self.product / length if length else 0.0


@dataclass(frozen=True)
class _Moments:
    """Sums over the entries of a vector."""

    entries: int
    total: float
    squares: float

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    @property
    def std(self) -> float:
        """Standard deviation of the entries, with n - 1 in the denominator.

        It is 0 for a single entry.
        """
        spread = self.squares - self.total**2 / max(1, self.entries)
        return math.sqrt(max(0.0, spread) / max(1, self.entries - 1))


def _pieces(observed: Update, recomputed: Update) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the entries of both updates in float64, piece by piece.

    A piece belongs to one parameter.
    """
    for name, own in recomputed.items():
        both = zip(observed[name].flatten().split(PIECE), own.flatten().split(PIECE), strict=True)
        yield from ((seen.double(), mine.double()) for seen, mine in both)


@dataclass(frozen=True)
class _Gone:
    """Declared defences that an expected update leaves out; where the observed one is the same, they are not in it."""

    absent: tuple[str, ...] = ()
    """By name, altogether."""
    noiseless: tuple[str, ...] = ()
    """By name, their noise."""


class _Stamping:
    """One step that is computed again, and what its declared defences say of it."""

    def __init__(
        self, step: ClientStep, observed: Update, repeated: Update | None = None, tolerance: float | None = None
    ) -> None:
        device = next(step.model.parameters()).device
        self.step, self.observed = step, {name: update.to(device) for name, update in observed.items()}
        computed_in = str(coarsest_dtype(step.model.parameters())).removeprefix("torch.")
        # Adapters are finer than the model below them.
        types = (str(step.recipe.autocast), step.facts.dtype, computed_in)
        usual = max(TOLERANCE.get(kind, FLOAT32_TOLERANCE) for kind in types)
        self.tolerance = usual if tolerance is None else tolerance
        self.repeated = repeated
        self.rounding = max((ROUNDING.get(update.dtype, 0.0) for update in observed.values()), default=0.0)
        self.unknown = [declared.name for declared in step.facts.defenses if declared.known() is None]
        plugins = [plugin for plugin in step.facts.known_defenses if plugin is not None]
        self.active = [plugin for plugin in plugins if not plugin.is_identity()]
        self.sigma = 0.0
        """Standard deviation of the declared noise, in the update's units."""

    def stamp(self) -> Verification:
        bare = self.step.update() if self.repeated is None else self.repeated
        plain = _Compared.of(self.observed, bare)
        all_absent = _Gone(absent=(*self.unknown, *(plugin.name for plugin in self.active)))
        try:
            found = _Compared.of(self.observed, self._expected(bare)) if self.active else plain
        except SnapshotError:
            if undefended := self._same(plain, all_absent):
                return undefended
            raise
        no_noise = _Gone(absent=tuple(self.unknown), noiseless=self._noises())
        return (
            self._empty(found)
            or self._noised(found)
            or self._same(found, no_noise)
            or self._same(plain, all_absent)
            or self._scaled(found, no_noise, found.scale, found.scaled_error)
            or self._scaled(plain, all_absent, plain.scale, plain.scaled_error)
            or self._rescaled(bare, no_noise, (plain.scale, found.scale))
            or self._different(found)
        )

    def _empty(self, found: _Compared) -> Verification | None:
        """Stamp an update of zeros, or one that should be zero: only where both are, or a defence is unknown, it may be this batch's."""
        empty = [found.seen_norm == 0.0, found.norm == 0.0]
        if not any(empty) or (self.unknown and not empty[0]):
            return None
        if all(empty) or self.unknown:
            return _unverifiable("the observed update is all zero, so it could come from any batch")
        return Verification(
            status=VerificationStatus.MISMATCH, note="the observed or the recomputed update is all zero"
        )

    def _expected(self, bare: Update, factor: float = 1.0) -> Update:
        """Return what the declared defences make of `factor` times the step's update, without noise; sets `sigma`."""
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

    def _noised(self, found: _Compared) -> Verification | None:
        """Stamp an update that differs from the expected one as declared noise does."""
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

    def _same(self, found: _Compared, gone: _Gone) -> Verification | None:
        """Stamp an update that is the expected one, from which `gone` is left out."""
        if found.error > self.tolerance:
            return None
        gone = self._seen_to_be(gone, found)
        return Verification(
            status=VerificationStatus.VERIFIED,
            relative_error=found.error,
            scale=1.0,
            note=self._said(gone),
            absent=gone.absent,
            noiseless=gone.noiseless,
        )

    def _scaled(self, found: _Compared, gone: _Gone, factor: float, error: float) -> Verification | None:
        """Stamp an update that is `factor` times the expected one up to `error`, from which `gone` is left out."""
        if factor <= 0 or error > max(self.tolerance, self.rounding):
            return None
        gone = self._seen_to_be(gone, found)
        return Verification(
            status=VerificationStatus.SCALED,
            relative_error=error,
            scale=factor,
            note="; ".join(filter(None, (_why_scaled(self.step, found, factor, self.rounding), self._said(gone)))),
            absent=gone.absent,
            noiseless=gone.noiseless,
        )

    def _seen_to_be(self, gone: _Gone, found: _Compared) -> _Gone:
        """Return what is gone for certain: not the noise, where the error leaves room for as much as is declared."""
        room = found.difference.std >= (1 - NOISE_TOLERANCE) * self.sigma
        return replace(gone, noiseless=()) if self.sigma and room else gone

    def _said(self, gone: _Gone) -> str:
        """Say which declared defences are not in the update; empty where all are."""
        only_noise = {plugin.name for plugin in self.active if plugin.without_noise().is_identity()}
        whole = [*gone.absent, *(name for name in gone.noiseless if name in only_noise)]
        missing = [*whole, *(f"noise of {name}" for name in gone.noiseless if name not in only_noise)]
        if not missing:
            return ""
        said = f"the declared {' and '.join(missing)} is not in the update"
        return said if len(whole) < len(self.unknown) + len(self.active) else f"{said}: it was sent undefended"

    def _rescaled(self, bare: Update, gone: _Gone, factors: Sequence[float]) -> Verification | None:
        """Stamp an update whose gradient was multiplied by a factor before the defences, which do not keep factors.

        Args:
            bare: the step's update without defences.
            gone: what the expected update leaves out.
            factors: guesses of the factor; each is made better once, because a defence's own errors are in it.
        """
        if not self.active or any(plugin.resized for plugin in self.active):
            return None
        for factor in factors:
            for _ in range(2):
                if not 0 < factor < math.inf:
                    break
                again = _Compared.of(self.observed, self._expected(bare, factor))
                if stamp := self._scaled(again, gone, factor, again.error):
                    return stamp
                factor *= again.scale
        return None

    def _different(self, found: _Compared) -> Verification:
        """Stamp an update that is not the expected one, by what is known of the reason."""
        numbers = (found.error, found.scale) if found.norm else (None, None)
        if self.unknown:
            return _unverifiable(
                f"the declared {' and '.join(self.unknown)} is not registered here, so what it does to an update is not known; "
                f"cosine {found.cosine:.2f} with the update recomputed without it",
                *numbers,
            )
        if self._veiled():
            return _unverifiable("the declared noise was changed by a defence that was applied after it", *numbers)
        if self._loses_dropout() and self._same_direction(found):
            return _unverifiable(f"dropout state was not kept; cosine {found.cosine:.2f}", *numbers)
        note = f"cosine {found.cosine:.2f} with the update recomputed from the kept batch"
        return Verification(
            status=VerificationStatus.MISMATCH,
            note=note + self._if_clipped(found),
            relative_error=numbers[0],
            scale=numbers[1],
        )

    def _if_clipped(self, found: _Compared) -> str:
        """Say where an unknown factor before the declared noise would explain the update; another batch may do so, too."""
        if not self.sigma or found.scale <= STANDARD_ERRORS * self.sigma / found.norm:
            return ""
        left = found.scaled_difference.std
        if not any(abs(left - level) <= NOISE_TOLERANCE * level for level in (self.sigma, found.scale * self.sigma)):
            return ""
        return (
            f"; the declared noise would fit if the gradient was multiplied by {found.scale:.2g} before the noise, or if this is another "
            "batch: give `max_grad_norm` if the loop clips"
        )

    def _veiled(self) -> bool:
        """Return whether a defence without noise was applied after one with noise."""
        noisy = [plugin.added_noise(self.step, self.observed) > 0 for plugin in self.active]
        return any(noisy) and not all(noisy[noisy.index(True) :])

    def _loses_dropout(self) -> bool:
        return (
            self.repeated is None
            and self.step.recipe.training
            and bool(self.step.facts.dropout)
            and not _repeats_dropout(self.step)
        )

    def _same_direction(self, found: _Compared) -> bool:
        """Return whether the two share a direction, under noise as far as it lets that be seen."""
        if not self.sigma:
            return found.cosine >= SAME_DIRECTION
        return found.scale + STANDARD_ERRORS * self.sigma / found.norm >= SAME_DIRECTION


def _why_scaled(step: ClientStep, found: _Compared, k: float, rounding: float) -> str:
    """Name the factor `k` if trainers are known for it.

    It may be off by the rounding of a gradient that it multiplied.
    """
    windows, processes = len(step.truth.micro_batches), step.recipe.processes
    norm = found.seen_norm
    round_norm = float(f"{norm:.1g}")
    named = [
        (k, windows, "the number of micro-batches"),
        (k, 1 / windows, "one over the number of micro-batches"),
        (k, processes, "the number of processes"),
        (k, 1 / processes, "one over the number of processes"),
    ]
    for value, known, name in named:
        if known != 1 and abs(value - known) <= FACTOR_TOLERANCE * known:
            return f"the factor is {name}"
    exponent = math.log2(1 / k)
    if step.recipe.autocast == "fp16" and exponent >= 1 and abs(exponent - round(exponent)) <= FACTOR_TOLERANCE:
        return f"one over 2^{round(exponent)}, as of a GradScaler that the audit was not told of"
    # The factor is rounded as well as what it multiplies.
    if k < 1 and abs(norm - round_norm) <= max(FACTOR_TOLERANCE, 2 * rounding) * round_norm:
        return f"as if clipped to a norm of {round_norm:g}"
    return ""


def _is_noise(found: _Compared, sigma: float, tolerance: float) -> bool:
    """Return whether the difference is noise of `sigma`.

    It has to be as large as declared, and unrelated to the update.

    Independent noise projects on the update g with the standard deviation sigma / |g| in units of g. Without this second
    look, noise far above the signal would hide an update of another batch.

    Args:
        found: the observed and the recomputed update.
        sigma: declared standard deviation.
        tolerance: relative error of the recomputation itself.
    """
    if abs(found.difference.std - sigma) > NOISE_TOLERANCE * sigma:
        return False
    return abs(found.scale - 1) <= tolerance + STANDARD_ERRORS * sigma / found.norm


def _repeats_dropout(step: ClientStep) -> bool:
    """Return whether the kept random states give the client's dropout masks again, on the kind of device that drew them."""
    if not step.recipe.kept_rng:
        return False
    here = next(step.model.parameters()).device.type
    return all(batch.rng and ("cuda" if "cuda" in batch.rng else "cpu") == here for batch in step.truth.micro_batches)
