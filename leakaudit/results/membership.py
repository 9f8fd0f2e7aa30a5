"""Who was in a step: how many texts of the audited steps the update names.

A text is named if its score is above a threshold that texts of no step fixed. Nothing here says of one text that it was in a step, and a number
near zero shows no privacy: another attack may name more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from leakaudit.results.bounds import Bounds, lower_bound, upper_bound
from leakaudit.results.one_run import Coins, one_run_epsilon
from leakaudit.results.ranking import mean_over_rounds
from leakaudit.results.wording import counted

ATTACK = "membership"
"""Name of the attack."""

MEANING = (
    "Compares the update with the gradient of each candidate text, after what all texts share is taken out, and names the candidates that "
    "fit better than texts of no step."
)
"""What the attack does, in a sentence."""

SOURCE = "own derivation (generalised least squares); the question is that of ProjRes, arXiv 2604.21197"
"""Where the attack comes from."""

FALSE_RATES = (0.01, 0.02, 0.05, 0.1)
"""Shares of false alarms for which thresholds are fixed. The first is the one that sentences name; our choice, as in Carlini et al. 2022 (arXiv
2112.03570), who ask for a small one."""

FEWEST_NONMEMBERS = 100
"""Fewest candidates of no step on which a threshold is checked. Our choice: with fewer, one false alarm in 100 is none on average."""

Share = Annotated[FiniteFloat, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]
Curve = tuple[tuple[Share, Share], ...]
"""Pairs of the share of false alarms and the share of members named, ascending."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class MembershipStep(_Model):
    """What the update of one step names."""

    step: str
    """Id of the step."""
    members: Annotated[int, Field(ge=1)]
    """Texts of the step among the candidates."""
    nonmembers: Annotated[int, Field(ge=1)]
    """Other candidates."""
    found: Count
    """Members named at the first of the false alarm rates."""
    false: Count
    """Others named there."""
    auc: Share
    """Probability that a member scores higher than another candidate."""
    base_auc: Share
    """The same of the loss of the model before the step, which no update enters."""
    null_auc: Share | None = None
    """The same of an update that holds none of the candidates; None if there is none."""
    null: Literal["another step", "known batch", "none"]
    """Which update that is: of another kept step, or of a few texts of no step."""


BOUND_DELTA = 1e-5
"""Delta at which epsilon is bounded: that of Abadi et al. (2016), section 5."""


class MembershipPoint(_Model):
    """How many candidates are above one threshold, over all steps."""

    false_rate: Share
    """Share of texts of no step that the threshold lets through."""
    found: Count
    """Members above it."""
    false: Count
    """Other candidates above it."""
    null: Count
    """Candidates above it if the update holds none of them."""
    calibration: Count
    """Scores of calibration texts above it."""
    base: Count
    """Members above the threshold of the loss before the step, fixed in the same way."""


class Membership(_Model):
    """Who was in the audited steps, as far as the updates say it."""

    steps: Annotated[tuple[MembershipStep, ...], Field(min_length=1)]
    """What was found in each step."""
    points: tuple[MembershipPoint, ...] = ()
    """One for each false alarm rate for which there are enough calibration texts."""
    calibration: Count
    """Scores of calibration texts that fixed the thresholds, over all steps."""
    calibration_texts: Count
    """Different texts among them; a text may serve several steps."""
    null_candidates: Count = 0
    """Candidates that were compared with an update that holds none of them."""
    control_found: Count = 0
    """Texts of a known batch that the attack names, at the first of the false alarm rates."""
    control_texts: Count = 0
    """Texts of such batches."""
    guesses: Count = 0
    """Pairs of a member and another candidate of which exactly one is named."""
    right: Count = 0
    """Those of them in which it is the member."""
    pairs: Count = 0
    """All such pairs; each text is in one pair of its step."""
    curve: Curve = ()
    """Of the update."""
    base_curve: Curve = ()
    """Of the loss before the step."""
    null_curve: Curve = ()
    """Of an update that holds none of the candidates."""
    granted: tuple[str, ...] = ()
    """What the attacker knows besides model and update."""
    overlapped: Count = 0
    """Texts of the file of non-members that were left out because the step holds them, over all steps."""
    left_out: tuple[str, ...] = ()
    """Why other kept steps were not tested, each as a clause."""

    @property
    def members(self) -> int:
        """Texts of the steps among the candidates."""
        return sum(step.members for step in self.steps)

    @property
    def nonmembers(self) -> int:
        """Other candidates, over all steps; one text may be a candidate of several."""
        return sum(step.nonmembers for step in self.steps)

    @property
    def auc(self) -> float:
        """Mean over the steps."""
        return sum(step.auc for step in self.steps) / len(self.steps)

    @property
    def base_auc(self) -> float:
        """Mean over the steps."""
        return sum(step.base_auc for step in self.steps) / len(self.steps)

    @property
    def null_auc(self) -> float | None:
        """Mean over the steps that have one; None if none has."""
        known = [step.null_auc for step in self.steps if step.null_auc is not None]
        return sum(known) / len(known) if known else None

    def auc_bounds(self, confidence: float = 0.95) -> Bounds | None:
        """Bound the mean AUC by a bootstrap over steps; None for one step.

        With few steps the interval is too short.
        """
        if len(self.steps) == 1:
            return None
        return mean_over_rounds([step.auc for step in self.steps], confidence)

    def at(self, false_rate: float) -> MembershipPoint | None:
        """Return the counts at a false alarm rate; None if it has no threshold."""
        return next((one for one in self.points if one.false_rate == false_rate), None)

    def bounds_at(self, point: MembershipPoint, confidence: float = 0.95) -> Bounds:
        """Bound the share of members that are named (Clopper-Pearson).

        Members of one step are not independent, so the interval is a little too short.
        """
        k, n = point.found, self.members
        return Bounds(lower_bound(k, n, confidence), upper_bound(k, n, confidence), "Clopper-Pearson")

    def epsilon_lower(self, confidence: float = 0.95) -> float:
        """Bound the epsilon of one step from below; 0 if nothing is bounded.

        A pair of a member and a candidate of no step is one coin (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846): which of both was in the
        step. Naming one of them alone is a guess. It holds at `BOUND_DELTA`, for data sets that differ in one exchanged record, if members and others
        come from one source by chance. Accountants of DP-SGD count data sets with and without one record, where an exchange may cost twice their
        epsilon; so this bound contradicts no claim of theirs as it stands, and it confirms none.
        """
        if not self.guesses:
            return 0.0
        return one_run_epsilon(Coins(self.pairs, self.guesses, self.right), BOUND_DELTA, confidence=confidence)


