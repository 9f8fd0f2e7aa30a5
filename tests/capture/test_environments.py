"""The audit changes nothing, wherever the packages lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = Path(sysconfig.get_path("purelib"))
BASE = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
"""The interpreter that the tests' own environment was made of; it has none of its packages."""


@dataclass(frozen=True)
class Environment:
    """How to call an interpreter, and where it then finds transformers."""

    command: list[str]
    finds: Path
    variables: dict[str, str] = field(default_factory=dict)


def _plain(folder: Path) -> Environment:
    return Environment([sys.executable], PACKAGES)


def _on_the_path(folder: Path) -> Environment:
    return Environment([str(BASE)], PACKAGES, {"PYTHONPATH": str(PACKAGES)})


def _without_site(folder: Path) -> Environment:
    return Environment([str(BASE), "-S"], PACKAGES, {"PYTHONPATH": str(PACKAGES)})


def _stacked(folder: Path) -> Environment:
    """An environment without packages of its own that takes those of another one."""
    subprocess.run([str(BASE), "-m", "venv", "--without-pip", str(folder / "over")], check=True)
    (site,) = (folder / "over" / "lib").glob("python*/site-packages")
    (site / "below.pth").write_text(f"{PACKAGES}\n")
    return Environment([str(folder / "over" / "bin" / "python")], PACKAGES)


def _user_site(folder: Path) -> Environment:
    site = folder / "user" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    site.parent.mkdir(parents=True)
    site.symlink_to(PACKAGES)
    return Environment([str(BASE)], site, {"PYTHONUSERBASE": str(folder / "user")})


def _editable(folder: Path) -> Environment:
    """The folder of transformers lies in a checkout; the other packages are installed."""
    (folder / "checkout").mkdir()
    (folder / "checkout" / "transformers").symlink_to(PACKAGES / "transformers")
    return Environment([sys.executable], folder / "checkout", {"PYTHONPATH": str(folder / "checkout")})


ENVIRONMENTS: dict[str, Callable[[Path], Environment]] = {
    "plain": _plain,
    "PYTHONPATH": _on_the_path,
    "PYTHONPATH without site": _without_site,
    "stacked": _stacked,
    "user site": _user_site,
    "editable transformers": _editable,
}
OFTEN = ("PYTHONPATH", "editable transformers")
"""Those that the ordinary suite tries: nothing and one package of it lies elsewhere than the interpreter's own."""


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in OFTEN else [pytest.mark.integrations]) for k in ENVIRONMENTS]
)
def test_training_and_libraries_are_the_same_in_every_environment(tmp_path: Path, kind: str) -> None:
    """Models that are made later are, too."""
    if not BASE.exists() or not (PACKAGES / "transformers").is_dir():
        pytest.skip("this environment's packages or interpreter lie elsewhere")
    here = ENVIRONMENTS[kind](tmp_path)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "LEAKAUDIT"))}
    done = subprocess.run(
        [*here.command, "-m", "tests.support.environment_run", str(tmp_path / "audits")],
        cwd=ROOT, env={**inherited, "OMP_NUM_THREADS": "1", **here.variables}, capture_output=True, text=True, check=False,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["transformers"].startswith(str(here.finds)), "the environment is of this kind"
    assert not found["wrong"], "\n".join(found["wrong"])
    assert all(found["kept"].values()), found["kept"]
    assert "is off for this run" not in done.stderr
