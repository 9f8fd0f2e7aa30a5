"""Runs configurations of an outside tester and prints a line for each.

python -m tests.support.outside trl            # every configuration of `trl_runs.py`
python -m tests.support.outside trl GRPO LoRA  # those with one of these words in their name
"""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
import time
from pathlib import Path

from tests.support.spy import HEAD, row_of


def main() -> None:
    """Run what the arguments name."""
    module, *words = sys.argv[1:]
    runs = importlib.import_module(f"tests.support.{module}_runs")
    logging.getLogger().addHandler(logging.NullHandler())
    print(HEAD)
    for case in runs.ALL:
        if words and not any(word in case.name for word in words):
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = row_of(case, Path(folder))
            except Exception as error:
                print(f"{case.name} | FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
                if "-x" in words:
                    raise
                continue
        print(row.line(), f"({time.perf_counter() - start:.1f} s)", flush=True)
        if row.stamp in ("refused", "none kept") or "mismatch" in row.stamp:
            print("   said:", *list(dict.fromkeys(row.said))[:3], sep="\n      ", flush=True)


if __name__ == "__main__":
    main()
