"""Tables of an audit for pandas, without any text.

The rows come from results that are redacted as for a report: results.json holds neither texts nor class counts, and paths and command lines
are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from leakaudit.errors import MissingPartError
from leakaudit.gate.verdict import Verdict
from leakaudit.notebook.columns import SCORE, TABLES
from leakaudit.results.schema import Attempt, Missing, Results, Score, SequenceScore

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

COMMAND = 'pip install "leakaudit[pandas]"'
"""What to type where pandas is missing."""


def frame(table: str, results: Results, verdict: Verdict) -> pd.DataFrame:
    """Return one table of an audit.

    Args:
        table: `runs`, `attempts`, `texts` or `labels`.
        results: the results, redacted.
        verdict: the verdict on them.

    Returns:
        One row for each run, attempt, guessed text or attempt on labels. `TABLES` has the columns, each with its dtype also where no row is.

    Raises:
        MissingPartError: pandas is not installed.
    """
    pandas = _pandas()
    rows = list(_ROWS[table](results, verdict))
    dtypes: dict[str, str] = {column.name: column.dtype for column in TABLES[table]}
    scores = sorted({name for row in rows for name in row if name.startswith(SCORE)})
    dtypes |= dict.fromkeys(scores, "Float64")
    columns = {
        name: pandas.Series(
            pandas.to_datetime([row.get(name) or None for row in rows], utc=True, format="ISO8601")
            if dtype.startswith("datetime")
            else [row.get(name) for row in rows],
            dtype=dtype,
        )
        for name, dtype in dtypes.items()
    }
    return cast("pd.DataFrame", pandas.DataFrame(columns))


def _pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise  # a part of pandas is broken, and its own message says which
        raise MissingPartError(f"the tables of an audit need pandas, which is not installed here: {COMMAND}") from None


def _runs(results: Results, verdict: Verdict) -> Iterator[Row]:
    run, subject = results.run, results.subject
    yield {
        "run": run.id,
        "started": run.started,
        "finished": run.finished,
        "tool": run.tool,
        "model": subject.model,
        "parameters": subject.parameters,
        "data": subject.data,
        "simulated": run.simulated,
        "interrupted": run.interrupted,
        "steps": len(results.steps),
        "total_steps": results.coverage.total_steps,
        "attempts": len(results.attempts),
        "verdict": verdict.verdict.value,
        "deciding_rule": verdict.deciding_rule,
        "policy": verdict.policy,
        "training_s": results.overhead.training_s,
        "blocked_s": results.overhead.blocked_s,
    }


def _attempts(results: Results, verdict: Verdict) -> Iterator[Row]:
    del verdict
    steps = {step.id: step for step in results.steps}
    for attempt in results.attempts:
        step = steps[attempt.step]
        yield {
            **_named(results, attempt),
            "step_number": step.step,
            "phase": step.phase,
            "verification": step.verification.status.value,
            "shipped_defense": step.shipped_defense,
            "reason": attempt.reason,
            "stop": attempt.stop,
            "adaptive": attempt.adaptive,
            "granted": "+".join(attempt.granted),
            "leaked": attempt.leaked if attempt.finished else None,
            "events": "+".join(attempt.events),
            "wall_s": attempt.wall_s,
            "gpu_s": attempt.gpu_s,
            "guess_perplexity": None if isinstance(attempt.guess_perplexity, Missing) else attempt.guess_perplexity,
            "reachable_tokens": _number(attempt.reachable_tokens),
            "reachable_sequences": _number(attempt.reachable_sequences),
            **_scores({name: _number(score) for name, score in attempt.scores.items()}),
        }


def _texts(results: Results, verdict: Verdict) -> Iterator[Row]:
    del verdict
    for attempt in results.attempts:
        for found in attempt.sequences:
            if found.scores:  # an attack on labels guesses no text
                yield {**_named(results, attempt), **_text(found), **_scores(found.scores)}


def _text(found: SequenceScore) -> Row:
    return {
        "text": found.id,
        "hmac": found.hmac,
        "length": found.min_tokens_bucket,
        "long_enough": found.long_enough,
        "exact": found.exact,
        "outcome": found.outcome,
        "own_score": found.own_score,
        "proved": found.proved,
        "reachable": found.reachable,
        "passes": found.passes,
        "strip": found.strip,
    }


def _labels(results: Results, verdict: Verdict) -> Iterator[Row]:
    del verdict
    on_labels = {name for name, entry in results.catalogue.metrics.items() if entry.level == "step"}
    for attempt in results.attempts:
        numbers = {name: _number(attempt.scores.get(name)) for name in on_labels}
        goal = results.catalogue.attacks.get(attempt.attack)
        guessed = any(number is not None for number in numbers.values())
        if guessed or (goal is not None and goal.goal == "labels"):
            yield {
                **_named(results, attempt),
                "recovered": "label_counts" in attempt.events if guessed else None,
                "batch_size_known": attempt.facts.get("batch_size_known", 1.0) != 0.0 if guessed else None,
                **_scores(numbers),
            }


_ROWS: dict[str, Callable[[Results, Verdict], Iterable[Row]]] = {
    "runs": _runs,
    "attempts": _attempts,
    "texts": _texts,
    "labels": _labels,
}


def _named(results: Results, attempt: Attempt) -> Row:
    return {
        "run": results.run.id,
        "step": attempt.step,
        "attack": attempt.attack,
        "defense": attempt.defense,
        "seed": attempt.seed,
        "status": attempt.status.value,
    }


def _number(measured: Score | Missing | None) -> float | None:
    return measured.value if isinstance(measured, Score) else None


def _scores(numbers: Mapping[str, float | None]) -> Row:
    return {f"{SCORE}{name}": number for name, number in numbers.items() if number is not None}
