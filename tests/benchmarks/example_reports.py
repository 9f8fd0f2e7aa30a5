"""Writes the six masked reports of `examples/reports`.

    python -m tests.benchmarks.example_reports    # from the root of the repository, in the environment of `make test`

The results are invented, so that the same reports come out on every machine: nothing was attacked, and no text stands behind them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakaudit import registry
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.policy import Policy, default_policy
from leakaudit.gate.policy_source import PolicyFiles
from leakaudit.gate.subject import NO_CLAIM, Claim
from leakaudit.plugins.catalogue import catalogue
from leakaudit.reports import redact, render_html
from leakaudit.results.schema import (
    Artifact,
    Attempt,
    AttemptStatus,
    Coverage,
    NotTested,
    Price,
    Results,
    StepRecord,
    Utility,
)
from tests.support.factories import LABEL_METRICS, NOW, SEQUENCE_METRICS, attempt, changed, of_sequences, results, step

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "reports"
LABELS_POLICY = ROOT / "examples" / "policy_labels.yaml"

NOISE = "gaussian-noise(scale=10)"
DEFENCES = {
    "none": 60,
    "freeze-embeddings": 58,
    "prune(share=0.9)": 31,
    "gaussian-noise(scale=1)": 4,
    NOISE: 0,
}
"""Defence -> steps, of 60, in which a text leaks under it."""
COSTS = {
    "freeze-embeddings": (-0.004, -0.011, 0.003),
    "prune(share=0.9)": (-0.021, -0.034, -0.008),
    "gaussian-noise(scale=1)": (-0.052, -0.071, -0.033),
    NOISE: (-0.187, -0.215, -0.159),
}
"""Defence -> change of the accuracy, with the ends of its interval."""
PRICES = {
    "freeze-embeddings": (0.9, 0.47),
    "prune(share=0.9)": (1.8, 0.2),
    "gaussian-noise(scale=1)": (1.4, 1.0),
    NOISE: (1.4, 1.0),
}
"""Defence -> time of a step and traffic, relative to no defence."""
BASE_ACCURACY = 0.91
WORDS = {"bert.embeddings.word_embeddings.weight": 1.0}
LABELS = {"classifier.bias": 1.0}
"""What told the other two attacks."""


@dataclass(frozen=True)
class Example:
    """An invented audit and what judges it."""

    results: Results
    policy: Policy
    claim: Claim = NO_CLAIM


def _audit(steps: int, texts: int = 0, labels: int = 0, defense: str = "none", shipped: str = "none") -> Results:
    """Return an audit of one update; some of its steps leak texts or labels.

    Args:
        steps: audited steps.
        texts: of these, the first that leak a text.
        labels: of these, the first that leak their label counts.
        defense: column of the attempts.
        shipped: defence that the training applied.
    """
    return _named([_step(i, steps, shipped) for i in range(steps)], _tried(steps, texts, labels, defense))


def _step(number: int, steps: int, shipped: str = "none") -> StepRecord:
    """Return a step of a training whose learning rate falls to zero."""
    way = number / steps
    told = {"loss": 0.35 + 1.1 * 0.5 ** (6 * way), "learning_rate": 5e-5 * (1 - way)}
    return step(40 * number, shipped=shipped).model_copy(update=told)


def _tried(steps: int, texts: int, labels: int, defense: str) -> list[Attempt]:
    """Return the attempts of three attacks on every step."""
    found = []
    for i in range(steps):
        leaks = i < texts
        words = 1.0 if leaks else 0.05 + 0.02 * (i % 3)
        found += [
            attempt(40 * i, "embedding-rows", defense, kind="bag", recall=words, wall_s=0.1, **_told(WORDS)),
            _sentences(attempt(40 * i, "span", defense, leaks=leaks, wall_s=2.0 + i % 5, **_told(_inputs(i)))),
            attempt(40 * i, "llg", defense, kind="labels", leaks=i < labels, wall_s=0.1, **_told(LABELS)),
        ]
    return found


def _told(by: Mapping[str, float]) -> dict[str, Any]:
    return {"adaptive": True, "told_by": dict(by)}


def _inputs(number: int) -> dict[str, float]:
    """Return what told an attack on the first attention."""
    value = 0.40 + 0.01 * (number % 5)
    rest = {"key": 0.32, "query": 0.68 - value}
    layer = "bert.encoder.layer.0.attention.self"
    return {f"{layer}.{name}.weight": share for name, share in {"value": value, **rest}.items()}


def _sentences(done: Attempt) -> Attempt:
    """Return an attempt that knows what was in reach: what it found, nothing else."""
    found = "exact_sentence" in done.events
    own = {"reachable": 1.0 if found else 0.25, "passes": found}
    return of_sequences(done, [one.model_copy(update=own) for one in done.sequences])


def _named(steps: Sequence[StepRecord], tried: Sequence[Attempt], **extra: Any) -> Results:
    """Return results that say what the attacks and the defences are."""
    attacks = [(name, registry.attacks[name]) for name in ("embedding-rows", "span", "llg")]
    labels = dict.fromkeys(one.defense for one in tried)
    defenses = [(label, registry.defenses[label.partition("(")[0]]) for label in labels]
    metrics = [(name, registry.metrics[name]) for name in (*SEQUENCE_METRICS, *LABEL_METRICS)]
    gaps = (
        NotTested(what="malicious server", why="the battery reads updates of honest training only"),
        NotTested(what="aggregated updates", why="one client's update was audited"),
    )
    found = results(
        steps,
        tried,
        catalogue=catalogue(attacks, defenses, metrics),
        coverage=Coverage(audited_steps=len(steps), total_steps=40 * len(steps), not_tested=gaps),
        positive=(3, 3),
        negative=(0, 3),
        **extra,
    )
    subject = found.subject.model_copy(update={"data": "invented-results"})
    run = found.run.model_copy(update={"id": "example", "command": "python -m tests.benchmarks.example_reports"})
    return changed(found, subject=subject, run=run, coverage=found.coverage)


def passing() -> Example:
    """Return 60 steps without a leak, under the noise that the run ships."""
    return Example(_audit(60, shipped=NOISE), default_policy())


def failing_by_text() -> Example:
    """Return 24 steps of which 9 leak a text."""
    return Example(_audit(24, texts=9, labels=20), default_policy())


def failing_by_labels() -> Example:
    """Return 24 steps that leak their label counts and no text."""
    return Example(_audit(24, labels=21, shipped=NOISE), PolicyFiles(LABELS_POLICY).load_policy(None))


def undecided() -> Example:
    """Return 12 steps without a leak, too few to show much."""
    return Example(_audit(12, shipped=NOISE), default_policy())


def refused() -> Example:
    """Return the results of one model, given for the release of another."""
    found = _audit(60, shipped=NOISE)
    own, other = (Artifact(name="model.safetensors", sha256=digit * 64) for digit in "ab")
    bound = changed(found, subject=found.subject.model_copy(update={"artifacts": (own,)}), coverage=found.coverage)
    return Example(bound, default_policy(), Claim(artifacts=(other,)))


def frontier() -> Example:
    """Return four defences with what each hides and costs."""
    tried = [one for defense, leaks in DEFENCES.items() for one in _tried(60, leaks, leaks, defense)]
    late = [one for one in tried if one.defense == "prune(share=0.9)" and one.attack == "span" and not one.events][:6]
    tried = [
        one.model_copy(update={"status": AttemptStatus.BUDGET_EXHAUSTED, "stop": "budget"}) if one in late else one
        for one in tried
    ]
    shared: dict[str, Any] = {
        "metric": "accuracy",
        "seeds": (1, 2, 3),
        "steps": 200,
        "examples": 400,
        "learning_rate": 5e-5,
    }
    utility = [Utility(defense="none", value=BASE_ACCURACY, **shared)]
    for defense, (change, lower, upper) in COSTS.items():
        ends: dict[str, Any] = {"difference": change, "lower": lower, "upper": upper, "baseline": BASE_ACCURACY}
        utility.append(Utility(defense=defense, value=BASE_ACCURACY + change, **ends, **shared))
    prices = [Price(defense=name, seconds=seconds, traffic=traffic) for name, (seconds, traffic) in PRICES.items()]
    steps = [_step(i, 60) for i in range(60)]
    return Example(_named(steps, tried, utility=tuple(utility), prices=tuple(prices)), default_policy())


EXAMPLES: dict[str, Callable[[], Example]] = {
    "pass": passing,
    "fail_texts": failing_by_text,
    "fail_labels": failing_by_labels,
    "inconclusive": undecided,
    "error": refused,
    "frontier": frontier,
}
"""Name of a report's file -> what makes its audit."""


def page_of(name: str) -> str:
    """Return the masked report of an example."""
    one = EXAMPLES[name]()
    return render_html(redact(one.results, [], evaluate(one.results, one.policy, now=NOW, claim=one.claim)))


def main() -> None:
    """Write every report into a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the reports")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name in EXAMPLES:
        (out / f"{name}.html").write_text(page_of(name), encoding="utf-8")
        print(out / f"{name}.html")


if __name__ == "__main__":
    main()
