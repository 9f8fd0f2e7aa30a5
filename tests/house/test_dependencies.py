"""Every import of the package is of a declared dependency."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from tests.house.imports import ROOT, imports

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    """Return the names of distributions in requirements, in their normal form."""
    return {normal(re.split(r"[\[<>=!~; ]", one, maxsplit=1)[0]) for one in requirements}


def normal(name: str) -> str:
    """Return the normal form of a distribution's name, as PEP 503 has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def imported() -> dict[str, bool]:
    """Return each outside package that is imported -> whether always late."""
    found: dict[str, bool] = {}
    for one in imports():
        top = one.target.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("leakaudit", "__future__") and not one.typing_only:
            found[top] = found.get(top, True) and one.late
    return found


def test_every_import_is_declared() -> None:
    """As a dependency or in an extra: nothing comes by way of another package."""
    declared = names(PROJECT["dependencies"]).union(*map(names, PROJECT["optional-dependencies"].values()))
    known = packages_distributions()
    found = imported()
    assert {"torch", "pydantic", "numpy"} <= set(found)
    lacking = {top: known.get(top, [top]) for top in found if not declared & set(map(normal, known.get(top, [top])))}
    assert not lacking
