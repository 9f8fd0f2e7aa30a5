"""Table of steps that a GPU trained and attacked, against the CPU.

    make gpu                                       # writes docs/measurements/gpu.md
    LEAKAUDIT_GPU_TESTS_DEVICE=cpu LEAKAUDIT_GPU_TESTS_STEPS=3 python -m tests.benchmarks.gpu    # tries it out on a CPU

It runs `tests/gpu` with the interpreter that it was called with, and nothing from the network; it first says what is missing. After
`BUDGET_S` seconds no further test begins, so that all of it takes at most eight minutes.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

BUDGET_S = 360.0
"""Seconds after which no further test begins."""

MOST_S = 110
"""Most seconds of one test, where pytest-timeout is installed; 360 and 110 seconds leave ten of eight minutes for the page."""

ORDER = ("side_process", "capture", "quantised", "large", "speed", "families")
"""Files of tests, in the order in which they run: what was never tried first."""

STRICT = ("torch", "transformers", "pytest")
"""Packages that cannot be older than what is asked for. An older version of another package is tried."""

NOT_NEEDED = ("accelerate",)
"""Dependencies whose tests are skipped without them."""


# ---------------------------------------------------------------------- what is missing


def problems(installed: Mapping[str, str | None], required: Mapping[str, str]) -> list[str]:
    """Return one sentence for each package that is missing or too old.

    Args:
        installed: package -> version; None where it is missing.
        required: package -> oldest version.

    >>> problems({"torch": None, "transformers": "4.57.1"}, {"torch": "2.6", "transformers": "5.0"})
    ['torch is missing, and 2.6 or newer is needed', 'transformers is 4.57.1, and 5.0 or newer is needed']
    """
    found = []
    for name, oldest in required.items():
        have = installed.get(name)
        if have is None:
            found.append(f"{name} is missing, and {oldest} or newer is needed")
        elif name in STRICT and _numbers(have) < _numbers(oldest):
            found.append(f"{name} is {have}, and {oldest} or newer is needed")
    return found


def required() -> dict[str, str]:
    """Return package -> oldest version of what the tests need."""
    import tomllib  # from Python 3.11 on, which is asked for before

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pairs = [
        re.match(r"([\w.-]+)>=([\d.]+)", line)
        for line in (*project["dependencies"], *project["optional-dependencies"]["audit"], "pytest>=8.0")
    ]
    return {pair[1]: pair[2] for pair in pairs if pair is not None and pair[1] not in NOT_NEEDED}


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, such as (2, 6, 0) of 2.6.0+cu124."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text)[0]))


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def why_not() -> str:
    """Return what is missing and what to type; empty if the tests can run."""
    if sys.version_info < (3, 11):  # noqa: UP036 (another machine's interpreter, before anything newer is imported)
        return f"this is Python {sys.version.split()[0]}, and 3.11 or newer is needed: make gpu GPU_PYTHON=python3.12"
    needed = required()
    missing = problems({name: _installed(name) for name in needed}, needed)
    if missing:
        wanted = " ".join(f"'{line.split()[0]}>={needed[line.split()[0]]}'" for line in missing)
        return (
            f"the tests for a GPU cannot run with {sys.executable}: {'; '.join(missing)}. Type: {sys.executable} -m pip install {wanted}; without a "
            "network, install wheels brought along (pip install --no-index --no-deps --target FOLDER *.whl) and set PYTHONPATH=FOLDER"
        )
    import torch

    if os.environ.get("LEAKAUDIT_GPU_TESTS_DEVICE", "cuda") != "cpu" and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES, and take a torch that was built for "
            "CUDA. To try the tests on a CPU: LEAKAUDIT_GPU_TESTS_DEVICE=cpu LEAKAUDIT_GPU_TESTS_STEPS=3 python3 -m tests.benchmarks.gpu"
        )
    return ""


# ---------------------------------------------------------------------- the run


class _Run:
    """Plugin of pytest that ends the run in time, and counts."""

    def __init__(self, clock: Any = time.monotonic) -> None:
        self._clock, self._begin = clock, clock()
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failed: list[str] = []
        self.left_out = 0

    def pytest_runtest_setup(self, item: Any) -> None:
        import pytest

        if self._clock() - self._begin > BUDGET_S:
            self.left_out += 1
            pytest.skip(f"{BUDGET_S:.0f} seconds are over")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            if report.outcome == "failed":
                self.failed.append(report.nodeid.rpartition("::")[2])


def arguments(*, has_timeout: bool) -> list[str]:
    """Return the arguments of pytest, for a machine whose packages are not ours.

    Warnings of other versions are no errors there, and pytest-timeout may be missing.
    """
    files = [f"tests/gpu/test_{name}.py" for name in ORDER]
    plain = [*files, "-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    if has_timeout:
        return [*plain, f"--timeout={MOST_S}"]
    unknown = ["-o", "required_plugins=", "-W", "ignore::pytest.PytestConfigWarning"]
    return [*plain, "-o", "addopts=--import-mode=importlib --strict-markers", *unknown]


def run() -> int:
    """Run the tests and print what they measured; return pytest's exit status."""
    import pytest
    import torch

    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, str(ROOT))
    ran = _Run()
    from contextlib import redirect_stdout

    with redirect_stdout(sys.stderr):  # the page gets the table only
        code = int(pytest.main(arguments(has_timeout=find_spec("pytest_timeout") is not None), plugins=[ran]))
    from tests.gpu.record import DEVICE, MEASURED, SEED, STEPS

    name = torch.cuda.get_device_name() if DEVICE != "cpu" else "a CPU, only to try the tests out"
    print(f"Device: {name}; torch {torch.__version__}; seed {SEED}; {STEPS} steps a training, batches of two texts.")
    counts = ", ".join(f"{number} {word}" for word, number in ran.counts.items())
    late = f", {ran.left_out} of them because {BUDGET_S:.0f} s were over" if ran.left_out else ""
    print(f"Tests: {counts}{late}.{' Failed: ' + ', '.join(ran.failed) + '.' if ran.failed else ''}\n")
    print("\n".join(table(MEASURED.families)))
    print("".join(f"\n{note}\n" for note in MEASURED.notes))
    return code


def table(rows: Any) -> list[str]:
    """Return a Markdown table with a line for each family and precision."""
    lines = [
        "| family | precision | n | verified, GPU / CPU | largest relative error, GPU / CPU | texts found, GPU / CPU | of | s an attack, GPU / CPU |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = (
            row.family,
            row.precision,
            row.n,
            "{} / {}".format(*row.verified),
            "{:.1e} / {:.1e}".format(*row.error),
            "{} / {}".format(*row.found) if row.texts else "-",
            row.texts or "-",
            "{:.2f} / {:.2f}".format(*row.seconds) if any(row.seconds) else "-",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    """Say what is missing, or run the tests and print the page."""
    if reason := why_not():
        print(reason, file=sys.stderr)
        raise SystemExit(2)
    if "--check" not in sys.argv:
        raise SystemExit(run())


if __name__ == "__main__":
    main()
