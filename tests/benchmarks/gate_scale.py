"""Time and memory of the gate on audits of many attempts, and its time to start.

    python -m tests.benchmarks.gate_scale            # 10, 40 and 160 steps of 10 attacks under 10 defences
    python -m tests.benchmarks.gate_scale 1000       # 100,000 attempts
    python -m tests.benchmarks.gate_scale 1000 --drawn    # every score of every attempt is another number, with the seed 5

Each command runs in a process of its own. The first row of a table is the unit of its ratios. Times are seconds of the processor, because other
work on the machine changes the time of the clock. Equal scores are one object, so drawn ones take the most memory.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from leakaudit.results.files import to_json
from leakaudit.results.recovery import LEAST_SHARE
from leakaudit.results.schema import Attempt, Results
from tests.support.factories import attempt, of_sequences, results, step, with_scores

ATTACKS, DEFENCES = 10, 10
AT = "2026-11-02T12:00"


def audit_of(steps: int, rng: random.Random | None = None) -> Results:
    """Return a clean audit of ten attacks under ten defences, one text a step.

    Args:
        steps: their number.
        rng: draws each score, below the least one that counts; None for scores of 0.1.
    """
    attacks = ["span", *(f"tag{i}" for i in range(1, ATTACKS))]
    defences = ["none", *(f"prune(share=0.{i})" for i in range(1, DEFENCES))]
    made = [attempt(i, attack, defence) for i in range(steps) for attack in attacks for defence in defences]
    made = made if rng is None else [_drawn(one, rng) for one in made]
    return results([step(i) for i in range(steps)], made, positive=(3, 3), negative=(0, 3))


def _drawn(one: Attempt, rng: random.Random) -> Attempt:
    """Return an attempt with other scores and another time."""
    scores = {name: rng.uniform(0.0, 0.9 * LEAST_SHARE) for name in _METRICS}
    found = of_sequences(one, [with_scores(one.sequences[0], **scores)])
    return found.model_copy(
        update={"wall_s": rng.uniform(0.0, 20.0), "reachable_tokens": None, "reachable_sequences": None}
    )


_METRICS = ("rouge1", "rouge2", "rougeL", "token_recall", "token_precision", "longest_run")


def measured(*words: str) -> tuple[float, float]:
    """Return processor seconds of a command, and its most memory in MB of 10^6 bytes."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, sys.executable, "-m", "leakaudit", *words],
        capture_output=True,
        check=True,
        text=True,
    )
    seconds, kilobytes = done.stdout.split()
    return float(seconds), float(kilobytes) * 1024 / 1e6


_CHILD = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
"""A process whose only child is the command, because the system counts all children together."""


def gate_on(steps: int, folder: Path, rng: random.Random | None) -> tuple[int, float, float]:
    """Judge an audit of `steps`; return size in bytes, seconds and MB."""
    file = folder / "results.json"
    file.write_text(json.dumps(to_json(audit_of(steps, rng)), indent=1))
    seconds, memory = measured("gate", str(folder), "--at", AT, "--quiet")
    return file.stat().st_size, seconds, memory


def main() -> None:
    """Print start-up, then one row for each number of steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", nargs="*", type=int, default=[10, 40, 160])
    parser.add_argument("--drawn", action="store_true")
    asked = parser.parse_args()
    print("| command | processor s | MB |\n| --- | --- | --- |")
    for words in (("--version",), ("gate", "--help")):
        seconds, memory = min(measured(*words) for _ in range(5))
        print(f"| leakaudit {' '.join(words)} | {seconds:.2f} | {memory:.0f} |")
    print("\n| steps | attempts | file MB | processor s | x first | MB |\n| --- | --- | --- | --- | --- | --- |")
    first = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for steps in asked.steps:
            size, seconds, memory = gate_on(steps, Path(folder), random.Random(5) if asked.drawn else None)
            first = first or seconds
            many = steps * ATTACKS * DEFENCES
            print(f"| {steps} | {many:,} | {size / 1e6:.1f} | {seconds:.2f} | {seconds / first:.1f} | {memory:.0f} |")


if __name__ == "__main__":
    main()
