"""Redaction: an audit reduced to what its report may show.

Renderers accept only a `RedactedResult`. It is built field by field from an allow-list. A field that is not on the list is left out,
so a new field is private until somebody lists it.

    mode      what the reader learns beyond scores
    hash      a keyed hash and a range of lengths for each sequence
    masked    also which sixteenths of each sequence were recovered
    full      the text and the class counts, from the private journal

The module has over 400 lines, so that everything that decides what is shown stands in one place.

Reports in mode hash and masked are made from results.json alone. `leakaudit.results.schema.LENGTHS` says what they tell about lengths.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from leakaudit.errors import RedactionError
from leakaudit.gate.verdict import Verdict, Worst
from leakaudit.history.saved_trend import SavedTrend
from leakaudit.reports.allowlist import ENVIRONMENT, ERROR_TYPE, allowed, clean_command, without_paths
from leakaudit.reports.nights import Nights, nights_of
from leakaudit.reports.wording import banner
from leakaudit.results import schema as scores
from leakaudit.results.journal import JournalEntry, LabelSample, Sample, TokenMatch
from leakaudit.results.lengths import without_counts
from leakaudit.results.recovery import amount
from leakaudit.results.replay_command import replay_command
from leakaudit.results.schema import Attempt, AttemptStatus, Results, SequenceScore, StepRecord, TextMode, TrackerRun


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens with the same `TokenMatch`, as a report shows them."""

    match: TokenMatch
    tokens: int
    text: str


@dataclass(frozen=True)
class Recovered:
    """What one attack recovered of one sequence under one defence."""

    attack: str
    defense: str
    status: AttemptStatus
    scores: SequenceScore
    wall_s: float
    strip: str | None
    """Which parts were recovered (`leakaudit.results.schema.Strip`); None in mode hash, or if the results do not have it."""
    true: tuple[Run, ...] | None
    """The true text, with the recovered parts marked; only in mode full, else None."""
    guess: tuple[Run, ...] | None
    """The guessed text; only in mode full, else None. Of a bag of tokens, the words of this text that it names, sorted."""


@dataclass(frozen=True)
class SequenceView:
    """One true sequence, and the best attack on it under each defence."""

    step: str
    sequence: str
    hmac: str
    length: str
    """Number of tokens as a power-of-two range."""
    recovered: tuple[Recovered, ...]
    """One item for each defence. The update as the run ships it comes first."""


@dataclass(frozen=True)
class LabelView:
    """True and recovered class counts of one step."""

    step: str
    attack: str
    defense: str
    accuracy: float | None
    rows: tuple[tuple[str, int, int], ...] | None
    """(class, true count, recovered count); only in mode full, else None."""
    size_known: bool = True
    """Whether the attack knew how many examples the batch has; if not, it is judged by the share of each class."""


@dataclass(frozen=True)
class RedactedResult:
    """The parts of an audit that may be shown; renderers accept nothing else."""

    mode: TextMode
    results: Results
    """Rebuilt from the allow-list. A step that failed verification, or that is not recorded, has no attempts here."""
    verdict: Verdict
    sequences: tuple[SequenceView, ...]
    """Sequences; the one of which most was recovered comes first."""
    labels: tuple[LabelView, ...]
    hidden_sequences: int
    """Number of sequences that are left out, because a report shows only a few."""
    hidden_environment: int
    """Number of entries of the environment that are left out, because they are not on the allow-list."""
    nights: Nights | None = None
    """The nights up to this audit; None if it is no night, or the only one."""
    replays: Mapping[Worst, str] = field(default_factory=dict)
    """The worst event of a rule -> the command that makes it again, if its snapshot is kept."""


