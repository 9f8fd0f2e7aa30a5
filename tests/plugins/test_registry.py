"""Names -> plugins: what a plugin must be, what is said when there is none, and the road for packages outside."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from leakaudit.errors import ConfigError, UnknownPluginError
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
    """Give a registry of its own whose home registers nothing."""
    fresh: Registry[Any] = Registry("attack", "leakaudit.audit.canaries")
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
    """Importing the same module again is no second plugin; another class of that name is."""
    registry.register("knobs")(Knobs)
    other = dataclasses.make_dataclass("Other", [], frozen=True)
    with pytest.raises(ConfigError, match="attack 'knobs' is registered twice"):
        registry.register("knobs")(other)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the extension package as its author would, and unpack the wheel as an installer does."""
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


def test_an_installed_extension_is_listed_beside_our_own(installed: Path) -> None:
    """The entry point is all that it takes; listing shows its threat model and its knobs."""
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
    }
    assert "span" in rows
