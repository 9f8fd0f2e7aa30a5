"""Thirty nights with a leak that starts on night eleven.

    python -m tests.benchmarks.thirty_nights --data sst2/dev.jsonl --out nights

Every night trains MiniLM on other rows with another seed (`tests.benchmarks.night_training`), and `leakaudit nightly` audits its twenty steps of
B = 2 by `span` and `embedding-rows`. The first ten nights add the noise that the configuration declares; from night eleven on it is switched
off, and the declaration stays. The tenth night becomes the baseline. Printed are the seconds, the exit code and the line of each night, and the
night on which the leak is seen. The report of the last night shows the trend.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from leakaudit.cli.nights.night import period_of
from leakaudit.history.nights import HISTORY, NIGHTS, History
from leakaudit.history.record import NightRecord
from tests.benchmarks.night_training import DECLARED

START = datetime(2026, 11, 1, tzinfo=UTC)


def main() -> None:
    """Run the nights and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the nights")
    parser.add_argument("--nights", type=int, default=30)
    parser.add_argument("--leak-from", type=int, default=11)
    parser.add_argument("--whole", action="store_true", help="do not end a night when its policy is decided")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    seconds: list[float] = []
    print(
        "| night | noise | s | exit | steps | leaked | bounds so far | worse than the baseline |\n" + "| --- " * 8 + "|"
    )
    for night in range(1, asked.nights + 1):
        noise = DECLARED if night < asked.leak_from else 0.0
        _configure(asked.out, asked.data.absolute(), night, noise, asked.whole)
        moment = START + timedelta(days=night - 1)
        begun = time.perf_counter()
        done = _leakaudit(asked.out, "nightly", "--config", "nightly.yaml", "--at", moment.isoformat())
        seconds.append(time.perf_counter() - begun)
        record = _history(asked.out)[-1]
        if record.status == "gap":
            print(done.stderr, file=sys.stderr)
        rate = record.rates[0]
        cells = [night, f"{noise:g}", f"{seconds[-1]:.1f}", done.returncode, f"{record.steps} of {record.planned}"]
        bounds = f"{100 * (rate.lower or 0):.1f} to {100 * (rate.upper or 0):.1f} %"
        cells += [f"{rate.k} of {rate.n}", bounds, "yes" if record.worse else "no"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if night == asked.leak_from - 1:
            id_ = period_of(moment, timedelta(days=1))
            run = asked.out.absolute() / "leakaudit-nights" / NIGHTS / id_
            set_ = _leakaudit(asked.out, "baseline", "set", str(run), "--anyway")
            if set_.returncode:
                print(set_.stderr, file=sys.stderr)
    records = _history(asked.out)
    failed = next((number for number, record in enumerate(records, 1) if record.exit_code == 3), None)
    worse = next((number for number, record in enumerate(records, 1) if record.worse), None)
    quiet, leaking = seconds[: asked.leak_from - 1], seconds[asked.leak_from - 1 :]
    print(
        f"\nThe leak starts on night {asked.leak_from}. First night that fails: {failed}; first one worse than the baseline: {worse}."
    )
    for what, some in (("defended", quiet), ("leaking", leaking)):
        if some:
            print(
                f"Seconds of a {what} night: median {statistics.median(some):.1f}, longest {max(some):.1f}, n = {len(some)}."
            )


def _history(folder: Path) -> tuple[NightRecord, ...]:
    return History.load(folder / "leakaudit-nights" / HISTORY).records


def _configure(folder: Path, data: Path, night: int, noise: float, whole: bool) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.night_training"]
    command += ["--data", str(data), "--seed", str(night), "--noise", str(noise)]
    fields: dict[str, Any] = {
        "schema": "leakaudit.nightly/1",
        "training": {"command": command, "folder": str(Path.cwd())},
        "data_name": "nights",
        "attacks": ["embedding-rows", "span"],
        "stop_when_decided": not whole,
    }
    (folder / "nightly.yaml").write_text(json.dumps(fields), encoding="utf-8")  # JSON is YAML


def _leakaudit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leakaudit", *words], cwd=folder, capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    main()
