"""Builders of results and journals for tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from statistics import fmean
from typing import Any, get_args

from leakaudit import registry
from leakaudit.gate.policy import Policy
from leakaudit.plugins.catalogue import catalogue
from leakaudit.results.consistency import shipped_names
from leakaudit.results.events import shown_events
from leakaudit.results.files import with_digest
from leakaudit.results.journal import JournalEntry, LabelSample, Sample
from leakaudit.results.schema import (
    Attempt,
    AttemptStatus,
    Battery,
    Control,
    Controls,
    Coverage,
    Kind,
    KindControl,
    Measured,
    Missing,
    Regime,
    Results,
    RunInfo,
    Score,
    SequenceScore,
    StepRecord,
    Subject,
    Tally,
    Verification,
    VerificationStatus,
)
from leakaudit.results.summary import seeds_of, summarise

FINISHED = "2026-11-02T10:00:00Z"
NOW = datetime(2026, 11, 2, 12, 0, tzinfo=UTC)
"""Two hours after the audit."""


def step_id(number: int) -> str:
    """Return the id of the n-th step."""
    return f"st-{number:06d}"


SEQUENCE_METRICS = ("rouge1", "rouge2", "rougeL", "exact", "token_recall", "token_precision")
"""Metrics of one sequence that the attempts built here have."""
LABEL_METRICS = ("label_accuracy", "label_classes", "label_excess")


def step(
    number: int,
    status: VerificationStatus = VerificationStatus.VERIFIED,
    shipped: str = "none",
    n_sequences: int = 1,
) -> StepRecord:
    """Build a step that was audited."""
    return StepRecord(
        id=step_id(number),
        step=number,
        phase="early",
        snapshot="sha256:" + f"{number:064x}",
        n_sequences=n_sequences,
        n_tokens_bucket="9-16",
        verification=Verification(status=status, relative_error=1e-6),
        shipped_defense=shipped,
    )


def sequence(name: str = "sq-0", recall: float = 0.0, *, long_enough: bool = True, bag: bool = False) -> SequenceScore:
    """Build the score of one sequence.

    A `recall` of 1.0 is an exact recovery; a `bag` guesses words without order.
    """
    words = dict.fromkeys(("token_recall", "token_precision"), recall)
    in_order = dict.fromkeys(("rouge1", "rouge2", "rougeL", "longest_run"), recall) | {"exact": float(recall == 1.0)}
    return SequenceScore(
        id=name,
        hmac="9f" * 8,
        scores=words if bag else words | in_order,
        strip=("d" if bag else "4") * round(16 * recall) + "0" * (16 - round(16 * recall)),
        min_tokens_bucket="9-16" if long_enough else "5-8",
        long_enough=long_enough,
    )


def with_scores(found: SequenceScore, **numbers: float | None) -> SequenceScore:
    """Return the score of a sequence with other numbers; None takes a number away."""
    scores = found.scores | numbers
    return found.model_copy(update={"scores": {name: value for name, value in scores.items() if value is not None}})


def unguessed(name: str = "sq-0", *, long_enough: bool = True) -> SequenceScore:
    """Build the score of one sequence by an attack that guesses labels only."""
    return SequenceScore(
        id=name,
        hmac="9f" * 8,
        min_tokens_bucket="9-16" if long_enough else "5-8",
        long_enough=long_enough,
    )


def attempt(
    number: int,
    attack: str = "span",
    defense: str = "none",
    *,
    leaks: bool = False,
    recall: float | None = None,
    status: AttemptStatus = AttemptStatus.RAN,
    long_enough: bool = True,
    kind: str = "text",
    **extra: Any,
) -> Attempt:
    """Build one attempt of a kind.

    `text` guesses sentences, `bag` words without order, and `labels` class counts.
    """
    ran = status in (AttemptStatus.RAN, AttemptStatus.BUDGET_EXHAUSTED)
    share = recall if recall is not None else (1.0 if leaks else 0.1)
    sequences: tuple[SequenceScore, ...] = ()
    scores: dict[str, Measured] = {}
    if ran and kind == "text":
        sequences = (sequence(recall=share, long_enough=long_enough),)
        names = ("rouge1", "rouge2", "rougeL", "token_recall", "token_precision")
        scores = {name: Score(value=share) for name in names}
        scores["exact"] = Score(value=float(share == 1.0))
    elif ran and kind == "bag":
        sequences = (sequence(recall=share, long_enough=long_enough, bag=True),)
        scores = {"token_recall": Score(value=share), "token_precision": Score(value=share)}
        scores["rougeL"] = Missing(missing="a bag of words has no order")
    elif ran:
        sequences = (unguessed(long_enough=long_enough),)
        scores = {"label_accuracy": Score(value=share)}
    fields: dict[str, Any] = {
        "step": step_id(number),
        "attack": attack,
        "defense": defense,
        "seed": 0,
        "status": status,
        "reason": "" if ran else f"{status.value} for a test",
        "stop": {AttemptStatus.RAN: "done", AttemptStatus.BUDGET_EXHAUSTED: "budget"}.get(status, ""),
        "wall_s": 1.5,
        "sequences": sequences,
        "scores": scores,
    }
    return Attempt(**({"events": _events(Attempt(**(fields | extra)))} | fields | extra))


def _events(done: Attempt) -> tuple[str, ...]:
    """Return the events that the parts of an attempt show."""
    return tuple(name for name, yes in shown_events(done).items() if yes)


def of_sequences(done: Attempt, sequences: Sequence[SequenceScore]) -> Attempt:
    """Return `done` with other sequences and with what follows from them."""
    scores = dict(done.scores) | {
        name: mean([s.scores[name] for s in sequences if name in s.scores])
        for name in SEQUENCE_METRICS
        if name in done.scores
    }
    reach = {
        name: mean([float(v) for s in sequences if (v := getattr(s, field)) is not None])
        for name, field in {"reachable_tokens": "reachable", "reachable_sequences": "passes"}.items()
    }
    found = done.model_copy(update={"sequences": tuple(sequences), "scores": scores} | reach)
    return found.model_copy(update={"events": _events(found)})


def mean(values: Sequence[float]) -> Measured:
    """Return the score of a step whose sequences have `values`."""
    return Score(value=fmean(values), n=len(values)) if values else Missing(missing="nothing to measure")


def results(
    steps: Sequence[StepRecord] = (),
    attempts: Sequence[Attempt] = (),
    *,
    positive: tuple[int, int] = (1, 1),
    negative: tuple[int, int] = (0, 1),
    finished: str = FINISHED,
    **extra: Any,
) -> Results:
    """Build the results of an audit, with what follows from its parts."""
    run = RunInfo(
        id="run-20261102",
        started="2026-11-02T09:50:00Z",
        finished=finished,
        tool="0.1.0",
        battery=Battery(
            digest="sha256:" + "ab" * 32,
            attacks=tuple(dict.fromkeys(a.attack for a in attempts)),
            defenses=tuple(dict.fromkeys(a.defense for a in attempts)),
            budget_s=30.0,
        ),
        command="leakaudit run spool --seed 7",
        environment={"python": "3.11.9", "torch": "2.13.0", "device": "cpu"},
    )
    fields: dict[str, Any] = {
        "run": run,
        "subject": Subject(
            model="BertForSequenceClassification", config_digest="sha256:" + "cd" * 32, parameters=22_000_000
        ),
        "regime": Regime(
            training_mode=True,
            dropout=0.1,
            hidden=384,
            trainable="all",
            batch_size=1,
            declared_defenses=tuple(sorted({name for s in steps for name in shipped_names(s.shipped_defense)})),
            declared=tuple(sorted({s.shipped_defense for s in steps} - {"none"})),
        ),
        "catalogue": catalogue(
            [], [], [(name, registry.metrics[name]) for name in (*SEQUENCE_METRICS, *LABEL_METRICS)]
        ),
        "coverage": Coverage(audited_steps=len(steps)),
        "steps": tuple(steps),
        "attempts": tuple(attempts),
        "summaries": summarise(attempts, seeds_of(steps)),
        "controls": Controls(
            positive=Control(k=positive[0], n=positive[1]),
            negative=Control(k=negative[0], n=negative[1]),
            kinds={kind: recovered(positive, {a.attack for a in attempts}) for kind in get_args(Kind)},
        ),
    }
    return with_digest(Results(**(fields | extra)))


def recovered(counts: tuple[int, int], attacks: Collection[str]) -> KindControl:
    """Build the control of one kind, which every attack recovered as often."""
    own = Tally(k=min(counts), n=counts[1])
    return KindControl(k=own.k if attacks else 0, n=own.n, by=dict.fromkeys(sorted(attacks), own))


def changed(found: Results, **fields: Any) -> Results:
    """Return `found` with other fields and with what follows from them."""
    steps, attempts = fields.get("steps", found.steps), fields.get("attempts", found.attempts)
    follows: dict[str, Any] = {
        "summaries": summarise(attempts),
        "coverage": found.coverage.model_copy(update={"audited_steps": len(steps)}),
    }
    return with_digest(found.model_copy(update=follows | fields))


def audit(leaks: int, clean: int, *, attack: str = "span", defense: str = "none", **extra: Any) -> Results:
    """Build the results of one attack, the leaking steps first."""
    total = leaks + clean
    return results(
        [step(i) for i in range(total)],
        [attempt(i, attack, defense, leaks=i < leaks) for i in range(total)],
        **extra,
    )


def policy(*rules: Mapping[str, Any], **extra: Any) -> Policy:
    """Build a policy; without rules it allows no exact sentence in 5 % of the steps."""
    default = {"id": "sentence-rate", "event": "exact_sentence", "max_rate": 0.05}
    return Policy.model_validate(
        {"schema": "leakaudit.policy/1", "name": "test policy", "rules": list(rules) or [default]} | extra
    )


def journal_entry(
    done: Attempt,
    words: Sequence[str] = (),
    guess: Sequence[str] | None = None,
    *,
    full: bool = True,
    counts: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    names: Sequence[str] | None = None,
) -> JournalEntry:
    """Build the journal entry of `done`, whose first sequence had `words`."""
    guessed = list(words) if guess is None else list(guess)
    samples: tuple[Sample, ...] = ()
    if words and done.sequences:
        samples = (
            Sample(
                step=done.step,
                attack=done.attack,
                defense=done.defense,
                sequence=done.sequences[0].id,
                true_pattern=pattern(words, guessed),
                guess_pattern=pattern(guessed, words),
                true_tokens=tuple(words) if full else None,
                guess_tokens=tuple(guessed) if full else None,
            ),
        )
    labels = None
    if counts:
        labels = LabelSample(
            step=done.step,
            attack=done.attack,
            defense=done.defense,
            true_counts=counts[0],
            guess_counts=counts[1],
            names=tuple(names) if names else None,
        )
    return JournalEntry(attempt=done, samples=samples, labels=labels)


def pattern(words: Sequence[str], other: Sequence[str]) -> str:
    """Mark each word: in a correct bigram (b), correct (u) or wrong (.)."""
    pairs = set(pairwise(other))
    marks = ["u" if word in other else "." for word in words]
    for i in range(len(words) - 1):
        if (words[i], words[i + 1]) in pairs:
            marks[i] = marks[i + 1] = "b"
    return "".join(marks)
