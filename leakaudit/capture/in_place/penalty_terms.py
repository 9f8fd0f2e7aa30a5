"""Terms of a loss that do not pass through the model's outputs, such as penalties."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from leakaudit.audit.verification import ROUNDING
from leakaudit.capture.in_place.repetition import Repetition
from leakaudit.capture.observing.entry_sample import few_entries

PENALTY = 0.02
"""Relative error up to which the unexplained entries of the parameters count as a penalty's gradient. Our choice: the remainder of
another batch is off by almost all of it, rounding in bfloat16 by a hundredth."""


def penalty_in(repetition: Repetition, observed: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Return a sentence on a penalty that explains the difference of two updates.

    The sentence is empty if no known penalty does.

    Args:
        repetition: of the step.
        observed: parameter name -> update as the optimizer gets it.
        own: parameter name -> update as it was repeated.
    """
    if any(seen.differentiable for seen in repetition.passes):
        return (
            "a gradient was differentiated again (a penalty on gradients), and what that sends to the parameters does not come "
            "through the model's outputs"
        )
    difference = {
        name: few_entries(observed[name]).double() - few_entries(own[name]).double()
        for name in repetition.begin
        if name in own
    }
    rounding = max((ROUNDING.get(update.dtype, 0.0) for update in own.values()), default=0.0)
    unsure = rounding * sum(float(few_entries(observed[name]).double().square().sum()) for name in difference) ** 0.5
    now = {name: few_entries(repetition.named[name]).double() for name in difference}
    origins = {
        "zero (an L2 penalty)": now,
        "those at the beginning of the run (FedProx, L2-SP)": {
            n: now[n] - repetition.begin[n].double() for n in difference
        },
    }
    for name, distance in origins.items():
        if difference and _is_multiple(difference, distance, unsure):
            return (
                f"beside the gradient of the batch the update holds a multiple of the weights' distance from {name}: who knows the "
                "protocol takes it out, and the attacks here do not"
            )
    return ""


def _is_multiple(difference: Mapping[str, Tensor], distance: Mapping[str, Tensor], unsure: float) -> bool:
    """Return whether each parameter's difference is a multiple of a distance.

    The factors are 0 or more. `PENALTY` is the relative error that is allowed over all parameters.

    Args:
        difference: parameter name -> a few entries, float64.
        distance: parameter name -> the same entries of a distance, float64.
        unsure: largest length of a difference that rounding alone may cause.
    """
    unexplained = whole = 0.0
    for name, entries in difference.items():
        along = distance[name]
        length = float(along.square().sum())
        factor = max(0.0, float(entries @ along) / length) if length else 0.0
        unexplained += float((entries - factor * along).square().sum()) if len(entries) > 1 else 0.0
        whole += float(entries.square().sum())
    return unsure <= whole**0.5 / 2 and whole > 0 and unexplained**0.5 <= PENALTY * whole**0.5 + unsure
