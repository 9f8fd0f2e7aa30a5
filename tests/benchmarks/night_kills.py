"""Nights that are killed at a random time, and finished by the next start.

    python -m tests.benchmarks.night_kills --nights 50 --seed 1

A night of six steps of the starter's example is run whole, to know its results and how long it takes. Then every further night is killed by
SIGKILL after a time drawn evenly from that length, and started again. Printed is how many nights had a record after the second start, every step
once, and the results of the whole night; and what was left over. Each start is a fork of one process that has loaded the libraries, so that the
time falls into the night and not into imports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from leakaudit.cli import main as leakaudit
from leakaudit.cli.nights.starter import write_starter
from leakaudit.history.nights import History
from tests.support.same_results import same_results

STEPS = 6
NIGHT = "2026-11-01T0000Z"
FILES = {"journal.jsonl", "report.html", "results.json", "state.json", "trend.json", "verdict.json"}
"""What a finished night leaves."""


def start(place: Path) -> int:
    """Start the night in a fork and return its process id."""
    if pid := os.fork():
        return pid
    with contextlib.suppress(BaseException), (place / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        leakaudit(["nightly", "--config", str(place / "nightly.yaml"), "--at", "2026-11-01"])
    os._exit(0)


def place_in(folder: Path, name: str, example: Path, key: Path | None = None) -> Path:
    """Return a folder with the configuration of a short night."""
    place = folder / name
    place.mkdir()
    source = {"model": str(example / "model"), "data": str(example / "data.jsonl"), "steps": STEPS}
    fields = {
        "schema": "leakaudit.nightly/1",
        "simulate": source,
        "attacks": ["span", "idlg"],
        "controls": 1,
        "stop_when_decided": False,
    }
    (place / "nightly.yaml").write_text(json.dumps(fields), encoding="utf-8")
    if key is not None:
        (place / "leakaudit-nights/history").mkdir(parents=True, mode=0o700)
        shutil.copy(key, place / "leakaudit-nights/history/key")
    return place


def main() -> None:
    """Run the nights and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_starter(folder / "nightly.yaml")
        example = folder / "leakaudit-example"
        for _ in range(2):  # the first one loads the libraries of every attack
            shutil.rmtree(folder / "whole", ignore_errors=True)
            whole = place_in(folder, "whole", example)
            begun = time.monotonic()
            os.waitpid(start(whole), 0)
            length = time.monotonic() - begun
        wanted = same_results(whole / "leakaudit-nights/nights" / NIGHT)
        for number in range(asked.nights):
            place = place_in(folder, f"night{number}", example, whole / "leakaudit-nights/history/key")
            pid = start(place)
            time.sleep(rng.uniform(0, length))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            night = place / "leakaudit-nights/nights" / NIGHT
            state = (
                "recorded"
                if History.load(place / "leakaudit-nights/history").records
                else "audited"
                if (night / "results.json").exists()
                else "begun"
                if (night / "journal.jsonl").exists()
                else "not begun"
            )
            found[f"killed when {state}"] += 1
            os.waitpid(start(place), 0)
            (record,) = History.load(place / "leakaudit-nights/history").records
            found["finished"] += record.status == "audited"
            found["every step once"] += len(record.units) == len(set(record.units)) == STEPS
            found["the results of the whole night"] += same_results(night) == wanted
            found["nothing left over"] += {path.name for path in night.iterdir()} == FILES
            if {path.name for path in night.iterdir()} != FILES:
                print(sorted({path.name for path in night.iterdir()} ^ FILES))
            shutil.rmtree(place)
    print(f"A whole night takes {length:.1f} s, seed {asked.seed}.\n\n| what | count | n |\n| --- | --- | --- |")
    for what, count in sorted(found.items()):
        print(f"| {what} | {count} | {asked.nights} |")


if __name__ == "__main__":
    main()
