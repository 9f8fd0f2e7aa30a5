"""The section on how many texts of the steps their updates name."""

from __future__ import annotations

from leakaudit.reports.membership_chart import membership_chart
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import MOST_ROWS, Section
from leakaudit.results.bounds import lower_bound, upper_bound
from leakaudit.results.membership import (
    MEANING,
    SOURCE,
    Membership,
    MembershipPoint,
    MembershipStep,
    in_words,
    one_in,
)
from leakaudit.results.wording import counted


def section(redacted: RedactedResult) -> Section | None:
    """Show how many texts the updates name, with a picture.

    Beside them stand the model before the step, and an update without the candidates. None if nobody asked.
    """
    found = redacted.results.membership
    if found is None:
        return None
    said = in_words(found)
    bounds = found.auc_bounds()
    facts = {
        "said": said,
        "meaning": MEANING,
        "source": SOURCE,
        "picture": membership_chart(found, said),
        "points": [_point(found, one) for one in found.points],
        "auc": f"{found.auc:.2f}" + ("" if bounds is None else f" ({bounds.lower:.2f} to {bounds.upper:.2f})"),
        "base_auc": f"{found.base_auc:.2f}",
        "null_auc": "none" if found.null_auc is None else f"{found.null_auc:.2f}",
        "control": f"{found.control_found} of {counted(found.control_texts, 'text')} of a known batch",
        "granted": found.granted,
        "overlapped": found.overlapped,
        "rows": [_row(one) for one in found.steps[:MOST_ROWS]],
        "left_out": found.left_out[:MOST_ROWS],
        "guesses": f"{found.right} of {counted(found.guesses, 'guess', 'guesses')}",
        "epsilon": f"{found.epsilon_lower():.2g}" if found.epsilon_lower() else "",
    }
    return Section("membership", "Who was in a step", facts)


def _point(found: Membership, one: MembershipPoint) -> dict[str, str]:
    bounds = found.bounds_at(one)
    return {
        "rate": one_in(one.false_rate),
        "found": f"{one.found} of {found.members:,}",
        "bounds": f"{bounds.lower or 0.0:.1%} to {1.0 if bounds.upper is None else bounds.upper:.1%}",
        "base": f"{one.base} of {found.members:,}",
        "false": _with_bounds(one.false, found.nonmembers),
        "null": _with_bounds(one.null, found.null_candidates),
    }


def _with_bounds(k: int, n: int) -> str:
    """Return a share with its bounds; `none` without candidates."""
    return f"{k} of {n:,} ({lower_bound(k, n):.1%} to {upper_bound(k, n):.1%})" if n else "none"


def _row(one: MembershipStep) -> dict[str, str]:
    return {
        "step": one.step,
        "found": f"{one.found} of {one.members}",
        "false": f"{one.false} of {one.nonmembers}",
        "auc": f"{one.auc:.2f}",
        "base_auc": f"{one.base_auc:.2f}",
        "null_auc": "none" if one.null_auc is None else f"{one.null_auc:.2f} ({one.null})",
    }
