"""Checks that results.json does not contradict itself.

The module has over 400 lines, because it goes through one document part by part. Facts that the document states twice must agree. Sums,
means and events are computed again from their parts.

It has many lines, because each fact has a check of its own. Results that contradict themselves are not evidence, because nobody can tell which part is true. These checks do not find a forger who
changes all parts consistently and computes the digest again; only a signature would show that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime, timedelta
from itertools import islice
from math import isclose
from statistics import fmean
from typing import Any

from leakaudit.results import former_keys
from leakaudit.results.as_sent import AS_SENT, PRODUCED
from leakaudit.results.canaries import canary_epsilon
from leakaudit.results.events import EVENTS, at_least, shown_events
from leakaudit.results.files import OWN_VERSION, minor_version
from leakaudit.results.lengths import bounds_of
from leakaudit.results.membership import FALSE_RATES
from leakaudit.results.recovery import FOUND, LEAST_SHARE
from leakaudit.results.schema import (
    Attempt,
    AttemptStatus,
    Measured,
    Results,
    Score,
    SequenceScore,
    StepRecord,
    Summary,
    VerificationStatus,
)
from leakaudit.results.summary import seeds_of, summarise

WORST_ERROR = 0.5
"""Largest relative error of a verified step. Our choice: verification accepts up to 0.03, and a wrong batch has more than 0.3."""


CLOCK_SLACK = timedelta(hours=1)
"""Largest difference between two clocks, or of one clock before and after it was set. Our choice."""


_IN_ORDER = ("rouge1", "rouge2", "rougeL", "exact")
"""Metrics of guessed sequences in every version; a bag of words has none of them."""

_OF_BAGS = ("token_precision", "nerr")
"""Metrics of a sequence that a bag of words has, too, and whose score of the step is their mean."""


_NUMBERS = re.compile(r"\([^()]*\)")
"""The parameters in brackets after the name of a defence, as `audit.step_record` writes them."""


_MOST_PROBLEMS = 100


def contradictions(results: Results) -> tuple[str, ...]:
    """Return at most a hundred contradictions in the results, one clause each.

    The clauses have no full stop.
    """
    checks = (
        _steps,
        _attempts,
        _catalogue,
        _sent,
        _sequences,
        _summaries,
        _controls,
        _canaries,
        _membership,
        _coverage,
        _times,
    )
    return tuple(islice((problem for check in checks for problem in check(results)), _MOST_PROBLEMS))


def unexplained_steps(results: Results) -> int:
    """Count the steps that lack attempts that were due.

    Steps whose gaps an interruption or a refused snapshot explains are not counted.
    """
    return max(0, lacking_steps(results) - results.coverage.skipped_snapshots - results.run.interrupted)


def lacking_steps(results: Results) -> int:
    """Count the steps that lack attempts that were due."""
    battery = results.run.battery
    due = len(battery.attacks) * len(battery.defenses)
    made = Counter(attempt.step for attempt in results.attempts)
    return sum(made[step.id] < due for step in results.steps)


def moment(text: str) -> datetime | None:
    """Return a point in time in UTC; None if `text` is not a valid ISO time."""
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


# ----------------------------------------------------------------------------------------------------------------- steps
def _steps(results: Results) -> Iterator[str]:
    ids = [step.id for step in results.steps]
    yield from (f"step {name} is recorded twice" for name in _twice(ids))
    for step in results.steps:
        if step.id != f"st-{step.step:06d}":
            yield f"step {step.id} has the number {step.step}"
        yield from _verification(step)
        yield from _declared(step, results.regime.declared_defenses)
    yield from _same_update(results.steps)
    ran = {attempt.step for attempt in results.attempts if attempt.finished}
    for step in results.steps:
        if step.verification.status is VerificationStatus.MISMATCH and step.id in ran:
            yield f"the update of step {step.id} comes from another batch, but attacks ran on it"


def _same_update(steps: Iterable[StepRecord]) -> Iterator[str]:
    """Compare the stamps of steps with the same update."""
    stamps: dict[str, StepRecord] = {}
    for step in steps:
        first = stamps.setdefault(step.snapshot, step)
        if first.verification.status is not step.verification.status:
            yield (
                f"steps {first.id} and {step.id} have the same update, but one is stamped {first.verification.status} and the other "
                f"{step.verification.status}"
            )


def _verification(step: StepRecord) -> Iterator[str]:
    stamp = step.verification
    exact = stamp.status in (VerificationStatus.VERIFIED, VerificationStatus.SCALED)
    if exact and stamp.relative_error is not None and stamp.relative_error > WORST_ERROR:
        yield f"step {step.id} is stamped {stamp.status} with a relative error of {stamp.relative_error:g}"
    if stamp.status.bounds and stamp.scale is not None and stamp.scale <= 0:
        yield f"step {step.id} is stamped {stamp.status} with a scale of {stamp.scale:g}"
    if stamp.status is VerificationStatus.NOISED and step.shipped_defense == "none":
        yield f"step {step.id} is stamped noised, but no defence was shipped"


def _declared(step: StepRecord, declared: tuple[str, ...] | None) -> Iterator[str]:
    unknown = [name for name in shipped_names(step.shipped_defense) if name not in (declared or ())]
    if declared is not None and unknown:
        yield f"step {step.id} ships {unknown[0]!r}, which the run did not declare"


def shipped_names(shipped: str) -> list[str]:
    """Return the names of the defences in a step's `shipped_defense`.

    >>> shipped_names("dp-sgd(max_grad_norm=1e+06)+sign"), shipped_names("none")
    (['dp-sgd', 'sign'], [])
    """
    return [] if shipped == "none" else _NUMBERS.sub("", shipped).split("+")


# -------------------------------------------------------------------------------------------------------------- attempts
def _attempts(results: Results) -> Iterator[str]:
    known = {step.id for step in results.steps}
    battery = results.run.battery
    strangers = sorted({a.step for a in results.attempts} - known)
    yield from (f"attempts on step {name}, which is not recorded" for name in strangers)
    for kind, named, members in (
        ("attack", {a.attack for a in results.attempts}, battery.attacks),
        ("defence", {a.defense for a in results.attempts}, battery.defenses),
    ):
        yield from (
            f"attempts with the {kind} {name!r}, which is not in the battery" for name in sorted(named - {*members})
        )
        yield from (f"the {kind} {name!r} occurs twice in the battery" for name in _twice(members))
    if strangers := sorted({*results.catalogue.attacks} - {*battery.attacks}):
        yield f"the catalogue describes the attack {strangers[0]!r}, which is not in the battery"
    if battery.budget_s == 0 and any(a.finished for a in results.attempts):
        yield "attacks ran although each had 0 s"
    twice = Counter((a.step, a.attack, a.defense) for a in results.attempts)
    yield from (f"{_name(*key)} is recorded {n} times" for key, n in twice.items() if n > 1)
    proved = {(a.step, a.defense) for a in results.attempts if a.recovers_every_text}
    minor, metrics = minor_version(results), _sequence_metrics(results)
    for attempt in results.attempts:
        for problem in _attempt(attempt, results, proved, minor, metrics):
            yield f"{_name(attempt.step, attempt.attack, attempt.defense)}{problem}"


def _attempt(
    attempt: Attempt, results: Results, proved: AbstractSet[tuple[str, str]], minor: int, metrics: Sequence[str]
) -> Iterator[str]:
    """Compare the parts of an attempt, and yield what follows its name in a clause.

    The results have version 1.`minor` and these metrics of sequences.
    """
    if attempt.seed != results.run.seed:
        yield f" has the seed {attempt.seed}, the run has {results.run.seed}"
    if attempt.status is AttemptStatus.NOT_NEEDED and (attempt.step, attempt.defense) not in proved:
        yield " was not needed, but no attack recovered every text of the step"
    if not attempt.finished:
        if attempt.events:
            yield " did not run, but it names an event"
        elif attempt.sequences or attempt.scores or attempt.stop:
            yield " did not run, but it has scores"
        return
    if (attempt.status is AttemptStatus.BUDGET_EXHAUSTED) != (attempt.stop == "budget"):
        yield f" has the status {attempt.status} and stopped for {attempt.stop or 'no reason'!r}"
    if attempt.events:
        yield from (f" names the event {event!r} twice" for event in _twice(attempt.events))
        strange = sorted(set(attempt.events) - set(EVENTS)) if minor <= OWN_VERSION[1] else []
        yield from (f" names the event {event!r}, which does not exist" for event in strange)
    for part in (_scores(attempt, metrics), _reach(attempt), _events(attempt, minor)):
        for problem in part:
            yield f": {problem}"


def _scores(attempt: Attempt, metrics: Sequence[str]) -> Iterator[str]:
    """Compare the scores of an attempt with its sequences."""
    guessed = any(sequence.exact is not None for sequence in attempt.sequences)
    for metric in metrics:
        values = [sequence.scores[metric] for sequence in attempt.sequences if metric in sequence.scores]
        if guessed or metric in _OF_BAGS:
            found = attempt.scores.get(metric)
            if not _surely_mean(found, values):
                yield from _mean(metric, found, values)
        elif metric == "token_recall":
            yield from _bag(attempt.scores.get(metric), values)
        elif values or (metric in _IN_ORDER and isinstance(attempt.scores.get(metric), Score)):
            yield f"{metric} is scored, but no sequence was guessed"
    yield from _best(attempt)
    whole = attempt.scores.get("label_exact")
    if isinstance(whole, Score) and at_least(attempt, "label_exact", 1.0) != at_least(attempt, "label_accuracy", 1.0):
        yield f"label_exact is {whole.value:g}, but the label accuracy contradicts it"
    for sequence in attempt.sequences:
        yield from _sequence(sequence)


def _sequence(sequence: SequenceScore) -> Iterator[str]:
    """Compare the scores of one sequence with each other."""
    if sequence.exact and {sequence.scores.get(name, 1.0) for name in (*_IN_ORDER, "token_precision")} != {1.0}:
        yield f"sequence {sequence.id} is exact, but its scores are not 1"
    if sequence.exact and sequence.token_recall != 1.0:
        yield f"sequence {sequence.id} is exact, but its token recall is not 1"
    if sequence.proved and (sequence.token_recall or 0.0) < LEAST_SHARE:
        yield f"sequence {sequence.id} is proved, but most of its words did not come back"
    if sequence.exact is not None and sequence.token_recall is None:
        yield f"sequence {sequence.id} was guessed, but has no token recall"


def _best(attempt: Attempt) -> Iterator[str]:
    """Compare the best score of a batch and the texts found with the sequences."""
    overlaps = [sequence.scores["rougeL"] for sequence in attempt.sequences if "rougeL" in sequence.scores]
    best, precision = attempt.scores.get("best_rl"), attempt.scores.get("sentence_precision")
    if isinstance(best, Score) and not (overlaps and _same(best.value, max(overlaps))):
        yield f"best_rl is {best.value:g}, and the best of its sequences has {max(overlaps, default=0.0):g}"
    for sequence in attempt.sequences:
        found = sequence.scores.get("sentences_found")
        if found is not None and found != float(sequence.scores.get("rougeL", 0.0) > FOUND):
            yield f"sequence {sequence.id} has sentences_found {found:g}, which its rougeL contradicts"
    if isinstance(precision, Score) and (precision.value > 0) != any(overlap > FOUND for overlap in overlaps):
        yield f"sentence_precision is {precision.value:g}, which the rougeL of its sequences contradicts"


def _sequence_metrics(results: Results) -> list[str]:
    """Return the metrics that score sequences.

    These are the metrics of the catalogue and the few that every version knows.
    """
    described = [name for name, entry in results.catalogue.metrics.items() if entry.level == "sequence"]
    return list(dict.fromkeys([*_IN_ORDER, "token_recall", "token_precision", *described]))


def _surely_mean(found: Measured | None, values: Sequence[float]) -> bool:
    """Return whether a score is that of the only sequence, or neither is there.

    That is the usual case, and `_mean` says nothing about it.
    """
    if not values:
        return not isinstance(found, Score)
    return isinstance(found, Score) and len(values) == found.n == 1 and found.value == values[0]


def _mean(metric: str, found: Measured | None, values: Sequence[float]) -> Iterator[str]:
    if isinstance(found, Score) != bool(values):
        yield f"{metric} is {'missing, and its sequences have it' if values else 'scored, and no sequence has it'}"
    elif isinstance(found, Score) and (found.n != len(values) or not _same(found.value, fmean(values))):
        yield f"{metric} is {found.value:g} of {found.n}, and its sequences come to {fmean(values):g} of {len(values)}"


def _bag(found: Measured | None, values: Sequence[float]) -> Iterator[str]:
    """Compare the recall of a bag of words with that of its sequences.

    That recall is not a mean over the sequences, so only the values 0 and 1 can be compared.
    """
    if isinstance(found, Score) != bool(values):
        yield f"token_recall is {'missing, and its sequences have it' if values else 'scored, and no sequence has it'}"
    elif isinstance(found, Score):
        ends = {end for end in (0.0, 1.0) if (found.value == end) != all(value == end for value in values)}
        if ends:
            yield f"token_recall is {found.value:g}, and its sequences have {min(values):g} to {max(values):g}"


def _reach(attempt: Attempt) -> Iterator[str]:
    shares = _values(attempt.sequences, "reachable")
    tested = _values(attempt.sequences, "passes")
    if not _surely_mean(attempt.reachable_tokens, shares):
        yield from _mean("reachable_tokens", attempt.reachable_tokens, shares)
    if not _surely_mean(attempt.reachable_sequences, tested):
        yield from _mean("reachable_sequences", attempt.reachable_sequences, tested)


def _events(attempt: Attempt, minor: int) -> Iterator[str]:
    """Compare the events that an attempt names with the events in its scores."""
    shown = shown_events(attempt)
    if minor < 2:
        shown = {name: yes for name, yes in shown.items() if name != "most_words"}
    for name, yes in shown.items():
        if yes != (name in attempt.events):
            yield f"the event {name!r} is {'missing, but its scores show it' if yes else 'named, but its scores do not show it'}"


def _sent(results: Results) -> Iterator[str]:
    """Compare the attempts on sent updates with what the steps say was sent.

    A step that was sent as produced has the same attempts twice, because the two updates are the same.
    """
    shown = AS_SENT in results.run.battery.defenses
    changed = {step.id for step in results.steps if step.sent}
    if shown and not changed:
        yield "the battery has the updates as sent, but no step has one"
    if changed and not shown:
        yield f"step {min(changed)} was changed before it was sent, but the battery has no updates as sent"
    produced = {(a.step, a.attack): a for a in results.attempts if shown and a.defense == PRODUCED}
    for attempt in results.attempts:
        if attempt.defense != AS_SENT or attempt.step in changed:
            continue
        known = produced.get((attempt.step, attempt.attack))
        if known is None or attempt.model_copy(update={"defense": PRODUCED}) != known:
            yield f"step {attempt.step} was sent as produced, but {attempt.attack} says something else of the two updates"


def _catalogue(results: Results) -> Iterator[str]:
    """Compare the catalogue with the battery.

    The gate reads from it which attacks end at the hidden size, so an attack that is not described would seem to have no such limit. Results before
    1.3 have no catalogue.
    """
    described = results.catalogue.attacks
    lacking = [name for name in results.run.battery.attacks if name not in described] if described else []
    if lacking:
        yield f"the catalogue does not describe the attack {lacking[0]!r} of the battery"


# ------------------------------------------------------------------------------------------------------------- sequences
def _sequences(results: Results) -> Iterator[str]:
    """Compare the sequences of all attempts on each step; they must be the same."""
    text = any(attempt.sequences for attempt in results.attempts)
    steps = {step.id: step for step in results.steps}
    first: dict[str, Attempt] = {}
    facts: dict[str, list[tuple[str, str, bool]]] = {}
    for attempt in results.attempts:
        step = steps.get(attempt.step)
        if not attempt.finished or step is None or not text:
            continue
        if len(attempt.sequences) != step.n_sequences:
            name = _name(attempt.step, attempt.attack, attempt.defense)
            yield f"{name} has {len(attempt.sequences)} sequences, the step has {step.n_sequences}"
        known = first.setdefault(attempt.step, attempt)
        if known is attempt:
            facts[attempt.step] = list(map(_facts, attempt.sequences))
        elif list(map(_facts, attempt.sequences)) != facts[attempt.step]:
            name = _name(attempt.step, attempt.attack, attempt.defense)
            yield f"{name} has other sequences than {known.attack} under {known.defense}"
    for attempt in first.values():
        yield from _lengths(attempt, steps[attempt.step], results.min_tokens)
        yield from _hidden_size(attempt, steps[attempt.step], results.regime.hidden)


def _facts(sequence: SequenceScore) -> tuple[str, str, bool]:
    return sequence.id, sequence.min_tokens_bucket, sequence.long_enough


def _lengths(attempt: Attempt, step: StepRecord, min_tokens: int) -> Iterator[str]:
    shortest = 0
    yield from (f"step {step.id} has two sequences {name}" for name in _twice(s.id for s in attempt.sequences))
    for sequence in attempt.sequences:
        bounds = bounds_of(sequence.min_tokens_bucket)
        if bounds is None:
            yield f"sequence {sequence.id} has the length {sequence.min_tokens_bucket!r}, which is not a range"
            continue
        shortest += bounds[0]
        if (bounds[0] >= min_tokens and not sequence.long_enough) or (bounds[1] < min_tokens and sequence.long_enough):
            what = "a" if sequence.long_enough else "no"
            yield f"sequence {sequence.id} of {sequence.min_tokens_bucket} tokens counts as {what} sentence of {min_tokens}+"
    batch = bounds_of(step.n_tokens_bucket)
    if batch is None or batch[1] < shortest:
        yield f"step {step.id} has {step.n_tokens_bucket} tokens, its sequences have {shortest} or more"
    sentences = sum(sequence.long_enough for sequence in attempt.sequences)
    if step.n_sentences is not None and step.n_sentences != sentences:
        yield f"step {step.id} has {step.n_sentences} sentences, but {sentences} of its sequences are long enough"


def _hidden_size(attempt: Attempt, step: StepRecord, hidden: int | None) -> Iterator[str]:
    """Compare the lengths of a step's texts with its statement on the hidden size.

    The tokens of one text are at different places, so they are different inputs. The longest text has at least the mean length.
    """
    ranges = [bounds_of(name) for name in (step.n_tokens_bucket, *(s.min_tokens_bucket for s in attempt.sequences))]
    batch, *texts = [0 if bounds is None else bounds[0] for bounds in ranges]
    longest = max((*texts, -(-batch // max(1, step.n_sequences))))
    if step.beyond_hidden is False and hidden is not None and longest >= hidden:
        yield f"step {step.id} has a text of {longest} tokens or more, but fewer inputs than the hidden size of {hidden}"


# ------------------------------------------------------------------------------------------- summaries, controls, the rest
def _summaries(results: Results) -> Iterator[str]:
    """Compare the summaries with the attempts."""
    try:
        wanted = [_figures(summary, results) for summary in summarise(results.attempts, seeds_of(results.steps))]
    except (ValueError, OverflowError):  # the numbers are too large for a mean
        yield "the attempts hold numbers from which no summary can be computed"
        return
    found = [_figures(summary, results) for summary in results.summaries]
    if len(wanted) != len(found):
        yield f"there are {len(found)} summaries of {len(wanted)} pairs of attack and defence"
        return
    for one, other in zip(found, wanted, strict=True):
        differ = [key for key in {**other, **one} if not _same(one.get(key), other.get(key))]
        if differ:
            yield (
                f"the summary of {one['attack']} under {one['defense']} says {differ[0]} {_shown(one.get(differ[0]))}, "
                f"but the attempts give {_shown(other.get(differ[0]))}"
            )


def _figures(summary: Summary, results: Results) -> dict[str, Any]:
    """Return the figures of a summary by name.

    In results before 1.3 a summary holds a few metrics only.
    """
    metrics = summary.scores if minor_version(results) >= 3 else former_keys.OF_SUMMARIES.values()
    fields = {name: getattr(summary, name) for name in Summary.model_fields if name != "scores"}
    return fields | {metric: summary.scores.get(metric) for metric in metrics}


def _controls(results: Results) -> Iterator[str]:
    for name, control in (("positive", results.controls.positive), ("negative", results.controls.negative)):
        if control.k > control.n:
            yield f"the {name} control counts {control.k} of {control.n}"
        if results.steps and control.n > len(results.steps):
            yield f"the {name} control ran on {control.n} steps of {len(results.steps)}"
        if control.n and control.note == "not run":
            yield f"the {name} control counts {control.k} of {control.n}, and its note says that it was not run"
    yield from _kinds(results)


def _kinds(results: Results) -> Iterator[str]:
    for kind, counts in results.controls.kinds.items():
        if counts.k > counts.n or counts.n != results.controls.positive.n:
            yield f"the control of {kind} counts {counts.k} of {counts.n}, and the control ran on {results.controls.positive.n} steps"
        for attack, own in counts.by.items():
            if attack not in results.run.battery.attacks:
                yield f"the control of {kind} names {attack!r}, which is not in the battery"
            if own.k > min(own.n, counts.k) or own.n > counts.n:
                yield f"the control of {kind} counts {own.k} of {own.n} for {attack}, and {counts.k} of {counts.n} in all"
        if counts.k > sum(own.k for own in counts.by.values()):
            yield f"the control of {kind} counts {counts.k} recovered steps, and its attacks recovered fewer"


def _canaries(results: Results) -> Iterator[str]:
    """Compute every bound on epsilon again from its counts."""
    for one in results.canaries:
        name = f"the bound by the secrets that {one.attack} recovered under {one.defense}"
        if one.k > one.n or one.n > len(results.steps):
            yield f"{name} counts {one.k} of {one.n}, and there are {len(results.steps)} steps"
        elif not 0 < one.confidence < 1 or not one.delta < 1:
            yield f"{name} has the confidence {one.confidence:g} and the delta {one.delta:g}"
        elif not isclose(one.epsilon_lower, wanted := canary_epsilon(one), abs_tol=1e-5):
            yield f"{name} says {one.epsilon_lower:g}, and its counts give {wanted:g}"


def _membership(results: Results) -> Iterator[str]:
    """Compare the counts of named texts with each other."""
    found = results.membership
    if found is None:
        return
    strangers = {step.step for step in found.steps} - {step.id for step in results.steps}
    yield from (f"membership was asked of step {name}, which is not recorded" for name in sorted(strangers))
    yield from (f"membership was asked of step {name} twice" for name in _twice(step.step for step in found.steps))
    for step in found.steps:
        if step.found > step.members or step.false > step.nonmembers:
            yield f"more texts of step {step.step} are named than there are candidates"
    yield from (
        f"membership at {rate} is there twice" for rate in _twice(f"{point.false_rate:g}" for point in found.points)
    )
    for point in found.points:
        most = ((point.found, found.members), (point.base, found.members), (point.false, found.nonmembers))
        more = ((point.null, found.null_candidates), (point.calibration, found.calibration))
        if any(k > n for k, n in (*most, *more)):
            yield f"membership at {point.false_rate:g} names more texts than there are candidates"
    first = found.at(FALSE_RATES[0])
    if first is not None and (first.found, first.false) != (
        sum(step.found for step in found.steps),
        sum(step.false for step in found.steps),
    ):
        yield f"membership names {first.found} texts at {first.false_rate:g}, and its steps add up to another number"
    if not found.right <= found.guesses <= found.pairs <= found.members:
        yield f"membership has {found.right} right guesses of {found.guesses}, and {found.pairs} pairs of {found.members} members"
    if found.calibration_texts > found.calibration or found.control_found > found.control_texts:
        yield "membership counts more calibration texts than scores, or more named texts of a known batch than it has"


def _coverage(results: Results) -> Iterator[str]:
    coverage = results.coverage
    if coverage.audited_steps != len(results.steps):
        yield f"the coverage counts {coverage.audited_steps} audited steps, and {len(results.steps)} are recorded"
    if coverage.total_steps is not None and coverage.total_steps < len(results.steps):
        yield f"the run had {coverage.total_steps} steps, and {len(results.steps)} are recorded"
    both = sorted({missing.what for missing in coverage.not_run} & set(results.run.battery.attacks))
    yield from (f"the attack {name!r} is in the battery and among those that were not run" for name in both)


def _times(results: Results) -> Iterator[str]:
    started, finished = moment(results.run.started), moment(results.run.finished)
    for what, text, found in (("started", results.run.started, started), ("finished", results.run.finished, finished)):
        if text and (found is None or not 2000 <= found.year < 9000):
            yield f"the audit {what} at {text[:40]!r}, which is not a point in time"


# ----------------------------------------------------------------------------------------------------------------- small
def _name(step: str, attack: str, defense: str) -> str:
    return f"attack {attack} on step {step}" + (f" under {defense}" if defense != "none" else "")


def _values(sequences: Iterable[SequenceScore], field: str) -> list[float]:
    return [float(value) for sequence in sequences if (value := getattr(sequence, field)) is not None]


def _twice(names: Iterable[str]) -> list[str]:
    return sorted(name for name, n in Counter(names).items() if n > 1)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
    return bool(one == other)


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