def redact(
    results: Results,
    journal: Iterable[JournalEntry],
    verdict: Verdict,
    mode: TextMode = TextMode.MASKED,
    *,
    allow_full: bool = False,
    allow_full_in_ci: bool = False,
    top_samples: int = 20,
    environ: Mapping[str, str] | None = None,
    trend: SavedTrend | None = None,
    folder: Path | None = None,
) -> RedactedResult:
    """Return the parts of an audit that a reader may see in `mode`.

    Args:
        results: the audit, as in results.json.
        journal: the private journal; only mode full uses it.
        verdict: the verdict of the gate on these results.
        mode: how much text may be shown.
        allow_full: whether mode full is permitted (`report.allow_full` of the policy).
        allow_full_in_ci: whether mode full is permitted even if the environment variable CI is set. CI keeps and shares files.
        top_samples: how many sequences to show in detail: those of which most was recovered.
        environ: the environment; the process's own if None.
        trend: the nights up to this audit, if it is one of several.
        folder: the audit's folder, which is asked for kept snapshots; its path is not shown. None if there is none.

    Returns:
        The input of the renderers.

    Raises:
        RedactionError: mode full is not permitted, or the journal holds no text.
    """
    entries = list(journal) if mode is TextMode.FULL else []
    if mode is TextMode.FULL:
        _check_full(entries, allow_full, allow_full_in_ci, os.environ if environ is None else environ)
    public = _public_results(results, mode)
    sequences = _sequences(public, entries, mode)
    return RedactedResult(
        mode=mode,
        results=public,
        verdict=verdict,
        sequences=tuple(sequences[:top_samples]),
        labels=tuple(_labels(public, entries, mode, _of_unknown_size(results))),
        hidden_sequences=max(0, len(sequences) - top_samples),
        hidden_environment=len(results.run.environment) - len(public.run.environment),
        nights=nights_of(trend, results.run.id) if trend is not None else None,
        replays={} if folder is None else _replays(public, verdict, folder),
    )


def banner_of(redacted: RedactedResult) -> str:
    """Return how to handle a report of this audit."""
    return banner(redacted.mode, redacted.results.subject.data_invented)


