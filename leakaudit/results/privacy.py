"""The words for a guarantee of differential privacy, as an accountant states it."""

from __future__ import annotations

from collections.abc import Sequence

from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.conformance import in_words
from leakaudit.results.schema import Privacy, Results
from leakaudit.results.wording import counted

SHIPPED = "none"
"""Label of what the run itself ships."""

UNCONFIRMED = "The audit does not confirm this number."
NO_ACCOUNTANT = "no accountant: no epsilon"


def statements_on(results: Results, defense: str) -> tuple[Privacy, ...]:
    """Return what is stated on one defence of the battery.

    What is sent has the guarantee of what the run ships: whatever is done to a private update keeps its guarantee.
    """
    column = SHIPPED if defense == AS_SENT else defense
    return tuple(one for one in results.privacy if one.defense == column)


def stated(one: Privacy) -> str:
    """Return a statement in a sentence or two, which say whose number it is."""
    who = f" ({one.accountant})" if one.accountant else ""
    if one.epsilon is None:
        return f"There is no epsilon{who}: {one.why_not or 'nobody computed one'}."
    begin = {
        "accountant": f"The accountant{who} says",
        "claim": f"The owner of the run claims{who}",
        "computed": f"An accountant{who} computes",
    }[one.origin]
    covers = f" for {counted(one.steps, 'step')}" if one.steps is not None else ""
    covers += " for one message" if one.covers == "message" else ""
    delta = "" if one.delta is None else f" at delta = {one.delta:g}"
    return " ".join(filter(None, [f"{begin} epsilon = {one.epsilon:.3g}{delta}{covers}.", *_limits(one), UNCONFIRMED]))


def _limits(one: Privacy) -> Sequence[str]:
    """Return what a reader of an epsilon has to know besides."""
    shuffled = "It holds for Poisson samples; this run shuffles its batches."
    unknown = "It holds for Poisson samples; how this run draws its batches is not known."
    counts = one.origin != "claim" and one.sampling_rate != 1
    assumed = {"poisson": "", "shuffled": shuffled, "unknown": unknown}[one.sampling] if counts else ""
    return (assumed, one.note)


def shipped_in_words(results: Results) -> str:
    """Return what is stated on the update that the run ships, in one line."""
    found = statements_on(results, SHIPPED)
    measured = [] if results.conformance is None else [in_words(results.conformance)]
    return " ".join([*map(stated, found), *measured]) if found or measured else NO_ACCOUNTANT
