"""Compares twelve trainings in two environments.

    python -m tests.compat.compare LOWEST/bin/python HIGHEST/bin/python

It prints the versions, and what each training led to; it ends with 1 if the environments disagree, or if a step was not verified.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(python: str) -> dict[str, Any]:
    """Return what the trainings led to with one interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "found.json"
        words = [python, "-m", "tests.compat.configurations", str(target)]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{python} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return found


def main(pythons: list[str]) -> int:
    """Run both, print a table, and return the exit code."""
    begin = time.perf_counter()
    lowest, highest = (run(python) for python in pythons)
    print("| library | lowest | highest |\n| --- | --- | --- |")
    for name, version in lowest["versions"].items():
        print(f"| {name} | {version} | {highest['versions'][name]} |")
    print("\n| training | lowest | highest |\n| --- | --- | --- |")
    for name, found in lowest["found"].items():
        print(f"| {name} | {in_words(found)} | {in_words(highest['found'][name])} |")
    same = lowest["found"] == highest["found"]
    verified = all(one["stamps"] == ["verified"] for one in lowest["found"].values())
    print(
        f"\nn: {len(lowest['found'])} trainings in each environment, {time.perf_counter() - begin:.0f} s; {'the same' if same else 'NOT the same'}."
    )
    return 0 if same and verified else 1


def in_words(found: dict[str, Any]) -> str:
    """Return what one training led to."""
    stamps = ", ".join(found["stamps"])
    if "gate" in found:
        return f"{stamps}; gate exits with {found['gate']}, report with {found['report']}"
    read = found["read"]
    return f"{found['steps']} steps {stamps}; " + (
        "span does not apply" if read is None else f"{read[0]} of {read[1]} texts read"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
