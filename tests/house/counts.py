"""Counts of the house: what a newcomer meets in its folders.

python -m tests.house.counts            # the counts
python -m tests.house.counts --list     # and where they come from
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.house.imports import imports

ROOT = Path(__file__).parents[2]
SHIPPED = ("leakaudit", "callbacks", "reports")
PLUGIN_FOLDERS = ("attacks", "defenses", "metrics", "priors")
REGISTERS = ("attack", "defense", "metric", "prior")

LONGEST_CLASS = 250
"""Lines of a class. Source: the issue that drew the house."""
LONGEST_MODULE = 400
LONGEST_FUNCTION = 40
WIDEST_FIRST_LINE = 80
"""Columns of the first line of a docstring."""


@dataclass(frozen=True)
class Finding:
    """One place that a count counts."""

    kind: str
    place: str

    def __str__(self) -> str:
        """Return the kind and the place."""
        return f"{self.kind}: {self.place}"


def findings(folders: tuple[str, ...] = SHIPPED) -> Iterator[Finding]:
    """Yield what is too long, too wide or out of place in these top-level folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part.is_symlink() for part in (path, *path.parents)):
                yield from _of_module(path)


def _of_module(path: Path) -> Iterator[Finding]:
    source = path.read_text(encoding="utf-8")
    where = path.relative_to(ROOT).as_posix()
    tree = ast.parse(source)
    if source.count("\n") > LONGEST_MODULE:
        yield Finding("module over 400 lines", f"{where} ({source.count(chr(10))})")
    if path.parent.name in PLUGIN_FOLDERS and path.parent.parent.name == "leakaudit" and path.stem != "__init__":
        registered = sum(_registers(node) for node in tree.body)
        if registered != 1:
            yield Finding("file in a plugin folder that is not one plugin", f"{where} (registers {registered})")
    for node in ast.walk(tree):
        yield from findings_of_node(node, where)


def _registers(node: ast.stmt) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    calls = [d.func for d in node.decorator_list if isinstance(d, ast.Call)]
    return any(isinstance(call, ast.Name) and call.id in REGISTERS for call in calls)


def findings_of_node(node: ast.AST, where: str) -> Iterator[Finding]:
    """Yield what is too long, too wide or private in one node of a module."""
    if isinstance(node, ast.ClassDef) and _length(node) > LONGEST_CLASS:
        yield Finding("class over 250 lines", f"{where}:{node.lineno} {node.name} ({_length(node)})")
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) > LONGEST_FUNCTION:
        yield Finding("function over 40 lines", f"{where}:{node.lineno} {node.name} ({_length(node)})")
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        first = (ast.get_docstring(node) or "").partition("\n")[0]
        if len(first) > WIDEST_FIRST_LINE:
            yield Finding(
                "docstring first line over 80 columns", f"{where}:{getattr(node, 'lineno', 1)} ({len(first)})"
            )
    if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "leakaudit":
        for alias in node.names:
            if alias.name.startswith("_") and not alias.name.startswith("__"):
                yield Finding("private name across modules", f"{where}:{node.lineno} {alias.name}")


def docstring_of(place: str) -> str:
    """Return the docstring of a module, by its path from the root."""
    return ast.get_docstring(ast.parse((ROOT / place).read_text(encoding="utf-8"))) or ""


def _length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return int(node.end_lineno or node.lineno) - node.lineno + 1


KINDS = (
    "file in a plugin folder that is not one plugin",
    "private name across modules",
    "class over 250 lines",
    "module over 400 lines",
    "function over 40 lines",
    "docstring first line over 80 columns",
)


def rooms() -> tuple[list[str], list[str]]:
    """Return the packages and the single modules in the root of the package."""
    inside = sorted((ROOT / "leakaudit").iterdir())
    packages = [path.name for path in inside if (path / "__init__.py").exists()]
    modules = [path.name for path in inside if path.suffix == ".py"]
    return packages, modules


def circle() -> list[str]:
    """Return rooms that import each other in a circle; empty where there is none."""
    arrows: dict[str, set[str]] = {}
    for found in imports():
        here, there = found.importer.split(".")[1:2], found.target.split(".")[1:2]
        if found.target.startswith("leakaudit.") and here and here != there:
            arrows.setdefault(here[0], set()).add(there[0])
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every place, too")
    listed = parser.parse_args().list
    packages, modules = rooms()
    print(f"{len(packages):6} rooms in the root: {', '.join(packages)}")
    print(f"{len(modules):6} modules in the root: {', '.join(modules)}")
    print(f"{len(circle()):6} rooms in a circle of imports {' -> '.join(circle())}")
    for folders in (SHIPPED, ("tests",)):
        found = list(findings(folders))
        print(f"\n{' '.join(folders)}:")
        for kind in KINDS:
            mine = [finding for finding in found if finding.kind == kind]
            print(f"{len(mine):6} {kind}")
            for finding in mine if listed else ():
                print(f"         {finding.place}")


if __name__ == "__main__":
    main()
