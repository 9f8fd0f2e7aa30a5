"""What every test stands on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variable CI, which forbids text mode full.

    A test that means CI sets it.
    """
    monkeypatch.delenv("CI", raising=False)