def is_ci(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this is a CI machine: the environment variable CI is set."""
    environ = os.environ if environ is None else environ
    return environ.get("CI", "").lower() not in ("", "0", "false")


def _replays(results: Results, verdict: Verdict, folder: Path) -> dict[Worst, str]:
    """Return the commands that make the worst events again, where snapshots are kept."""
    by_time = {
        (a.step, a.attack, a.wall_s): a for a in results.attempts
    }  # a verdict does not name the defence of the attempt
    found: dict[Worst, str] = {}
    for worst in filter(None, (rule.worst for rule in verdict.rules)):
        attempt = by_time.get((worst.step, worst.attack, worst.wall_s))
        command = None if attempt is None else replay_command(results, attempt, folder)
        if command is not None:
            found[worst] = command
    return found


def refuse_full_in_ci(environ: Mapping[str, str] | None = None) -> None:
    """Refuse text mode full on a CI machine.

    An audit calls this before its first attack, so that it does not fail at its end.

    Raises:
        RedactionError: the environment variable CI is set.
    """
    if is_ci(environ):
        raise RedactionError(
            "text mode full was asked for in CI, whose files are kept and shared; audit with text mode masked, "
            "or render a finished audit with `leakaudit report --text full --allow-full-in-ci`"
        )


def _check_full(
    entries: Sequence[JournalEntry], allow_full: bool, allow_full_in_ci: bool, environ: Mapping[str, str]
) -> None:
    if not allow_full:
        raise RedactionError("text mode full was asked for, but the policy does not allow it (report.allow_full: true)")
    if not allow_full_in_ci:
        refuse_full_in_ci(environ)
    samples = [sample for entry in entries for sample in entry.samples]
    only_labels = not samples and any(entry.labels for entry in entries)  # a model of arrays has no text to hold
    if not only_labels and not any(sample.true_tokens is not None for sample in samples):
        raise RedactionError(
            "text mode full was asked for, but the journal holds no text; run the audit again with text mode full"
        )


def cleaned(results: Results, mode: TextMode) -> Results:
    """Return all of an audit, without the words of it that may be private.

    No field is left out, so that the gate judges the same: the command, the environment, names of files and of trackers' runs, and reasons of errors are cleaned, and
    mode hash has no strips.
    """
    environment = {k: v for k, v in results.run.environment.items() if k in ENVIRONMENT}
    run = results.run.model_copy(
        update={
            "command": clean_command(results.run.command),
            "environment": dict(sorted(environment.items())),
            "trackers": results.run.trackers if mode is TextMode.FULL else _only_kinds(results.run.trackers),
        }
    )
    artifacts = tuple(a.model_copy(update={"name": ""}) for a in results.subject.artifacts)  # names are private
    return results.model_copy(
        update={
            "run": run,
            "subject": results.subject.model_copy(update={"artifacts": artifacts}),
            "attempts": tuple(_public_attempt(a, mode) for a in results.attempts),
            "steps": tuple(map(_public_step, results.steps)),
        }
    )


def _only_kinds(trackers: tuple[TrackerRun, ...]) -> tuple[TrackerRun, ...]:
    """Return trackers without the names and addresses of their runs.

    These may be private.
    """
    return tuple(TrackerRun(kind=one.kind) for one in trackers)


def _public_results(results: Results, mode: TextMode) -> Results:
    public = cleaned(allowed(results), mode)
    attacked = {s.id for s in public.steps if s.verification.status.attacked}
    return public.model_copy(update={"attempts": tuple(a for a in public.attempts if a.step in attacked)})


def _public_step(step: StepRecord) -> StepRecord:
    """Return a step whose notes name no path."""
    stamps = {"verification": step.verification, "sent": step.sent}
    cleaned = {
        name: stamp.model_copy(update={"note": without_paths(stamp.note)})
        for name, stamp in stamps.items()
        if stamp is not None and stamp.note
    }
    return step.model_copy(update=cleaned) if cleaned else step


def _public_attempt(attempt: Attempt, mode: TextMode) -> Attempt:
    if mode is TextMode.HASH:
        hidden = tuple(s.model_copy(update={"strip": None}) for s in attempt.sequences)
        attempt = attempt.model_copy(update={"sequences": hidden})
    if attempt.status is AttemptStatus.NOT_APPLICABLE and mode is not TextMode.FULL:
        attempt = attempt.model_copy(update={"reason": without_counts(attempt.reason)})
    if attempt.status is not AttemptStatus.ERROR:
        return attempt
    found = ERROR_TYPE.match(attempt.reason)
    whole = found is not None and attempt.reason[found.end() : found.end() + 1] in ("", ":")
    return attempt.model_copy(update={"reason": found[0] if found and whole else "error"})


# ------------------------------------------------------------------------------------------------------ text and labels
def _sequences(results: Results, entries: Sequence[JournalEntry], mode: TextMode) -> list[SequenceView]:
    """Return one view for each true sequence, the most recovered one first."""
    samples: dict[tuple[str, ...], Sample] = {}
    for entry in entries:
        for sample in entry.samples:
            key = (sample.step, sample.attack, sample.defense, sample.sequence, str(entry.attempt.seed))
            samples.setdefault(key, sample)
    best: dict[tuple[str, str], dict[str, tuple[Attempt, SequenceScore]]] = {}
    for attempt in results.attempts:
        for found in attempt.sequences:
            kept = best.setdefault((attempt.step, found.id), {})
            if attempt.defense not in kept or _gain(found) > _gain(kept[attempt.defense][1]):
                kept[attempt.defense] = (attempt, found)
    order = {name: i for i, name in enumerate(dict.fromkeys(["none", *(a.defense for a in results.attempts)]))}
    views = []
    for (step, sequence), by_defense in best.items():
        recovered = []
        for defense in sorted(by_defense, key=order.__getitem__):
            attempt, found = by_defense[defense]
            kept_of_it = samples.get((step, attempt.attack, defense, sequence, str(attempt.seed)))
            recovered.append(_recovered(attempt, found, kept_of_it, mode))
        first = recovered[0].scores
        views.append(SequenceView(step, sequence, first.hmac, first.min_tokens_bucket, tuple(recovered)))
    return sorted(views, key=lambda view: (*(-x for x in _gain(view.recovered[0].scores)), view.step, view.sequence))


def _gain(found: SequenceScore) -> tuple[float, float, float]:
    """Return the key by which samples are sorted.

    Exact texts come first, then texts with a larger `amount`, then texts with a higher ROUGE-L.
    """
    return float(found.exact or False), amount(found) or 0.0, found.scores.get("rougeL", 0.0)


def _recovered(attempt: Attempt, found: SequenceScore, sample: Sample | None, mode: TextMode) -> Recovered:
    true = guess = None
    if sample is not None and mode is TextMode.FULL and sample.true_tokens is not None:
        true = runs(sample.true_pattern, sample.true_tokens)
        if sample.guess_pattern is not None:
            guess = runs(sample.guess_pattern, sample.guess_tokens or ())
        else:
            guess = named(sample.true_pattern, sample.true_tokens)
    return Recovered(attempt.attack, attempt.defense, attempt.status, found, attempt.wall_s, found.strip, true, guess)


def runs(pattern: str, tokens: Sequence[str]) -> tuple[Run, ...]:
    """Return runs of neighbouring tokens with the same `TokenMatch`.

    Args:
        pattern: one `TokenMatch` for each token; any other letter counts as wrong. A pattern of another length does not belong to
            these tokens, so then no token is marked as recovered.
        tokens: the tokens as the tokenizer writes them.

    Returns:
        Runs that cover the tokens in order.
    """
    known = {match.value for match in TokenMatch}
    matches = [TokenMatch(mark if mark in known else ".") for mark in pattern]
    if len(tokens) != len(matches):
        matches = [TokenMatch.WRONG] * len(tokens)
    joined: list[Run] = []
    for match, piece in zip(matches, _pieces(tokens), strict=True):
        if joined and joined[-1].match is match:
            joined[-1] = Run(match, joined[-1].tokens + 1, joined[-1].text + piece)
        else:
            joined.append(Run(match, 1, piece))
    return tuple(joined)


def named(pattern: str, tokens: Sequence[str]) -> tuple[Run, ...]:
    """Return the different tokens of a text that a bag names, sorted.

    Each is a run of its own.

    Args:
        pattern: one `TokenMatch` for each token of the text.
        tokens: the tokens as the tokenizer writes them.
    """
    marked = zip(pattern, tokens, strict=True) if len(pattern) == len(tokens) else ()
    words = {token.lstrip("\u0120\u2581") for mark, token in marked if mark != TokenMatch.WRONG}
    return tuple(Run(TokenMatch.UNIGRAM, 1, f" {word}") for word in sorted(words, key=str.casefold))


def _pieces(tokens: Sequence[str]) -> list[str]:
    """Return one string for each token; joined they give the text.

    `##ing` continues a word, and a leading U+0120 or U+2581 starts a word. If neither is used, every token is a word.
    """
    starts = any(token[:1] in ("\u0120", "\u2581") for token in tokens)
    pieces: list[str] = []
    for token in tokens:
        if starts:
            pieces.append(" " + token[1:] if token[:1] in ("\u0120", "\u2581") else token)
        elif token.startswith("##") and len(token) > 2:
            pieces.append(token[2:])
        else:
            pieces.append(" " + token)
    return pieces


def _of_unknown_size(results: Results) -> frozenset[tuple[str, str, str]]:
    """Return the attempts that did not know the batch size.

    Nothing else of what an attack says of itself is shown.
    """
    return frozenset((a.step, a.attack, a.defense) for a in results.attempts if a.facts.get("batch_size_known") == 0.0)


def _labels(
    results: Results, entries: Sequence[JournalEntry], mode: TextMode, unsized: frozenset[tuple[str, str, str]]
) -> list[LabelView]:
    """Return one view for each attempt that guessed labels."""
    kept = {
        (entry.labels.step, entry.labels.attack, entry.labels.defense): entry.labels
        for entry in entries
        if entry.labels
    }
    letters = _class_letters(list(kept.values()))
    views = []
    for attempt in results.attempts:
        score = attempt.scores.get("label_accuracy")
        sample = kept.get((attempt.step, attempt.attack, attempt.defense))
        if not isinstance(score, scores.Score) and sample is None:
            continue
        accuracy = score.value if isinstance(score, scores.Score) else None
        rows = _label_rows(sample, letters, mode) if sample is not None else None
        known = (attempt.step, attempt.attack, attempt.defense) not in unsized
        views.append(LabelView(attempt.step, attempt.attack, attempt.defense, accuracy, rows, known))
    return views


def _class_letters(samples: Sequence[LabelSample]) -> dict[int, str]:
    """Return class -> letter, the most frequent class first.

    The index of a class would reveal which class it is.
    """
    totals: dict[int, int] = {}
    for sample in samples:
        for index, count in enumerate(sample.true_counts):
            totals[index] = totals.get(index, 0) + count
    ranked = sorted(totals, key=lambda index: (-totals[index], index))
    return {index: f"class {_letters(rank)}" for rank, index in enumerate(ranked)}


def _letters(rank: int) -> str:
    text = ""
    while rank >= 0:
        rank, rest = divmod(rank, 26)
        text, rank = chr(ord("A") + rest) + text, rank - 1
    return text


MOST_EMPTY_CLASSES = 12
"""Most classes of which those without an example or a guess are rows as well. Our choice: such a table stays short."""


def _label_rows(sample: LabelSample, letters: Mapping[int, str], mode: TextMode) -> tuple[tuple[str, int, int], ...]:
    named = mode is TextMode.FULL and sample.names is not None
    size = max(len(sample.true_counts), len(sample.guess_counts))
    true = (*sample.true_counts, *[0] * (size - len(sample.true_counts)))
    guess = (*sample.guess_counts, *[0] * (size - len(sample.guess_counts)))
    names = cast("tuple[str, ...]", sample.names) if named else ()
    rows = [
        (names[i] if i < len(names) else letters.get(i, f"class {_letters(i)}"), true[i], guess[i])
        for i in range(size)
        if size <= MOST_EMPTY_CLASSES or true[i] or guess[i]
    ]
    return tuple(rows if named else sorted(rows, key=lambda row: (len(row[0]), row[0])))