def broken(found: Membership, point: MembershipPoint, confidence: float = 0.95) -> str:
    """Return why nothing is decided at a threshold, in a sentence; else empty.

    That is so if surely more candidates than the threshold lets through are above it although the update holds none of them.
    """
    if not found.null_candidates:
        return "There is no update without the candidates to compare with."
    if lower_bound(point.null, found.null_candidates, confidence) <= _let_through(found, point, confidence):
        return ""
    return (
        f"An update that holds none of the candidates names {point.null} of {found.null_candidates:,} of them, more than {one_in(point.false_rate)}: "
        "members and texts of no step differ by more than the step."
    )


def too_many_false(found: Membership, point: MembershipPoint, confidence: float = 0.95) -> str:
    """Return a sentence if surely more candidates of no step than allowed are named.

    They may be near copies of texts of the step. The share of members at exactly this rate of false alarms is then smaller than the counted one.
    """
    if lower_bound(point.false, found.nonmembers, confidence) <= _let_through(found, point, confidence):
        return ""
    return f"{point.false} of {found.nonmembers:,} candidates of no step are named, more than {one_in(point.false_rate)}; some may be near copies."


def _let_through(found: Membership, point: MembershipPoint, confidence: float) -> float:
    """Return the largest share of texts of no step that a threshold may name.

    It is known as well as the calibration texts say: the upper Clopper-Pearson bound of those above it (Wilks 1941).
    """
    texts = found.calibration_texts
    share = 1.0 if not found.calibration else point.calibration / found.calibration
    return max(point.false_rate, upper_bound(min(texts, round(share * texts)), texts, confidence))


def one_in(false_rate: float) -> str:
    """Return a false alarm rate in words.

    >>> one_in(0.01), one_in(0.05)
    ('one false alarm in 100', 'one false alarm in 20')
    """
    return f"one false alarm in {round(1 / false_rate)}"


def in_words(found: Membership, false_rate: float = FALSE_RATES[0]) -> str:
    """Return what the updates say of who was in the steps, in a sentence or two."""
    point = found.at(false_rate)
    if point is None:
        return (
            f"Who was in a step is not decided: {counted(found.calibration, 'score')} of calibration texts "
            f"{'is' if found.calibration == 1 else 'are'} too few for {one_in(false_rate)}."
        )
    if why := broken(found, point):
        return f"Who was in a step is not decided. {why}"
    bounds = found.bounds_at(point)
    epsilon = found.epsilon_lower()
    said = (
        f"{point.found} of {counted(found.members, 'text')} of {counted(len(found.steps), 'step')} "
        f"{'is' if point.found == 1 else 'are'} named at {one_in(point.false_rate)} (95% bounds {bounds.lower or 0.0:.0%} to "
        f"{1.0 if bounds.upper is None else bounds.upper:.0%}), and {point.false} of {counted(found.nonmembers, 'text')} of no step; the model "
        f"before the step alone names {point.base}."
    )
    more = (
        ""
        if not too_many_false(found, point)
        else " More texts of no step are named than the threshold should let through."
    )
    return (
        said
        + more
        + (
            f" The epsilon of one step is at least {epsilon:.2g} at delta = {BOUND_DELTA:g}, for one exchanged text (95%)."
            if epsilon
            else ""
        )
    )


def pooled(runs: Iterable[Membership | None], names: Sequence[str]) -> Membership | None:
    """Join what several runs found; None if none was asked.

    Curves are left out, because scores of different runs are not in the results.

    Args:
        runs: of the runs, in their order.
        names: ids of the runs, which come before the names of their steps.
    """
    found = [(name, one) for name, one in zip(names, runs, strict=True) if one is not None]
    if not found:
        return None
    each = [one for _, one in found]
    steps = tuple(step.model_copy(update={"step": f"{name}/{step.step}"}) for name, one in found for step in one.steps)
    rates = [rate for rate in FALSE_RATES if all(one.at(rate) is not None for one in each)]
    totals = {
        key: sum(getattr(one, key) for one in each)
        for key in (
            "calibration",
            "calibration_texts",
            "null_candidates",
            "control_found",
            "control_texts",
            "guesses",
            "right",
            "pairs",
            "overlapped",
        )
    }
    return Membership(
        steps=steps,
        points=tuple(_sum([one.at(rate) for one in each], rate) for rate in rates),
        granted=tuple(dict.fromkeys(name for one in each for name in one.granted)),
        left_out=tuple(dict.fromkeys(why for one in each for why in one.left_out)),
        **totals,
    )


def _sum(points: Sequence[MembershipPoint | None], rate: float) -> MembershipPoint:
    """Add up the counts of several runs at one false alarm rate."""
    known = [one for one in points if one is not None]
    counts = {key: sum(getattr(one, key) for one in known) for key in ("found", "false", "null", "calibration", "base")}
    return MembershipPoint(false_rate=rate, **counts)
