"""The section that shows recovered texts beside the true ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leakaudit.gate.wording import percent
from leakaudit.reports.cells import OBSERVED
from leakaudit.reports.escaping import plain
from leakaudit.reports.evidence import sample_anchors
from leakaudit.reports.measures import scores_of
from leakaudit.reports.personal_data import classes_in
from leakaudit.reports.pictures import CLEAN_STATE, Column, distribution_chart
from leakaudit.reports.redaction import Recovered, RedactedResult, Run, SequenceView
from leakaudit.reports.section import Section
from leakaudit.reports.wording import OUTCOMES, run_time
from leakaudit.results.journal import TokenMatch
from leakaudit.results.recovery import amount
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
            TextMode.FULL: INVENTED_LEAD if redacted.results.subject.data_invented else REAL_LEAD,
        }[redacted.mode]
        lead += f" {exact} of {shown} below came back word for word. For each text, the attack that recovered most of it is shown."
    more = redacted.hidden_sequences
    columns = _distribution(redacted.results)
    said = _how_much(columns) if sum(one.count for one in columns) > 1 else ""
    samples = [_sample(view, redacted.results, anchors) for view in redacted.sequences]
    same, others = _folded(samples, redacted.mode)
    rest = f"{counted(more, 'further text')} came back to a lesser extent; results.json has the numbers."
    return Section(
        "samples",
        "Recovered against true",
        {
            "full": redacted.mode is TextMode.FULL,
            "hash": redacted.mode is TextMode.HASH,
            "same": same,
            "top": others[:TOP],
            "others": others[TOP:],
            "samples": samples,
            "said": said,
            "chart": distribution_chart(columns, plain(said), "texts") if said else None,
            "columns": [(one.name, one.count) for one in columns],
            "lead": lead,
            "more": rest if more else "",
        },
    )


REAL_LEAD = "This is the text of the training batch. Treat it like the training data."
INVENTED_LEAD = "This is the text of the training batch, which was invented."

TOP = 10
"""Texts that are shown at once; the others are behind a summary."""


def _distribution(results: Results) -> list[Column]:
    """Return how many texts came back to which extent, by the best attack on each.

    The update is that which the client produced.

    A text of a step that cannot be verified, and that did not come back by half, is no evidence.
    """
    bounding = {step.id for step in results.steps if step.verification.status.bounds}
    best: dict[tuple[str, str], tuple[float, bool]] = {}
    for attempt in results.attempts:
        for found in attempt.sequences if attempt.defense == OBSERVED else ():
            share = amount(found)
            if share is None:
                continue
            key, here = (attempt.step, found.id), (share, bool(found.exact))
            best[key] = max(best.get(key, here), here, key=lambda pair: (pair[1], pair[0]))
    unsure = {key for key, (share, exact) in best.items() if key[0] not in bounding and share < 0.5 and not exact}
    counts = [0] * 6
    for key, (share, exact) in best.items():
        if key not in unsure:
            counts[5 if exact else 0 if share == 0 else min(4, 1 + int(share * 4))] += 1
    names = ("nothing", "below 25%", "25% to 50%", "50% to 75%", "75% or more", "word for word")
    kinds = (CLEAN_STATE, CLEAN_STATE, CLEAN_STATE, "words leaked", "words leaked", "text leaked")
    columns = [Column(*one) for one in zip(names, counts, kinds, strict=True)]
    return [*columns, Column("not judged", len(unsure), "unsure")] if unsure else columns


def _how_much(columns: Sequence[Column]) -> str:
    """Return the answer of the distribution in a sentence; empty without a text."""
    total = sum(one.count for one in columns)
    if not total:
        return ""
    whole = sum(one.count for one in columns if one.kind == "text leaked")
    half = sum(one.count for one in columns if one.kind == "words leaked")
    said = f"{whole:,} of {counted(total, 'text')} came back word for word ({percent(whole / total)})"
    return f"{said}, and {half:,} more by half or more ({percent(half / total)})."


def _folded(samples: Sequence[dict[str, Any]], mode: TextMode) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the texts that came back word for word, and the others.

    In mode full every text says more, but one with the same content as an earlier one.
    """
    parts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for sample in samples:
        parts[bool(sample["words"]) and len(sample["recovered"]) == 1].append(sample)
    if len(parts[True]) < 2 or mode is TextMode.HASH:
        return [], list(samples)
    return parts[True], parts[False]


def _longest(runs: Sequence[Run] | None) -> tuple[Run, ...]:
    """Return the longest run of tokens that came back side by side.

    Empty if there is none of two.
    """
    found = [run for run in runs or () if run.match is TokenMatch.BIGRAM]
    return (max(found, key=lambda run: run.tokens),) if found else ()


def _words(runs: Sequence[Run] | None) -> str:
    return "".join(run.text for run in runs or ())


def _sample(view: SequenceView, results: Results, anchors: dict[tuple[str, str], str]) -> dict[str, Any]:
    true = next((item.true for item in view.recovered if item.true is not None), None)
    return {
        "classes": classes_in(_words(true)),
        "longest": _longest(true) if view.recovered[0].scores.exact is False else (),
        "anchor": anchors[view.step, view.sequence],
        "step": next(step.step for step in results.steps if step.id == view.step),
        "name": view.sequence,
        "hmac": view.hmac,
        "length": view.length,
        "true": true,
        "words": "word for word" if view.recovered[0].scores.exact else "",
        "recovered": [
            {
                "ships": item.defense == OBSERVED,
                "defense": item.defense,
                "guess": item.guess,
                "equal": true is not None and item.guess is not None and _words(item.guess) == _words(true),
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
