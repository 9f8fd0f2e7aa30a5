"""Events of every attack under pure noise, against its stated rate.

`python -m tests.benchmarks.pure_noise --out FOLDER`

As `tests/house/test_pure_noise.py`, with as many draws for attacks that search as time allows, and with their own knobs where `--full` says so.
Writes `pure_noise.md`: draws, steps with an event, and the upper bound of the event rate at 95 % (Clopper-Pearson). Not collected by pytest.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from leakaudit.client.facts import Granted
from leakaudit.errors import AnatomyError
from leakaudit.models.array_classifier import save_auxiliary
from leakaudit.registry import attacks
from leakaudit.results import bounds as stats
from tests.house import test_pure_noise as draws
from tests.support import tiny


class Row(NamedTuple):
    """One attack."""

    attack: str
    draws: int
    events: int
    stated: float
    upper: float
    """Of the event rate, one-sided at 95 %."""
    seconds: float


def measure(name: str, auxiliary: Path, count: int, budget: float, full: bool) -> Row:
    """Run one attack on `count` updates of noise."""
    kind = attacks[name]
    searches = name in draws.SEARCHES
    attack = kind(**({} if full else draws.SHORT.get(name, {}))) if searches else draws.made(name, auxiliary)
    rng, events, start = torch.Generator().manual_seed(1), 0, time.perf_counter()
    fitting = ["two classes"] if searches else [what for what in draws.STEPS if attack.applies(draws._made(what)[1])]
    for number, (noise, strength) in enumerate(islice(draws.settings(), count)):
        step, seen, size = draws._made(fitting[number // 12 % len(fitting)])
        noisy = draws.pure_noise(seen, noise, strength * size, rng)
        if searches:
            noisy = noisy.granting(Granted(lengths=tuple(len(ids) for ids in step.truth.sequences())))
        if attack.applies(noisy):
            with suppress(AnatomyError):
                events += bool(draws.scored(step, attack, noisy, number, seconds=budget).events)
    seconds = time.perf_counter() - start
    return Row(name, count, events, kind.false_event_rate, stats.upper_bound(events, count), seconds)


def table(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| attack | draws | events | stated rate | rate at most (95 %) | s |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        yield f"| `{row.attack}` | {row.draws} | {row.events} | {row.stated:.2f} | {row.upper:.4f} | {row.seconds:.0f} |"


def main() -> None:
    """Run all attacks, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for pure_noise.md")
    parser.add_argument("--attacks", nargs="+", choices=draws._ours(), default=None)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds a draw")
    parser.add_argument("--full", action="store_true", help="searches with their own knobs instead of few steps")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        auxiliary = Path(folder) / "labelled.safetensors"
        inputs = dict(
            tiny.bert_tokenizer()(["a bird saw the horse", "two fish ate"], return_tensors="pt", padding=True)
        )
        save_auxiliary(auxiliary, inputs, torch.tensor([0, 1]))
        for name in options.attacks or [*draws._fast(), *draws.SEARCHES]:
            rows.append(measure(name, auxiliary, options.draws, options.budget, options.full))
            text = "\n".join(table(rows))
            print(text.splitlines()[-1], flush=True)
            (options.out / "pure_noise.md").write_text(f"# Events under pure noise\n\n{__doc__}\n{text}\n")


if __name__ == "__main__":
    main()
