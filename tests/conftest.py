"""What every test stands on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's own CI sets CI, which forbids text mode full: a test that means CI says so."""
    monkeypatch.delenv("CI", raising=False)
