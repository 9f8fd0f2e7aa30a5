"""Results of trainings with TRL and sentence-transformers, by version.

They are the second table of docs/capture.md.

    python -m tests.support.package_rows --write                          # the installed versions
    PYTHONPATH=<folder with an older version>:. python -m tests.support.package_rows --write --stamps trl   # one package, no attack

A column is filled by the version that is installed; those of other versions stay as they are on the page.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.support.spy import Configuration, read_by_span, row_of

PAGE = Path(__file__).parents[2] / "docs" / "capture.md"

RUNS = {"trl": "trl_runs", "sentence-transformers": "sentence_runs"}
"""Package -> module with its configurations."""

Cells = dict[tuple[str, str], str]
"""(configuration, version) -> what came of it."""


def installed(package: str) -> str | None:
    """Return the version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def runs_of(package: str) -> Sequence[Configuration]:
    """Return the configurations of a package."""
    found: Sequence[Configuration] = importlib.import_module(f"tests.support.{RUNS[package]}").ALL
    return found


def cell(case: Configuration, *, read: bool = True) -> str:
    """Train a configuration twice; return its stamp and what `span` reads.

    That is the number of texts of the last kept step that `span` reads word by word.

    Args:
        case: the configuration.
        read: whether the attack is run.

    Raises:
        AssertionError: training is not the same with the audit, or something is wrong in a step that may be scored.
    """
    with tempfile.TemporaryDirectory() as folder:
        row = row_of(case, Path(folder))
        assert row.same_training and not row.wrong, row.line()
        if not row.kept or not read:
            return row.stamp
        snapshot = row.snapshots[max(row.snapshots)]
        found = read_by_span(snapshot)
    return row.stamp if found is None else f"{row.stamp}, {found[0]} of {found[1]} read"


def marks(package: str) -> tuple[str, str]:
    """Return what stands before and after the table of a package on the page."""
    return f"<!-- {package}: begin -->", f"<!-- {package}: end -->"


def on_page(package: str) -> Cells:
    """Return the cells that the page shows for a package."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = marks(package)
    lines = text[text.index(begin) : text.index(end)].splitlines()[1:]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    if not rows:
        return {}
    versions = [head.removeprefix(f"{package} ") for head in rows[0][1:]]
    return {(row[0], number): found for row in rows[2:] for number, found in zip(versions, row[1:], strict=True)}


def table(package: str, cells: Cells) -> str:
    """Return the table of a package, the newest version first."""
    versions = sorted({number for _, number in cells}, key=_numbers, reverse=True)
    head = f"| | {' | '.join(f'{package} {number}' for number in versions)} |"
    lines = [head, f"| --- |{' --- |' * len(versions)}"]
    for case in runs_of(package):
        found = " | ".join(cells.get((case.name, number), "untested") for number in versions)
        lines.append(f"| {case.name} | {found} |")
    return "\n".join(lines)


def _numbers(number: str) -> list[int]:
    return [int(part) for part in number.split(".") if part.isdigit()]


def tables(packages: Sequence[str], *, read: bool) -> dict[str, str]:
    """Return the table of each installed package, its version's column updated."""
    found = {}
    for package in packages:
        number = installed(package)
        if number is not None:
            cells = on_page(package) | {(case.name, number): cell(case, read=read) for case in runs_of(package)}
            found[package] = table(package, cells)
    return found


def write(found: dict[str, str]) -> None:
    """Put tables into the page."""
    for package, lines in found.items():
        text = PAGE.read_text(encoding="utf-8")
        begin, end = marks(package)
        before, after = text[: text.index(begin)], text[text.index(end) :]
        PAGE.write_text(f"{before}{begin}\n{lines}\n{after}", encoding="utf-8")


def main() -> None:
    """Print the tables, and write them where the arguments say so."""
    logging.disable(logging.ERROR)
    gc.freeze()
    named = [package for package in RUNS if package in sys.argv]
    found = tables(named or list(RUNS), read="--stamps" not in sys.argv)
    print("\n\n".join(found.values()))
    if "--write" in sys.argv:
        write(found)


if __name__ == "__main__":
    main()
