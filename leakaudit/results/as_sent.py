"""The update as it was sent, where something changed it after the training.

The attempts of such an audit have two origins: `none` is the update as the training produced it, and `as-sent` is what left the machine,
after clipping, noise, compression or whatever stands between. What a policy calls `shipped` is what was sent.
"""

from __future__ import annotations

from leakaudit.results.schema import PluginEntry, Results, StepRecord

PRODUCED = "none"
"""The defence name of attempts on the observed update."""

AS_SENT = "as-sent"
"""The defence name of attempts on the update as it was sent. Only an audit in which something changed an update has them."""


SENT_ENTRY = PluginEntry.model_construct(
    label="as sent",
    meaning="The update as it left the machine, after whatever changed it between the training and its transmission.",
    source="",
)
"""Description of that column for the report."""


def shipped_column(results: Results) -> str:
    """Return the defence name of the attempts on what the training run sends."""
    return AS_SENT if AS_SENT in results.run.battery.defenses else PRODUCED


def seen_under(results: Results, defense: str) -> Results:
    """Return the results with the stamps of the updates that attempts read.

    A sent update has a stamp of its own: it says whether the declared defences make it from the produced one.
    """
    if defense != AS_SENT:
        return results
    return results.model_copy(update={"steps": tuple(map(_as_sent, results.steps))})


def _as_sent(step: StepRecord) -> StepRecord:
    bounds = step.verification.status.bounds
    return step if step.sent is None or not bounds else step.model_copy(update={"verification": step.sent})
