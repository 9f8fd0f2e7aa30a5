"""What the gate says of edited results whose digest fits.

    python -m tests.benchmarks.gate_edits --seed 1               # every single edit of one step and of the attempts on it
    python -m tests.benchmarks.gate_edits --seed 5 --drawn 1500  # so many edits of each audit, three in ten of them two at once

An audit can be named to judge that one only. The last column names the fields whose edits passed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from leakaudit.gate.verdict import Status
from tests.gate.test_mutations import edits_of, resealed, verdict_of
from tests.support.leaking import LEAKS
from tests.support.undecided import FAILING, UNDECIDED


def main() -> None:
    """Print one row for each audit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("audits", nargs="*")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drawn", type=int, default=0)
    asked = parser.parse_args()
    print(
        "| audit | edits | ERROR | FAIL | INCONCLUSIVE | PASS | fields |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name, found in {**FAILING, **UNDECIDED}.items():
        if asked.audits and name not in asked.audits:
            continue
        step = LEAKS if name in FAILING else len(found[0].steps) - 1
        edits, said, fields = edits_of(found, step, asked.seed), Counter[Status](), set()
        with tempfile.TemporaryDirectory() as folder:
            for chosen, data in edits.many(asked.drawn) if asked.drawn else edits.singles():
                verdict = verdict_of(Path(folder), resealed(data, indent=1), found[1])
                said[Status.ERROR if verdict is None else verdict.verdict] += 1
                if verdict is not None and verdict.verdict is Status.PASS:
                    fields.add(" and ".join(edit.name.split(": ")[0] for edit in chosen))
        counts = [said[one] for one in (Status.ERROR, Status.FAIL, Status.INCONCLUSIVE, Status.PASS)]
        print(f"| {name} | {sum(counts)} | {' | '.join(map(str, counts))} | {', '.join(sorted(fields))} |", flush=True)


if __name__ == "__main__":
    main()
