"""Exit codes: one enum names them all, so that a number means one thing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from leakaudit.exit_codes import EXPLAINED, STOPPED, ExitCode
from leakaudit.gate.verdict import Status

ROOT = Path(__file__).parents[2]
FOLDERS = ("leakaudit", "callbacks", "reports")


def _bare_exits(source: str) -> Iterator[int]:
    """Yield the line of every exit with a bare number.

    That is `exit(4)`, `sys.exit(4)` and `os._exit(4)`, in a condition as well.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            values = [part for given in node.args for part in ast.walk(given) if isinstance(part, ast.Constant)]
            if called in ("exit", "_exit") and any(type(part.value) is int for part in values):
                yield node.lineno


def test_no_module_ends_with_a_bare_number() -> None:
    """A number in the source could mean something else than the enum says."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in _bare_exits(path.read_text("utf-8"))]
    assert not found, f"write a member of leakaudit.exit_codes.ExitCode: {', '.join(found)}"


def test_the_walker_sees_bare_numbers() -> None:
    """A walker that misses some form would pass everything."""
    source = "sys.exit(4)\nexit(0 if fine else code)\nos._exit(1)\nsys.exit(code)\ncontext.exit(3)\n"
    assert list(_bare_exits(source)) == [1, 2, 3, 5]


def test_the_numbers_are_a_promise() -> None:
    """Pipelines compare with them."""
    assert {code.name: code.value for code in ExitCode} == {
        "PASS": 0,
        "CRASH": 1,
        "USAGE": 2,
        "FAIL": 3,
        "INCONCLUSIVE": 4,
        "ERROR": 5,
        "ORPHANED": 6,
        "BUSY": 7,
        "TIME_LIMIT": 124,
        "INTERRUPTED": 130,
    }


def test_every_status_has_its_code() -> None:
    """A verdict and its exit code have the same name."""
    assert {status: status.exit_code.name for status in Status} == {status: status.name for status in Status}


def test_the_page_has_the_table_of_the_command() -> None:
    """Page and command say the same of each code."""
    rows = [f"| {code.value} | {code.name} | {text.what} | {text.do} |" for code, text in EXPLAINED.items()]
    rows.append(f"| 129 to 192 | | {STOPPED.what} | {STOPPED.do} |")
    page = (ROOT / "docs" / "exit_codes.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.startswith("| ")][2:] == rows
