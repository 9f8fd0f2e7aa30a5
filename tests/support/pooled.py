"""Small runs of one audit that a pooled verdict is about."""

from __future__ import annotations

from typing import Any

from leakaudit.gate.verdict import Verdict
from leakaudit.history.pooled import Given, judge_together
from leakaudit.results.files import with_digest
from leakaudit.results.schema import Results
from tests.support.factories import NOW, attempt, policy, results, step


def small_run(
    name: str, first: int = 0, clean: int = 10, *, leaks: int = 0, run: dict[str, Any] | None = None, **extra: Any
) -> Results:
    """Build a run whose steps have the numbers from `first` on; the last ones leak."""
    numbers = range(first, first + clean + leaks)
    found = results(
        [step(number) for number in numbers],
        [attempt(number, leaks=number >= first + clean) for number in numbers],
        **extra,
    )
    return with_digest(found.model_copy(update={"run": found.run.model_copy(update={"id": name, **(run or {})})}))


def small_runs(count: int, clean: int = 10) -> list[Results]:
    """Build runs with different clean steps."""
    return [small_run(f"run-{number}", number * clean, clean) for number in range(count)]


def together(runs: list[Results], *rules: dict[str, Any], despite: tuple[str, ...] = (), **extra: Any) -> Verdict:
    """Judge runs together by rules on top of the defaults of the test policy."""
    given = [Given(run, sha256="ab" * 32) for run in runs]
    return judge_together(given, policy(*rules, **extra), now=NOW, despite=despite)
