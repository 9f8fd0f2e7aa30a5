"""The face for plugin authors: every name is there, and imported on first use."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from leakaudit import plugins
from tests.house.imports import face


def test_every_listed_name_is_the_one_of_its_home() -> None:
    """Type checkers read the imports, the interpreter the table."""
    assert sorted(plugins.__all__) == sorted(face()) == sorted(plugins._HOME_OF)
    for name, module in face().items():
        assert getattr(plugins, name) is getattr(import_module(module), name)
    assert set(plugins.__all__) <= set(dir(plugins))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    """As with any other module."""
    with pytest.raises(AttributeError, match=r"module 'leakaudit\.plugins' has no attribute 'Obsrvation'"):
        vars(plugins)["__getattr__"]("Obsrvation")


def test_a_metric_is_written_and_registered_without_torch() -> None:
    """Gate and report run where it is not installed."""
    code = "import sys; from leakaudit.plugins import LabelCounts, Level, Pair, attack, metric; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr
