"""`leakaudit gate` imports only what a judgement needs, so that it starts fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from leakaudit.results.files import to_json
from tests.support.factories import audit

MOST_MODULES = 340
"""Most modules of `leakaudit gate`, with those of Python itself. It is 329 on Python 3.11."""

NEEDLESS = {
    "torch",
    "transformers",
    "numpy",
    "yaml",
    "jinja2",
    "rich",
    "rich.console",
    "leakaudit.config.described",
    "leakaudit.history.baseline",
    "leakaudit.history.keys",
    "leakaudit.history.record",
    "leakaudit.history.reference",
    "leakaudit.reports.frontier",
    "leakaudit.reports.redaction",
    "leakaudit.reports.terminal",
}
"""Modules without which a run is judged by the built-in policy and the verdict is printed."""

_CODE = """
import sys
from leakaudit.cli import main
try:
    main(sys.argv[1:])
except SystemExit as done:
    print(done.code)
import pydantic
built = [name for name, kind in vars(sys.modules["leakaudit.gate.verdict"]).items()
         if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel) and kind.__pydantic_complete__]
import os
print(os.environ["PYDANTIC_DISABLE_PLUGINS"])
print(*built)
print(*sys.modules)
"""


def outside_a_terminal(**more: str) -> dict[str, str]:
    """Return an environment in which nothing asks for colours or a width."""
    ours = {name: value for name, value in os.environ.items() if name not in _ASKED_BY_A_USER}
    return {**ours, "COVERAGE_PROCESS_START": "", **more}


_ASKED_BY_A_USER = ("COLUMNS", "FORCE_COLOR", "PYDANTIC_DISABLE_PLUGINS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Return exit code, what pydantic is told, built models and modules."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "results.json").write_text(json.dumps(to_json(audit(0, 60))), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", _CODE, "gate", str(folder)],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
        env=outside_a_terminal(),
    )
    return [line.split() for line in done.stdout.splitlines()[-4:]]


def test_a_judgement_imports_nothing_that_it_does_not_use(started: list[list[str]]) -> None:
    """Neither the report's modules nor the baseline's, nor a parser of YAML."""
    code, _, _, modules = started
    assert code == ["4"]
    assert not NEEDLESS & {*modules}


def test_a_judgement_imports_few_modules(started: list[list[str]]) -> None:
    """Seconds differ between machines; the number of modules does not."""
    assert len(started[3]) <= MOST_MODULES


def test_a_model_is_built_once_and_only_if_it_is_used(started: list[list[str]]) -> None:
    """The verdict's own models are built with it, so no default builds one at import."""
    assert "Verdict" in started[2] and "Versus" not in started[2]


def test_pydantic_looks_for_no_plugins_unless_a_user_says_so(started: list[list[str]]) -> None:
    """It would read a file of every installed package."""
    assert started[1] == ["__all__"]
    code = "import os; from leakaudit.cli import main; main.commands['gate']; print(os.environ['PYDANTIC_DISABLE_PLUGINS'])"
    env = outside_a_terminal(PYDANTIC_DISABLE_PLUGINS="mine")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == ["mine"]


def test_the_version_is_read_when_it_is_asked_for() -> None:
    """The metadata of an installation take a tenth of a start."""
    code = "import sys, leakaudit; print('importlib.metadata' in sys.modules, leakaudit.__version__ != '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
