"""Planted mistakes of DP-SGD and correct runs, and what is said of them.

python -m tests.benchmarks.conformance mistakes
python -m tests.benchmarks.conformance correct
python -m tests.benchmarks.conformance level --audits 200
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from leakaudit.audit.conformance.judge import judge
from leakaudit.audit.conformance.measure import Measurement, measure
from leakaudit.client.step import ClientStep
from leakaudit.results.conformance import ConformanceCheck
from tests.support import private_training as private

Mistake = Callable[[Any, nn.Module], None]

MISTAKES: dict[str, tuple[Mistake, dict[str, Any]]] = {
    "no noise on one layer": (private.no_noise_on("layer.1.output.dense.weight"), {}),
    "no noise on the embedding": (private.no_noise_on("word_embeddings.weight"), {}),
    "one seed for all steps": (private.same_seed, {}),
    "bound after averaging": (private.bound_after_mean, {}),
    "bound on each micro-batch": (private.bound_of_pairs, {"physical": 2, "noise": 0.03, "steps": 6}),
    "real batch size as divisor": (private.real_size, {"poisson": True}),
    "clipping by parameter counted as flat": (private.bound_by_parameter, {}),
    "no clipping": (private.no_bound, {}),
    "float16 noise": (private.half_noise, {}),
    "noise on each example, averaged": (private.noise_times(8**-0.5), {}),
}
"""Name -> mistake and arguments of the training, for mistakes that single steps show."""

CORRECT: dict[str, dict[str, Any]] = {
    "flat": {},
    "flat, Poisson": {"poisson": True},
    "per layer": {"clipping": "per_layer"},
    "ghost": {"mode": "ghost"},
    "accumulated": {"physical": 4},
}
"""Name -> arguments of a correct training."""


def measured(folder: Path, mistake: Mistake | None = None, **options: Any) -> list[Measurement]:
    """Train and measure every kept step."""
    snapshots = private.train(folder, mistake, **options)
    found = (
        measure(f"st-{number:06d}", ClientStep.of(snapshot), snapshot.observation.update)
        for number, snapshot in sorted(snapshots.items())
    )
    return [one for one in found if one is not None]


def checks(mistake: Mistake | None = None, **options: Any) -> tuple[ConformanceCheck, ...]:
    """Train, measure and judge."""
    with tempfile.TemporaryDirectory() as folder:
        return judge(measured(Path(folder) / "run", mistake, **options))


def _lines(found: tuple[ConformanceCheck, ...], *, every: bool) -> Iterator[str]:
    for one in found:
        if every or one.outcome == "contradicted":
            yield f"    {one.about}: {one.outcome}: {one.sentence}"


def main() -> None:
    """Print what is said of each training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("mistakes", "correct"))
    parser.add_argument("--only", default="")
    parser.add_argument("--all", action="store_true", help="print every check")
    parser.add_argument("--seeds", type=int, default=4)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if given.what == "mistakes":
        for name, (mistake, options) in MISTAKES.items():
            if given.only in name:
                print(name, flush=True)
                print("\n".join(_lines(checks(mistake, **options), every=given.all)), flush=True)
        return
    accused = runs = 0
    for name, options in CORRECT.items():
        for seed in range(given.seeds):
            found = checks(seed=seed, **options)
            runs, accused = runs + 1, accused + any(one.outcome == "contradicted" for one in found)
            print(f"{name}, seed {seed}", flush=True)
            print("\n".join(_lines(found, every=given.all)), flush=True)
    print(f"{accused} of {runs} correct runs contradicted")


if __name__ == "__main__":
    main()
