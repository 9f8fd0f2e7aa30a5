"""Raises exceptions in chosen functions of this package during training.

It also names the functions that a training reaches.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import leakaudit

HOME = str(Path(leakaudit.__file__).parent)
CANARY = "a sentence of the private batch"
"""Message of every exception that is raised here; it must be printed nowhere."""


class SabotageError(RuntimeError):
    """What a defect in this package would raise."""


def _ours(code: CodeType) -> bool:
    return code.co_filename.startswith(HOME) and not code.co_name.startswith("<")


def name_of(code: CodeType) -> str:
    """Return file and qualified name of a function of ours."""
    return f"{Path(code.co_filename).relative_to(HOME)}::{code.co_qualname}"


@contextmanager
def _tracing(each_call: Callable[[FrameType], None]) -> Iterator[Callable[[], None]]:
    """Call something at the beginning of every Python function, in every thread.

    Yield a function that sets it again after an exception.
    """

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            each_call(frame)

    def arm() -> None:
        sys.settrace(trace)
        threading.settrace(trace)

    before = sys.gettrace()
    arm()
    try:
        yield arm
    finally:
        sys.settrace(before)
        threading.settrace(before)


def reached(training: Callable[[Callable[[], None]], object]) -> list[CodeType]:
    """Return the functions of this package that a training reaches, in order."""
    found: dict[CodeType, None] = {}

    def note(frame: FrameType) -> None:
        if _ours(frame.f_code):
            found.setdefault(frame.f_code)

    with _tracing(note):
        training(lambda: None)
    return list(found)


@dataclass
class Sabotage:
    """Raises at the beginning of one function.

    It raises first at the n-th call, then at one call in each later training step.
    """

    target: CodeType
    first: int = 1
    calls: int = 0
    raised: int = 0
    _arm: list[Callable[[], None]] = field(default_factory=list)

    def again(self) -> None:
        """Set the trap again; a training calls this once in every step."""
        for arm in self._arm:
            arm()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Set the trap."""
        with _tracing(self._spring) as arm:
            self._arm = [arm]
            yield

    def _spring(self, frame: FrameType) -> None:
        if frame.f_code is self.target:
            self.calls += 1
            if self.calls >= self.first:
                self.raised += 1
                raise SabotageError(CANARY)
