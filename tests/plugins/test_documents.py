"""The plugins that the documents print, run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("attacks", "defenses", "metrics", "priors")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PRELUDE = """
import importlib, pathlib, sys
import leakaudit

scratch = pathlib.Path.cwd()
for folder in ("attacks", "defenses", "metrics", "priors"):
    importlib.import_module(f"leakaudit.{folder}").__path__.append(str(scratch / "leakaudit" / folder))
"""
"""Makes the plugin folders hold what the scratch folder holds, as if the files stood there."""

CHECK = """
from leakaudit import registry
from leakaudit.plugins import testing

checks = {"attack": testing.check_attack, "defense": testing.check_defense, "metric": testing.check_metric, "prior": testing.check_prior}
for folder in ("attacks", "defenses", "metrics", "priors"):
    plugins = getattr(registry, folder)
    plugins.names()
    for file in (scratch / "leakaudit" / folder).glob("*.py"):
        (name,) = plugins.registered_in(f"leakaudit.{folder}.{file.stem}")
        checks[plugins.kind](plugins[name])
        print(folder, name, plugins[name].__name__)
"""


def _blocks(document: str) -> list[str]:
    return BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the plugin of each README to the place that its first line names."""
    folder = tmp_path_factory.mktemp("scratch")
    for kind in FOLDERS:
        (block,) = _blocks(f"leakaudit/{kind}/README.md")
        place = folder / block.partition("\n")[0].removeprefix("# ")
        place.parent.mkdir(parents=True)
        place.write_text(block, encoding="utf-8")
    return folder


def _run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_plugin_of_each_readme_is_found_and_keeps_its_promises(scratch: Path) -> None:
    """The file is all that it takes: nothing imports it but the registry."""
    done = _run(CHECK, scratch)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == sorted(FOLDERS)


def test_the_lines_of_the_tutorial_run(scratch: Path) -> None:
    """Those that build a step; the other block is of a package that does not exist."""
    block = next(block for block in _blocks("docs/write_a_plugin.md") if "largest_rows" in block)
    done = _run(block, scratch)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", FOLDERS)
def test_each_readme_says_how_it_is_checked(kind: str, scratch: Path) -> None:
    """With the name of the class above."""
    text = (ROOT / "leakaudit" / kind / "README.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"@\w+\(\"[\w-]+\"\)\n@dataclass\(frozen=True\)\nclass (\w+)", text)
    assert re.search(rf"Its test is one line: `check_\w+\({name}\)`, from `leakaudit\.plugins\.testing`", text)


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_readme_of_plugins_stays_short(kind: str) -> None:
    """A table and an example; methods and measurements are in docs."""
    assert len((ROOT / "leakaudit" / kind / "README.md").read_text(encoding="utf-8").splitlines()) <= 90
