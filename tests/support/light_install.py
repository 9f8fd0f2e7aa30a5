"""An installation without torch: what the project asks for, and no extra."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

EXTRA = re.compile(r"\bextra\s*==")


def name_of(requirement: str) -> str:
    """Return the name of a distribution in a requirement, in its normal form."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]).lower()


def light_distributions() -> set[str]:
    """Return what `pip install leakaudit` installs beside leakaudit."""
    found: set[str] = set()
    todo = [name_of(one) for one in PROJECT["dependencies"]]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [name_of(one) for one in distribution(name).requires or () if not EXTRA.search(one)]
    return found


def light_packages(folder: Path) -> Path:
    """Fill a folder with links to the packages of an installation without torch."""
    folder.mkdir()
    for name in light_distributions():
        home = distribution(name)
        tops = {file.parts[0] for file in home.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            (folder / top).symlink_to(Path(str(home.locate_file(top))).resolve())
    return folder


def light_python(packages: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with these packages and our checkout, and nothing else."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-S", *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
