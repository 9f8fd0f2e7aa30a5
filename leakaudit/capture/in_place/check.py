"""The check of a client's step by a repetition before the weights move.

The gradient of the repeated step is compared with the one that the optimizer is about to get. Nothing is rebuilt, so the two may differ
only by rounding, because a GPU adds in any order.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from leakaudit.audit.comparison import relative_error
from leakaudit.audit.verification import FLOAT32_TOLERANCE, TOLERANCE, verify
from leakaudit.capture.in_place.penalty_terms import penalty_in
from leakaudit.capture.in_place.repetition import Repetition
from leakaudit.capture.in_place.state_before import NotInPlaceError
from leakaudit.client.step import ClientStep
from leakaudit.errors import SnapshotError
from leakaudit.results.schema import Verification, VerificationStatus

IN_PLACE_TOLERANCE = 1e-6
"""Relative error up to which a repeated step counts as the same. Measured on a CPU: 0.0 in every cell of the capture matrix, in bfloat16
and under autocast as well, except for 2.7e-8 where a loop clips by itself. One wrong word gives more than 0.1."""

SPREAD = 4.0
"""If two repetitions differ (kernels on a GPU add in any order), the step may differ from them by this factor times their distance. Our
choice: three draws of one distribution are seldom further apart."""

FOREIGN_WRAPPERS = frozenset({"GradSampleModule", "AbstractGradSampleModule", "FSDPModule", "FullyShardedDataParallel"})
"""Classes of modules that keep state of their own in a backward pass."""

PER_EXAMPLE = ("grad_sample", "summed_grad")
"""Attributes of a parameter in which Opacus keeps gradients of examples."""


class UnheldError(SnapshotError):
    """The error of a loss that used more outputs than those whose gradients were held.

    From the next step on, the gradients at all outputs are held.
    """


def check(step: ClientStep, observed: Mapping[str, Tensor], repetition: Repetition) -> Verification:
    """Repeat a step and compare its update.

    Args:
        step: the client's step, on the live model.
        observed: parameter name -> update as the optimizer is about to get it.
        repetition: of the step.

    Raises:
        NotInPlaceError: the step cannot be repeated here.
        UnheldError: the loss sent gradients to outputs where they were not held.
    """
    if why := _why_not(repetition):
        raise NotInPlaceError(why)
    if any(defense is not None and defense.per_example for defense in step.facts.known_defenses):
        raise NotInPlaceError("a declared defence works on the gradient of each example")
    own = repetition.update(observed)
    if repetition.unexplained:
        if any(one.sums for seen in repetition.passes for one in seen.contributing.values()):
            raise UnheldError(
                "its loss is computed from outputs of the model beside the loss that the model computes itself; from the next step that "
                "is due on they are held"
            )
        repetition.count_all_outputs()
        own = repetition.update(observed)
    stamp = verify(step, observed, repeated=own, tolerance=IN_PLACE_TOLERANCE)
    if stamp.status is VerificationStatus.MISMATCH:
        spread = relative_error(repetition.update(observed), own)
        if spread > 0:
            most = TOLERANCE.get(step.recipe.autocast or step.facts.dtype, FLOAT32_TOLERANCE)
            stamp = verify(step, observed, repeated=own, tolerance=min(most, max(IN_PLACE_TOLERANCE, SPREAD * spread)))
    if stamp.status is VerificationStatus.MISMATCH and (penalty := penalty_in(repetition, observed, own)):
        stamp = stamp.model_copy(update={"status": VerificationStatus.UNVERIFIABLE, "note": penalty})
    notes = [note for note in (stamp.note, _note_on_weights(repetition)) if note]
    return stamp.model_copy(update={"where": "in place", "note": "; ".join(notes)})


def _why_not(repetition: Repetition) -> str:
    """Return why a step cannot be repeated here; empty if it can."""
    modules = {kind.__name__ for module in repetition.called.modules() for kind in type(module).__mro__}
    if foreign := modules & FOREIGN_WRAPPERS:
        return f"the model is one of {min(foreign)}, which keeps state of its own in a backward pass"
    if any(getattr(p, name, None) is not None for p in repetition.moved for name in PER_EXAMPLE):
        return "the model keeps gradients of examples"
    if not repetition.passes:
        return "the audit saw no forward pass that this update comes from"
    if opaque := repetition.before.users.opaque:
        return f"the model's own code uses an object that cannot be put back afterwards ({opaque})"
    for seen in repetition.passes:
        if seen.call is None or seen.context is None:
            return "its forward passes were not seen whole"
        if seen.call.unrepeatable:
            return f"the model was called with a {seen.call.unrepeatable}, which the call may have changed"
        if seen.on_other_weights and not seen.weights:
            return "its weights changed between forward passes by more than may be held"
    if repetition.before.weights_moved():
        return "its weights changed between its forward pass and the optimizer's step"
    return ""


def _note_on_weights(repetition: Repetition) -> str:
    """Return a sentence on passes that ran on other weights than the first one.

    The sentence is empty if there are none.
    """
    others = sum(seen.on_other_weights for seen in repetition.passes)
    if not others:
        return ""
    return (
        f"{others} of {len(repetition.passes)} forward passes ran on weights that were changed for them within the step, as adversarial "
        "training (FGM) does"
    )
