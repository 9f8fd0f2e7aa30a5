"""Reads every import of the package from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


FACE = "leakaudit.plugins"
"""The package that gives plugin authors names from other modules: whoever takes one there imports it from its home."""


@dataclass(frozen=True)
class Import:
    """One import statement: who, what, where."""

    importer: str
    target: str
    """Module that is imported."""
    name: str | None
    """Name that is taken from it; None for `import target`."""
    file: Path
    line: int
    late: bool
    """Inside a function."""
    typing_only: bool
    """Under `if TYPE_CHECKING`."""

    def __str__(self) -> str:
        """Return file, line and statement."""
        what = f"from {self.target} import {self.name}" if self.name else f"import {self.target}"
        return f"{self.file.relative_to(ROOT)}:{self.line}: {what}"


@cache
def modules() -> dict[str, Path]:
    """Return module name -> file, for every module, through the two links."""
    found = {}
    for path in python_files(ROOT / "leakaudit"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a folder; unlike `rglob`, this follows links."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from python_files(path)
        elif path.suffix == ".py":
            yield path


@cache
def face() -> dict[str, str]:
    """Return the names that the face gives to plugin authors, and the module of each."""
    tree = ast.parse(modules()[FACE].read_text(encoding="utf-8"))
    (only_typed,) = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {a.name: str(n.module) for n in only_typed.body if isinstance(n, ast.ImportFrom) for a in n.names}


@cache
def imports() -> tuple[Import, ...]:
    """Return every import statement of the package."""
    return tuple(
        found
        for module, path in modules().items()
        for found in imports_of(path.read_text(encoding="utf-8"), module, path, frozenset(modules()))
    )


def imports_of(source: str, importer: str, file: Path, known: frozenset[str]) -> list[Import]:
    """Return the imports of a source.

    Imports inside functions count, and so does `import_module("...")` with a constant.
    """
    walker = _Walker(importer, file, known)
    walker.visit(ast.parse(source))
    return walker.found


class _Walker(ast.NodeVisitor):
    """Collects imports, and where each stands."""

    def __init__(self, importer: str, file: Path, known: frozenset[str]) -> None:
        self.found: list[Import] = []
        self._importer, self._file, self._known = importer, file, known
        self._late = self._typing_only = False

    def _add(self, target: str, name: str | None, line: int) -> None:
        self.found.append(Import(self._importer, target, name, self._file, line, self._late, self._typing_only))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, None, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, f"{self._file}:{node.lineno}: relative import"
        for alias in node.names:
            below = f"{node.module}.{alias.name}"
            home = face().get(alias.name, str(node.module)) if node.module == FACE else str(node.module)
            target, name = (below, None) if below in self._known else (home, alias.name)
            self._add(target, name, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self._add(str(node.args[0].value), None, node.lineno)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        with self._inside(typing_only="TYPE_CHECKING" in ast.dump(node.test)):
            for statement in node.body:
                self.visit(statement)
        for statement in node.orelse:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        with self._inside(late=True):
            self.generic_visit(node)

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    @contextmanager
    def _inside(self, *, late: bool = False, typing_only: bool = False) -> Iterator[None]:
        before = self._late, self._typing_only
        self._late, self._typing_only = before[0] or late, before[1] or typing_only
        yield
        self._late, self._typing_only = before
