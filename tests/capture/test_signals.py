"""Signals reach the user's handlers, and what those raise reaches the user's loop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import pytest
import torch

from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.context import OFF_SWITCH
from leakaudit.results.schema import VerificationStatus
from tests.support import user_code
from tests.support.sabotage import name_of, reached
from tests.support.tiny_trainer import audit_config, kept, stamp, without_side_process

STEPS = 4


class Preempted(Exception):
    """What the user's handler raises."""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def train(
    folder: Path,
    during: Callable[[int], object] = lambda step: None,
    around: AbstractContextManager[Any] = contextlib.nullcontext(),  # noqa: B008 - it holds nothing
) -> tuple[list[str], dict[str, torch.Tensor], Any]:
    """Train four steps in a loop that catches its own exception and goes on.

    Args:
        folder: of the audit.
        during: called in each step, after the backward pass.
        around: entered around the audit.

    Returns:
        Where the exception was caught, the weights, and the audit.
    """
    model = user_code.plain_classifier().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    config = audit_config(folder, schedule="deferred", at_end="leave", attacks=({"name": "idlg"},))
    audit = watch(model, optimizer, tokenizer=user_code.tokenizer(), config=config)
    caught = []
    try:
        with around, audit:
            for step in range(STEPS):
                try:
                    optimizer.zero_grad()
                    model(**user_code.batch(step)).loss.backward()
                    during(step)
                    optimizer.step()
                except Preempted:
                    caught.append(f"step {step}")
    except Preempted:
        caught.append("around the audit")
    return caught, {n: p.detach().clone() for n, p in model.named_parameters()}, audit


class Alarm:
    """Sends a signal at the first call of one function of ours in the main thread."""

    def __init__(self, target: CodeType) -> None:
        self.target, self.sent = target, False

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *rest: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is self.target and not self.sent:
            self.sent = True
            signal.raise_signal(signal.SIGUSR1)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Preempted


def test_a_handler_is_called_as_often_as_signals_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread sends one in each step, with the audit and without it."""

    def training(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
        calls: list[int] = []
        due, came = threading.Semaphore(0), threading.Semaphore(0)

        def send() -> None:
            for _ in range(STEPS):
                due.acquire()
                os.kill(os.getpid(), signal.SIGUSR1)

        def handle(number: int, frame: FrameType | None) -> None:
            calls.append(number)
            came.release()

        def during(step: int) -> None:
            if step:
                came.acquire(timeout=30)  # of the step before: two at once would be one call of the handler
            due.release()  # this one arrives while the optimizer steps

        signal.signal(signal.SIGUSR1, handle)
        thread = threading.Thread(target=send)
        thread.start()
        caught, weights, _ = train(folder, during)
        thread.join()
        came.acquire(timeout=30)  # the last one: the system may hand it to a thread that has not run yet
        assert caught == [] and signal.getsignal(signal.SIGUSR1) is handle
        return len(calls), weights

    with without_side_process():
        with_it = training(tmp_path / "with")
    assert (tmp_path / "with" / "audit" / "spool").exists()
    monkeypatch.setenv(OFF_SWITCH, "1")
    without = training(tmp_path / "without")
    assert with_it[0] == without[0] == STEPS
    assert all(torch.equal(with_it[1][name], without[1][name]) for name in without[1])


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.integrations)])
def test_what_a_handler_raises_inside_any_function_of_ours_reaches_the_loop(tmp_path: Path, every: int) -> None:
    """A loop that goes on afterwards keeps no step that is wrong."""
    with without_side_process():
        found = reached(lambda again: train(tmp_path / "reached"))
    ours = [code for code in found if name_of(code).startswith(("callbacks/", "capture/"))] if every > 1 else found
    wrong, sent = [], 0
    for number, target in enumerate(ours[::every]):
        signal.signal(signal.SIGUSR1, _raise)
        folder, alarm = tmp_path / str(number), Alarm(target)
        with without_side_process():
            caught, _, audit = train(folder, around=alarm)
        sent += alarm.sent
        if len(caught) != alarm.sent:
            wrong.append(f"a signal in {name_of(target)} was caught {len(caught)} times")
        if audit.folder is not None and (audit.folder / "spool").exists():
            for step, snapshot in kept(audit).items():
                if stamp(snapshot).status is not VerificationStatus.VERIFIED:
                    wrong.append(f"step {step} is kept and wrong after a signal in {name_of(target)}")
    assert not wrong, "\n".join(wrong)
    assert sent > 100 / every
