"""Names -> plugins: what a plugin must be, its errors, and other packages."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from leakaudit.errors import ConfigError, PluginError, UnknownPluginError
from leakaudit.registry import Registry

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Knobs:
    """A plugin with one knob of each kind."""

    steps: int = 10
    """How many."""
    rate: float = 0.5
    deep: bool = False
    mode: str = "fast"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")


@pytest.fixture
def registry() -> Registry[Any]:
    """Give a registry of its own, without a home."""
    fresh: Registry[Any] = Registry("attack")
    fresh.register("knobs")(Knobs)
    return fresh


def test_a_plugin_is_found_by_its_name_and_knows_it(registry: Registry[Any]) -> None:
    """The decorator returns the class itself."""
    assert registry["knobs"] is Knobs
    assert Knobs.name == "knobs"  # type: ignore[attr-defined]
    assert list(registry) == [("knobs", Knobs)]


def test_names_are_sorted(registry: Registry[Any]) -> None:
    """Whatever the order of imports."""
    other = dataclasses.make_dataclass("Other", [], frozen=True)
    registry.register("a-first")(other)
    assert registry.names() == ["a-first", "knobs"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("knob", r"no attack is called 'knob'; did you mean 'knobs'\? known: knobs"),
        ("zzz", r"no attack is called 'zzz'; known: knobs"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one_and_the_list(registry: Registry[Any], asked: str, message: str) -> None:
    """A far-fetched suggestion would be worse than none."""
    with pytest.raises(UnknownPluginError, match=message):
        registry[asked]


def test_options_become_the_types_of_the_fields(registry: Registry[Any]) -> None:
    """The command line gives strings."""
    built = registry.create("knobs", {"steps": "3", "rate": "0.25", "deep": "true", "mode": "slow"})
    assert built == Knobs(3, 0.25, True, "slow")
    assert registry.create("knobs") == Knobs()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 3}, r"attack 'knobs' has no option 'step'; did you mean 'steps'\? it has: steps, rate, deep, mode"),
        ({"zzz": 3}, r"attack 'knobs' has no option 'zzz'; it has: steps"),
        ({"steps": "many"}, r"attack 'knobs', option 'steps': Input should be a valid integer"),
        ({"steps": 0}, r"attack 'knobs': steps must be at least 1, got 0"),
    ],
)
def test_wrong_options_say_what_would_be_right(registry: Registry[Any], options: dict[str, Any], message: str) -> None:
    """Name of the plugin, name of the knob, and the plugin's own complaint."""
    with pytest.raises(ConfigError, match=message):
        registry.create("knobs", options)


def test_a_plugin_that_is_no_dataclass_is_refused(registry: Registry[Any]) -> None:
    """Its fields are its knobs."""

    class Plain:
        pass

    with pytest.raises(TypeError, match="attack 'plain': Plain is not a dataclass; its fields are its knobs"):
        registry.register("plain")(Plain)


def test_one_name_is_not_given_twice(registry: Registry[Any]) -> None:
    """The same module again is not a second plugin; another class is."""
    registry.register("knobs")(Knobs)
    other = dataclasses.make_dataclass("Other", [], frozen=True)
    with pytest.raises(ConfigError, match="attack 'knobs' is registered twice"):
        registry.register("knobs")(other)


PLUGIN = """
import dataclasses
from tests.plugins.test_registry import HOMES

@HOMES[__package__].register("{name}")
@dataclasses.dataclass(frozen=True)
class Plugin{name}: ...
"""

HOMES: dict[str, Registry[Any]] = {}
"""Package -> the registry whose home it is."""


def _home(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> Registry[Any]:
    """Return a registry whose home is a package of these files."""
    package = folder / f"home_of_{folder.name}"
    package.mkdir()
    for name, source in {"__init__": "", **files}.items():
        (package / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    HOMES[package.name] = Registry("attack", package.name)
    return HOMES[package.name]


def test_a_new_file_is_all_that_a_plugin_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody imports it: the registry looks what is in the folder."""
    home = _home(tmp_path, monkeypatch, {"one": PLUGIN.format(name="a"), "two": PLUGIN.format(name="b")})
    assert home.names() == ["a", "b"]


@pytest.mark.parametrize(
    ("source", "found"),
    [("", "registers no attack"), (PLUGIN.format(name="x") + PLUGIN.format(name="y"), "registers x, y")],
)
def test_a_file_that_registers_none_or_several_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: str
) -> None:
    """At every look-up, so that half of the plugins never pass for all."""
    home = _home(tmp_path, monkeypatch, {"good": PLUGIN.format(name="a"), "wrong": source})
    for _ in range(2):
        with pytest.raises(PluginError, match=rf"wrong\.py: {found}; a file in home_of_.* registers exactly one"):
            home.names()


def test_what_a_plugin_does_not_state_has_the_default_of_its_kind() -> None:
    """So that nobody who asks has to know what may be missing."""
    fresh: Registry[Any] = Registry("attack", unless_stated={"needs": "everything"})
    stated = dataclasses.make_dataclass("Stated", [], namespace={"needs": "named parts"}, frozen=True)
    silent = dataclasses.make_dataclass("Silent", [], frozen=True)
    assert fresh.register("stated")(stated).needs == "named parts"
    assert fresh.register("silent")(silent).needs == "everything"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "",
            r"forgetful\.py: registers no plugin, and the entry point forgetful = 'forgetful' of the package 'forgetful' names it",
        ),
        (
            "import not_installed",
            r"'forgetful' cannot be imported: ModuleNotFoundError: No module named 'not_installed'",
        ),
    ],
)
def test_an_installed_package_that_registers_nothing_is_named(tmp_path: Path, source: str, message: str) -> None:
    """Its author forgot the import or the decorator."""
    (tmp_path / "forgetful.py").write_text(source)
    info = tmp_path / "forgetful-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: forgetful\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[leakaudit.plugins]\nforgetful = forgetful\n")
    code = "from leakaudit.registry import metrics\ntry: metrics.names()\nexcept Exception as error: print(type(error).__name__, error)"
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("PluginError ") and re.search(message, done.stdout), done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the extension package and unpack its wheel."""
    source = tmp_path_factory.mktemp("extension") / "source"
    shutil.copytree(Path(__file__).parent / "extension_package", source)
    (source / "conftest.py").unlink()
    build = "import setuptools.build_meta as b; b.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (source / "dist").glob("*.whl")
    site = source.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_an_extension_is_held_to_the_promises_of_every_attack(installed: Path) -> None:
    """By the checks that are shipped, without anything of this repository's tests."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "test_extension.py"],
        cwd=installed.parent / "source",
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_an_installed_extension_is_listed_beside_our_own(installed: Path) -> None:
    """It needs no more than the entry point."""
    done = subprocess.run(
        [sys.executable, "-m", "leakaudit", "attacks", "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["always-one-token"] == {
        "name": "always-one-token",
        "what": "Guess one token, whatever was seen.",
        "goal": "words",
        "threat_model": "sees nothing",
        "source": "made for a test",
        "options": {"token": "7"},
        "knobs": [{"name": "token", "default": "7", "kind": "int", "sentence": "The token id.", "of_preset": ""}],
        "example": "always-one-token(token=7)",
        "battery": [],
        "reads": "gradient",
        "needs": "everything",
        "search": False,
    }
    assert "span" in rows
