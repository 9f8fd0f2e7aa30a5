"""`dp-sgd`: clip the gradient of every example, add Gaussian noise to the sum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from leakaudit.client.per_example import ExampleClipping
from leakaudit.plugins import ClientStep, Defense, Observation, SnapshotError, Update, check_finite, defense


@defense("dp-sgd")
@dataclass(frozen=True)
class DpSgd(Defense):
    """Clip the gradient of every example, and add Gaussian noise to the sum.

    The client sends (sum over examples of g_i / max(1, |g_i| / C) + N(0, (z C)^2)) / L instead of the mean gradient. g_i is the gradient
    of one example over all shared parameters, C the clipping bound, z the noise multiplier and L the expected batch size. If the update
    is a mean over processes, the noise is divided by their number, too. The noise level is public: z C / (L processes). This clipping
    replaces the clipping of the whole update. How private a given z is depends on the sampling rate and the number of steps; an
    accountant computes that, not this audit.
    """

    noise_multiplier: float = 1.0
    """z: standard deviation of the noise divided by the clipping bound; with 0, the defence only clips. Our choice of 1: common in the
    literature."""
    max_grad_norm: float = 1.0
    """C: norm to which the gradient of an example is clipped. With infinity nothing is clipped, and no noise is possible, because it is
    relative to C."""
    expected_batch_size: float | None = None
    """L: divisor of the sum on every process. None takes the number of examples of the step, divided by the processes."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """How the client's loss combines the B examples of a micro-batch. With a mean, the gradient of an example is B times its share of
    the update."""
    processes: int | None = None
    """Number of processes over which the update is a mean; one of them adds the noise, as in Opacus. None takes the step's number."""

    layer_bounds: str = ""
    """Bound of each trained parameter in their order, with spaces between, if each one is clipped by itself. Their L2 norm is C. Empty clips the
    gradient of an example as a whole."""

    label: ClassVar[str] = "DP-SGD"
    meaning: ClassVar[str] = "Clips the gradient of every example and adds Gaussian noise to their sum."
    identity: ClassVar[Mapping[str, Any]] = {"noise_multiplier": 0.0, "max_grad_norm": math.inf}
    resized: ClassVar[bool] = True
    per_example: ClassVar[bool] = True
    source: ClassVar[str] = "Abadi et al. 2016, Algorithm 1; units as in Opacus (Yousefpour et al. 2021)"
    protects: ClassVar[str] = (
        "Bounds what one example contributes and hides it in noise, for everybody who sees the update."
    )
    cost: ClassVar[str] = "Slower and worse training, growing with the noise multiplier; a gradient for each example."

    def __post_init__(self) -> None:
        """Refuse knobs that describe no private step."""
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be 0 or more and finite, got {self.noise_multiplier}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0, got {self.max_grad_norm}")
        if self.noise_multiplier and self.max_grad_norm == math.inf:
            raise ValueError("noise is relative to max_grad_norm, which is infinite; give a bound")
        if self.expected_batch_size is not None and not 0 < self.expected_batch_size < math.inf:
            raise ValueError(f"expected_batch_size must be above 0, got {self.expected_batch_size}")
        if self.processes is not None and self.processes < 1:
            raise ValueError(f"processes must be at least 1, got {self.processes}")
        self._check_layer_bounds()

    def _check_layer_bounds(self) -> None:
        try:
            bounds = [float(bound) for bound in self.layer_bounds.split()]
        except ValueError:
            raise ValueError(f"layer_bounds must be numbers with spaces between, got {self.layer_bounds!r}") from None
        if bounds and not (min(bounds) > 0 and math.isclose(math.hypot(*bounds), self.max_grad_norm, rel_tol=1e-4)):
            raise ValueError(
                f"layer_bounds must be above 0 with an L2 norm of max_grad_norm = {self.max_grad_norm}, got one of {math.hypot(*bounds):g}"
            )

    @property
    def clipping_bound(self) -> float | None:
        """The norm to which the gradient of an example is clipped."""
        return None if self.max_grad_norm == math.inf else self.max_grad_norm

    @property
    def gaussian_multiplier(self) -> float | None:
        """The noise multiplier; None where nothing is clipped."""
        return None if self.clipping_bound is None else self.noise_multiplier

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return the private update, recomputed from the batch.

        `rng` draws the noise in the order of the names. The result declares all knobs, with the real `expected_batch_size` and `processes`.

        Raises:
            SnapshotError: the gradients of single examples are not known, the update covers several local steps, or the run ships
                a defence of its own, which the recomputed update would lack.
        """
        if self.is_identity():
            return seen
        if seen.facts.defenses:
            names = ", ".join(declared.name for declared in seen.facts.defenses)
            raise SnapshotError(
                f"dp-sgd clips each example's gradient before anything else, and the run ships {names}, which comes after; "
                "audit dp-sgd on a run without a shipped defence"
            )
        known = self.settled(step, seen.update)
        clipped = known._clipped(step, alone=True)  # nothing is compared with it, so rounding does not matter
        check_finite(clipped)
        sigma = known._sigma
        noisy = {
            name: clipped[name] + sigma * torch.randn(tensor.shape, generator=rng, device=rng.device).to(tensor.device)
            for name, tensor in seen.update.items()
        }
        facts = seen.facts.model_copy(update={"max_grad_norm": None})
        return replace(seen, facts=facts).under(known.declared(), noisy)

    def settled(self, step: ClientStep, sent: Update) -> Self:
        """Return the defence with L and the number of processes filled in."""
        if self.is_identity():
            return self
        processes = self.processes or step.recipe.processes
        examples = sum(len(batch.inputs["input_ids"]) for batch in step.truth.micro_batches)
        return replace(self, processes=processes, expected_batch_size=self.expected_batch_size or examples / processes)

    def example_clipping(self, step: ClientStep, sent: Update) -> ExampleClipping | None:
        """Return bounds and divisor; None where it does nothing."""
        return None if self.is_identity() else self.settled(step, sent)._clipping

    def added_noise(self, step: ClientStep, clean: Update) -> float:
        """Return z C / L / processes."""
        return self.settled(step, clean)._sigma

    def without_noise(self) -> Self:
        """Return the defence that only clips."""
        return replace(self, noise_multiplier=0.0)

    def noise(self, sent: Update, before: float = 0.0) -> float:
        """Return the level of all noise on `sent`.

        The noise of this defence has the level z C / (L processes). An unknown L or number of processes counts as 1, which gives an
        upper bound.
        """
        return math.hypot(before, self._sigma)

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return the clipped and averaged gradients, recomputed from the batch.

        `recomputed` is not enough: clipping needs the gradient of each example.
        """
        return recomputed if self.is_identity() else self.settled(step, observed)._clipped(step)

    def _clipped(self, step: ClientStep, *, alone: bool = False) -> dict[str, Tensor]:
        return step.clipped_per_example(self._clipping, alone=alone)

    @property
    def _clipping(self) -> ExampleClipping:
        bounds = tuple(map(float, self.layer_bounds.split()))
        return ExampleClipping(self.max_grad_norm, self._divisor, self.loss_reduction == "sum", bounds)

    @property
    def _sigma(self) -> float:
        return self.noise_multiplier * self.max_grad_norm / self._divisor if self.noise_multiplier else 0.0

    @property
    def _divisor(self) -> float:
        return (self.expected_batch_size or 1.0) * (self.processes or 1)
