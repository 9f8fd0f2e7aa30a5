"""The section that shows recovered texts beside the true ones."""

from __future__ import annotations

from typing import Any

from leakaudit.reports.cells import OBSERVED
from leakaudit.reports.evidence import sample_anchors
from leakaudit.reports.measures import scores_of
from leakaudit.reports.redaction import Recovered, RedactedResult, SequenceView
from leakaudit.reports.section import Section
from leakaudit.reports.wording import OUTCOMES, run_time
from leakaudit.results.schema import LENGTHS, AttemptStatus, Catalogue, Results, TextMode
from leakaudit.results.wording import counted


def section(redacted: RedactedResult) -> Section:
    """Show what the best attack recovered of each text, the worst case first."""
    anchors = sample_anchors(redacted)
    exact = sum(view.recovered[0].scores.exact or False for view in redacted.sequences)
    shown = len(redacted.sequences)
    if not shown:
        lead = "No attack that guesses text finished, so there is nothing to compare."
    else:
        lead = {
            TextMode.HASH: f"Keyed hashes stand for the texts. {LENGTHS}",
            TextMode.MASKED: f"A strip is one text in sixteen equal parts; the words are not here. {LENGTHS}",
            TextMode.FULL: "This is the text of the training batch. Treat it like the training data.",
        }[redacted.mode]
        lead += f" {exact} of {shown} below came back word for word. For each text, the attack that recovered most of it is shown."
    more = redacted.hidden_sequences
    rest = f"{counted(more, 'further text')} came back to a lesser extent; results.json has the numbers."
    return Section(
        "samples",
        "Recovered against true",
        {
            "full": redacted.mode is TextMode.FULL,
            "hash": redacted.mode is TextMode.HASH,
            "samples": [_sample(view, redacted.results, anchors) for view in redacted.sequences],
            "lead": lead,
            "more": rest if more else "",
        },
    )


def _sample(view: SequenceView, results: Results, anchors: dict[tuple[str, str], str]) -> dict[str, Any]:
    return {
        "anchor": anchors[view.step, view.sequence],
        "step": next(step.step for step in results.steps if step.id == view.step),
        "name": view.sequence,
        "hmac": view.hmac,
        "length": view.length,
        "true": next((item.true for item in view.recovered if item.true is not None), None),
        "words": "word for word" if view.recovered[0].scores.exact else "",
        "recovered": [
            {
                "ships": item.defense == OBSERVED,
                "defense": item.defense,
                "guess": item.guess,
                "strip": item.strip,
                "scores": item.scores,
                "caption": _caption(item, results.catalogue),
            }
            for item in view.recovered
        ],
    }


def _caption(item: Recovered, catalogue: Catalogue) -> str:
    found = item.scores
    words = ["word for word"] if found.exact else []
    words += scores_of(found, catalogue)
    words += ["words without order"] if found.exact is None and found.token_recall is not None else []
    words += [OUTCOMES[found.outcome]] if found.outcome in OUTCOMES else []
    late = ", out of time" if item.status is AttemptStatus.BUDGET_EXHAUSTED else ""
    proved = ", proved by re-simulation" if found.proved else ""
    return f"{item.attack}, {run_time(item.wall_s)}{late}: " + ", ".join(words) + proved
