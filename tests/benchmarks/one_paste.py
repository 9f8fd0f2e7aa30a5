"""Runs README's blocks of "One paste", each in an environment of its own.

The block's first line alone makes that environment.

    python -m tests.benchmarks.one_paste                    # all seven; about half an hour, most of it pip
    python -m tests.benchmarks.one_paste --stacks TRL torch

Each row is one run (n = 1) of a small program around the block: lines of code that are pasted, megabytes (10^6 bytes) of the environment,
seconds of `pip install` (which depend on the network), seconds from the start of the program to its verdict, stamps of the kept steps,
and the verdict. Nothing is granted to the attacks; the policy is the built-in one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.policy import default_policy
from leakaudit.results.files import load_results
from tests.support.one_paste import ROOT, STACKS, pastes

LIMIT_SECONDS = 1800
"""Most seconds that one command may take."""
TORCH = "torch"
"""Comes first and alone, so that no other requirement pulls another build of it."""


@dataclass(frozen=True)
class Row:
    """What one block needed, and what it led to."""

    stack: str
    lines: int
    megabytes: float
    install_seconds: float
    run_seconds: float
    stamps: dict[str, int]
    verdict: str

    def __str__(self) -> str:
        """Return the row of the table."""
        stamps = ", ".join(f"{n} {stamp}" for stamp, n in self.stamps.items())
        return (
            f"| {self.stack} | {self.lines} | {self.megabytes:.0f} | {self.install_seconds:.0f} | {self.run_seconds:.0f} "
            f"| {stamps} | {self.verdict} |"
        )


def built_wheel(folder: Path) -> Path:
    """Build leakaudit's wheel into a folder."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("leakaudit", "callbacks", "reports"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    _ran(folder, {}, sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source))
    [wheel] = folder.glob("*.whl")
    return wheel


def run(stack: str, wheel: Path, folder: Path) -> Row:
    """Install what a block says, run the program of its user, and read its verdict.

    Args:
        stack: name in README.
        wheel: leakaudit's own, in place of the one in a package index.
        folder: an empty one, for environment and program.
    """
    [paste] = (one for one in pastes() if one.stack == stack)
    python = folder / "venv" / "bin" / "python"
    _ran(folder, {}, sys.executable, "-m", "venv", str(folder / "venv"))
    begin = time.perf_counter()
    # What was tested together; axolotl asks for exact versions of its own.
    tested = [] if stack == "axolotl" else ["--constraint", str(ROOT / "constraints.txt")]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    ours = [_at(one, wheel) for one in paste.requirements]
    _ran(folder, {}, *pip, "--constraint", str(ROOT / "constraints.txt"), TORCH)
    _ran(folder, {}, *pip, *tested, *ours)
    installed = time.perf_counter() - begin
    program = folder / "program"
    program.mkdir()
    paste.write(program, folder / "audits")
    begin = time.perf_counter()
    for words in _commands(stack):
        _ran(program, {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}, str(python), *words)
    audits = sorted(path.parent for home in (program, folder / "audits") for path in home.rglob("results.json"))
    assert len(audits) == 1, f"{stack}: {len(audits)} audits"
    results = load_results(audits[0])
    ended = time.perf_counter() - begin
    assert (audits[0] / "report.html").is_file(), f"{stack}: no report"
    return Row(
        stack,
        paste.lines,
        _bytes(folder / "venv") / 1e6,
        installed,
        ended,
        dict(Counter(step.verification.status.value for step in results.steps)),
        evaluate(results, default_policy(), now=datetime.now(UTC)).verdict.value,
    )


def _at(requirement: str, wheel: Path) -> str:
    """Return a requirement with the wheel in place of the name leakaudit."""
    name, bracket, extra = requirement.partition("[")
    return f"{name}{bracket}{extra} @ {wheel.as_uri()}" if name == "leakaudit" else requirement


def _commands(stack: str) -> list[list[str]]:
    """Return what the user types, one list of arguments of Python after another."""
    if stack == "axolotl":
        prepare = "import json, pathlib, small; small.save(pathlib.Path('base')); "
        prepare += (
            "pathlib.Path('notes.jsonl').write_text(''.join(json.dumps({'text': one}) + '\\n' for one in small.TEXTS))"
        )
        return [["-c", prepare], ["-m", "axolotl.cli.train", "axolotl.yaml"]]
    ends = [["-m", "leakaudit", "worker", "leakaudit-audit/client-0"]] if stack == "Flower" else []
    return [["main.py"], *ends]


def _ran(folder: Path, more: dict[str, str], *words: str) -> None:
    """Run a command in a folder; nothing of this checkout is on its path."""
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "FLWR_TELEMETRY_ENABLED": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet | more
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"{words[:6]} ended with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", nargs="+", choices=list(STACKS), default=list(STACKS))
    options = parser.parse_args()
    print(
        "| stack | lines | MB | s to install | s to a verdict | steps | verdict |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    with tempfile.TemporaryDirectory() as base:
        wheel = built_wheel(Path(base))
        for number, stack in enumerate(options.stacks):
            folder = Path(base, str(number))
            folder.mkdir()
            print(run(stack, wheel, folder), flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
