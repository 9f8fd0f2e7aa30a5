"""The wheel: every package, both links, one name, all templates."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = {"leakaudit/callbacks": "../callbacks", "leakaudit/reports": "../reports"}
NOT_SHIPPED = ("tests", "examples", "build", "dist")

BUILDS = 77
"""Oldest setuptools that understands our licence fields (`[build-system] requires`)."""


def _shipped() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages: list[str] = project["tool"]["setuptools"]["packages"]
    return packages


def _folders() -> set[str]:
    """Return the import name of every folder with an `__init__.py`.

    Linked folders have their linked name.
    """
    found = set()
    tops = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in NOT_SHIPPED and path.name[0] != "."]
    for path in (init for top in tops for init in top.glob("**/__init__.py")):
        parts = path.parent.relative_to(ROOT).parts
        found.add(".".join(parts if parts[0] == "leakaudit" else ("leakaudit", *parts)))
    return found


def test_every_folder_with_an_init_is_shipped() -> None:
    """A package that is missing from `packages` is silently missing from the wheel."""
    shipped = _shipped()
    forgotten = sorted(_folders() - set(shipped))
    assert not forgotten, f"add to [tool.setuptools] packages in pyproject.toml: {', '.join(forgotten)}"
    gone = [name for name in shipped if not any((ROOT / part).is_dir() for part in _places(name))]
    assert not gone, f"[tool.setuptools] packages names folders that do not exist: {', '.join(gone)}"


def _places(package: str) -> tuple[str, str]:
    """Return where a package may lie: under leakaudit, or beside it."""
    path = package.replace(".", "/")
    return path, path.removeprefix("leakaudit/")


@pytest.mark.parametrize(("link", "target"), LINKS.items())
def test_the_links_give_a_checkout_the_shape_of_the_wheel(link: str, target: str) -> None:
    """Without them `python -c` from the root finds no callbacks and no reports."""
    path = ROOT / link
    cure = f"{link} is no link to {target}: run `ln -sfn {target} {link}` (on Windows: enable core.symlinks, check it out again)"
    assert path.is_symlink() and path.readlink() == Path(target), cure
    assert path.resolve() == ROOT / Path(link).name and path.is_dir(), cure


def test_git_keeps_the_links_as_links() -> None:
    """A checkout on a machine without links may commit them as text files."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git checkout")
    listed = subprocess.run(["git", "ls-files", "-s", *LINKS], cwd=ROOT, capture_output=True, text=True, check=True)
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.stdout.splitlines()}
    assert modes == dict.fromkeys(LINKS, "120000")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Build a wheel from a clean copy, without a network, and return the names in it."""
    try:
        found = version("setuptools")
    except PackageNotFoundError:
        pytest.skip("setuptools is not installed, so no wheel can be built without a network")
    if int(found.split(".")[0]) < BUILDS:
        pytest.skip(f"setuptools {found} is older than {BUILDS}, which the build asks for")
    copy = tmp_path_factory.mktemp("copy") / "leakaudit"
    kept = ("pyproject.toml", "README.md", "LICENSE", "leakaudit", "callbacks", "reports")
    copy.mkdir()
    for name in kept:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    build = "import setuptools.build_meta as b; print(b.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return archive.namelist()


def test_a_wheel_has_one_name_at_its_top(wheel: list[str]) -> None:
    """A second one (`callbacks`, `reports`, `tests`) would shadow a user's own module."""
    tops = {name.split("/")[0] for name in wheel if ".dist-info/" not in name}
    assert tops == {"leakaudit"}


def test_a_wheel_holds_every_module_and_template_of_the_checkout(wheel: list[str]) -> None:
    """It has both linked folders, the templates and the marker of typed packages."""
    inside = [
        *(ROOT / "leakaudit").rglob("*"),
        *(ROOT / "reports" / "templates").rglob("*"),
    ]
    names = set()
    for path in inside:
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and "__pycache__" not in name:
            names.add(name if name.startswith("leakaudit/") else f"leakaudit/{name}")
    for folder in ("callbacks", "reports"):
        names |= {f"leakaudit/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    expected = {
        name for name in names if not name.endswith(".md")
    }  # READMEs of the folders are for readers of the source
    assert "leakaudit/reports/templates/report.html.j2" in expected
    assert expected == {name for name in wheel if ".dist-info/" not in name}
