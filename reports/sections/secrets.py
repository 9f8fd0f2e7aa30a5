"""The section on secrets that attacks recovered, and on what they say of epsilon."""

from __future__ import annotations

from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.results.canaries import bounded, strongest


def section(redacted: RedactedResult) -> Section | None:
    """Show each bound on epsilon with its counts, and the conditions of all of them.

    None if no step held a secret.
    """
    found = redacted.results.canaries
    worst = strongest(found)
    if worst is None:
        return None
    rows = [
        {
            "defense": one.defense,
            "attack": one.attack,
            "counts": f"{one.k} of {one.n}",
            "chance": f"{one.guesses:,} of {one.values:,}",
            "epsilon": f"{one.epsilon_lower:.3g}" if one.epsilon_lower else "no bound",
            "claimed": "none" if one.claimed is None else f"{one.claimed:.3g}, {one.claimed_by}",
            "verdict": one.verdict,
        }
        for one in found
    ]
    conditions = tuple(dict.fromkeys(note for one in found for note in one.notes))
    lead = f"Each of these steps held a record with a secret. Under {worst.defense}, {bounded(worst)}"
    shown = {"lead": lead, "rows": rows, "conditions": conditions, "delta": f"{worst.delta:g}"}
    return Section("secrets", "Secrets and epsilon", shown | {"sure": f"{worst.confidence:.0%}"})
