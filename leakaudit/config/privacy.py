"""What a configuration says of the differential privacy of a training run."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

MOST_STEPS = 10**9
"""Most steps of a training run. Our choice: no training has more."""


class PrivacyConfig(BaseModel):
    """What is known of the differential privacy of a run.

    With `epsilon` it is a claim, which the results repeat as one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    epsilon: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """The epsilon that the owner of the run claims."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The delta of every epsilon. Default: 1e-5 as in Abadi et al. (2016), and for more examples than that allows the largest power of ten below
    1 / number of examples. A training that does not show this number has no default."""
    accountant: Annotated[str, Field(pattern=r"^[A-Za-z0-9 .,()_+-]{0,60}$")] = ""
    """Who computed the claimed epsilon, such as `dp-accounting pld`. A claim without it passes no rule."""
    covers: Literal["run", "message"] = "run"
    """What the claimed epsilon is about: the whole training run, or one message of a client, as Flower's `LocalDpMod` states it. Nothing adds up
    the epsilons of messages."""
    sampling: Literal["poisson", "shuffled", "unknown"] = "unknown"
    """How the run draws its batches, where the training does not show it. `poisson`: each example is in each batch with the same probability, as
    accountants of DP-SGD assume. `shuffled`: every epoch goes through all examples once."""
    sampling_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the examples that one step draws: the batch size divided by the number of examples."""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """Optimizer steps of the whole training."""

    @model_validator(mode="after")
    def _claims_are_whole(self) -> Self:
        if self.epsilon is not None and self.delta is None:
            raise ValueError(
                "`epsilon` says nothing without `delta`: write the delta for which the accountant computed it"
            )
        if self.epsilon is None and self.accountant:
            raise ValueError("`accountant` names who computed `epsilon`: write `epsilon` and `delta` as well")
        return self
