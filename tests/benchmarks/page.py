"""Writes what a benchmark prints as a page of docs/measurements.

    python -m tests.benchmarks.page docs/measurements/span.md --section "CoLA, dropout off" -- \
        tests.benchmarks.span --data dev.jsonl --sentences 48 --frozen-only --modes eval

A page has one section for each run of a benchmark. Each section begins with the command, the commit, the date, the seeds, the numbers n of
its rows, the versions and the load of the machine. A section of the same name is replaced; the text outside these sections stays.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


class _Tee:
    """Writes to a stream and keeps what was written."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        """Return everything else of the stream: libraries ask for `isatty` and `encoding`."""
        return getattr(self._stream, name)


@dataclass(frozen=True)
class Facts:
    """What must be known of a measurement to repeat it."""

    command: str
    commit: str
    date: str
    seeds: str
    n: str
    versions: str
    machine: str

    def lines(self) -> str:
        """Return one line a fact."""
        return "\n".join(f"{name}: {value}" for name, value in vars(self).items())


def section(title: str, facts: Facts, printed: str) -> str:
    """Return a section between its marks, with its facts as front matter."""
    return f"<!-- measured: {title} -->\n\n## {title}\n\n```\n{facts.lines()}\n```\n\n{printed.strip()}\n\n<!-- end: {title} -->"


def with_section(page: str, title: str, written: str) -> str:
    """Return a page with a section replaced, or appended if it has none."""
    marks = re.compile(rf"<!-- measured: {re.escape(title)} -->.*?<!-- end: {re.escape(title)} -->", re.DOTALL)
    if marks.search(page):
        return marks.sub(lambda _: written, page)
    return f"{page.rstrip()}\n\n{written}\n".lstrip()


def numbers_of_rows(printed: str) -> str:
    """Return the distinct values of a table's column n, in order.

    >>> numbers_of_rows("| B | n |\\n| --- | --- |\\n| 1 | 48 |\\n| 8 | 36 |\\n")
    '48, 36'
    """
    found: dict[str, None] = {}
    column: int | None = None
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.strip().startswith("|") else []
        if "n" in cells:
            column = cells.index("n")
        elif column is not None and column < len(cells) and cells[column].isdigit():
            found[cells[column]] = None
    return ", ".join(found) or "see the text"


def facts_of(module: str, arguments: list[str], printed: str) -> Facts:
    """Return the facts of a run that has just ended."""
    seeds = re.search(r"seeds? \[?([\d, ]+)\]?", printed)
    return Facts(
        command=f"python -m {module} {shlex.join(_without_folders(arguments))}".strip(),
        commit=(_git("rev-parse", "--short", "HEAD") or "unknown")
        + (" and changes" if _git("status", "--porcelain", "-uno") else ""),
        date=datetime.now(UTC).date().isoformat(),
        seeds=seeds[1].strip() if seeds else "see the command",
        n=numbers_of_rows(printed),
        versions=", ".join(f"{name} {version(name)}" for name in ("torch", "transformers")),
        machine=f"{os.cpu_count()} CPU cores, load {os.getloadavg()[1]:.1f} over 5 minutes",
    )


def _without_folders(arguments: list[str]) -> list[str]:
    """Return arguments with absolute paths cut to their last two parts."""
    return ["/".join(Path(word).parts[-2:]) if Path(word).is_absolute() else word for word in arguments]


def _git(*words: str) -> str:
    """Return what git prints; empty in a copy without its repository."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def main() -> None:
    """Run the benchmark and write its section."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--section", required=True, help="title of the section that is written or replaced")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:at])
    if not sys.argv[at + 1 :]:
        parser.error("give the benchmark after `--`: -- tests.benchmarks.span --data FILE")
    module, *arguments = sys.argv[at + 1 :]
    tee = _Tee(sys.stdout)
    sys.argv = [module, *arguments]
    ended: SystemExit | None = None
    with redirect_stdout(tee):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as error:
            ended = error
    if ended is not None and not tee.text:
        raise ended  # nothing was measured
    page = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
    written = section(options.section, facts_of(module, arguments, tee.text), tee.text)
    options.page.write_text(with_section(page, options.section, written), encoding="utf-8")
    if ended is not None:
        raise ended


if __name__ == "__main__":
    main()
