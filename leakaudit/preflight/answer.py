"""The answer of a preflight.

It says whether steps are captured, why, what is read, and the cheapest change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from leakaudit.preflight.reading import reads
from leakaudit.preflight.recipe import Finding, Reads, Recipe
from leakaudit.preflight.rules import findings

Outlook = Literal["captured", "untested", "refused"]

SENTENCES: dict[Outlook, str] = {
    "captured": "Steps of this training will be captured.",
    "untested": "Nobody tried an audit of such a training. The audit says before the first step whether it keeps any.",
    "refused": "This training will not be audited: the audit refuses it before the first step, and the training continues.",
}

LIMIT = "Nothing here says that a training is safe: only the audit of its steps says what can be read."


@dataclass(frozen=True)
class Answer:
    """What a configuration leads to."""

    recipe: Recipe
    outlook: Outlook
    findings: tuple[Finding, ...]
    reads: Reads | None
    """None where nothing is captured."""

    @property
    def changes(self) -> tuple[str, ...]:
        """Return the changes that make it auditable; empty if none is needed or known."""
        blocking = [one for one in self.findings if one.kind == self.outlook != "captured"]
        return tuple(dict.fromkeys(one.change for one in blocking if one.change))

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        return {
            "schema": "leakaudit.preflight/1",
            "outlook": self.outlook,
            "sentence": SENTENCES[self.outlook],
            "changes": list(self.changes),
            "findings": [asdict(one) for one in self.findings],
            "reads": None if self.reads is None else asdict(self.reads),
            "limit": LIMIT,
            "recipe": asdict(self.recipe),
        }


def preflight(recipe: Recipe) -> Answer:
    """Return what an audit makes of a training.

    Args:
        recipe: what its configuration says.
    """
    found = findings(recipe)
    kinds = {one.kind for one in found}
    outlook: Outlook = "refused" if "refused" in kinds else "untested" if "untested" in kinds else "captured"
    return Answer(recipe, outlook, tuple(found), None if outlook == "refused" else reads(recipe))
