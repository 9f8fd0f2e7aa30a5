"""The time of the gate grows with the number of attempts and not faster."""

from __future__ import annotations

import json
from pathlib import Path
from time import process_time

from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import default_policy
from leakaudit.results.files import read_results, to_json
from tests.benchmarks.gate_scale import audit_of
from tests.support.factories import NOW


def seconds(file: Path) -> float:
    """Return the least of two times to read and judge an audit, in processor seconds."""
    times = []
    for _ in range(2):
        before = process_time()
        found, _ = read_results(file)
        gate.evaluate(found, default_policy(), now=NOW)
        times.append(process_time() - before)
    return min(times)


def test_four_times_the_attempts_take_at_most_five_times_as_long(tmp_path: Path) -> None:
    """A walk over all attempts for each attempt or step would take sixteen times."""
    times = {}
    for steps in (4, 16):
        file = tmp_path / f"{steps}.json"
        file.write_text(json.dumps(to_json(audit_of(steps))))
        times[steps] = seconds(file)
    assert times[16] <= 5 * times[4], times
