"""What every test stands on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell runs background jobs like that, and commands that tests start would ignore Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


collect_ignore_glob = [
    "support/pastes/*",
    "support/flower_deployment/*",
    "support/flower_clients/*",
    "support/fate_client/*",
]
"""Programs of users, which run when they are imported; tests start them."""


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variable CI, which forbids text mode full.

    A test that means CI sets it.
    """
    monkeypatch.delenv("CI", raising=False)


@pytest.fixture(autouse=True)
def _accelerate_forgets() -> Iterator[None]:
    """Reset what Accelerate keeps of the first `Accelerator` of a process."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
