"""Every tracker of an `Accelerator` gets numbers at the audited step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.trackers import OtherLogger, TensorBoardWriter, Trackers, trackers_behind
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.results.files import load_results
from tests.capture.test_trackers import NUMBERS, Writer
from tests.support import tiny

accelerate = pytest.importorskip("accelerate")
FIRST, STEPS = 7, 2
NUMBER = "leakaudit/llg/label_accuracy"


class OwnTracker(accelerate.tracking.GeneralTracker):  # type: ignore[misc,name-defined] # accelerate has no types here
    """A tracker of the user's own, which keeps what it gets."""

    name = "own"
    requires_logging_directory = False

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.inner = inner
        self.points: list[tuple[dict[str, float], int | None]] = []

    @property
    def tracker(self) -> Any:
        if self.inner is None:
            raise RuntimeError("the old dog")
        return self.inner

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, float], step: int | None = None, **more: Any) -> None:
        self.points.append((values, step))


def trained(folder: Path, *, begin_first: bool) -> tuple[OwnTracker, Writer]:
    """Train two steps with a tracker of our own and one of a known kind."""
    own, writer = OwnTracker(), Writer()
    accelerator = accelerate.Accelerator(cpu=True, log_with=[own, OwnTracker(inner=writer)])
    tokenizer, plain = tiny.bert_tokenizer(), tiny.bert()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    config = AuditConfig(
        out_dir=folder, attacks=(PluginSpec(name="llg"),), controls=0, schedule="inline", every_n_steps=1
    )
    if begin_first:
        accelerator.init_trackers("night")
    audit = watch(model, optimizer, tokenizer=tokenizer, config=config, first_step=FIRST, log=accelerator.log)
    with audit:
        if not begin_first:
            accelerator.init_trackers("night")
        for _ in range(STEPS):
            batch = tokenizer(["the old dog chased a cat ."], return_tensors="pt")
            accelerator.backward(model(**batch, labels=torch.tensor([1])).loss)
            optimizer.step()
            optimizer.zero_grad()
    return own, writer


def test_a_tracker_of_the_users_own_gets_points_at_the_audited_step(tmp_path: Path) -> None:
    """Beside one of a known kind, which gets its points in its own way."""
    own, writer = trained(tmp_path, begin_first=True)
    steps = [step.step for step in load_results(tmp_path).steps]
    assert steps == [FIRST, FIRST + 1]
    assert [step for _, step in own.points] == [step for name, _, step in writer.points if name == NUMBER] == steps
    assert all(NUMBER in values for values, _ in own.points)


def test_trackers_that_begin_after_the_audit_get_the_step_too(tmp_path: Path) -> None:
    """`init_trackers` may come later than `watch`."""
    own, _ = trained(tmp_path, begin_first=False)
    assert [step for _, step in own.points] == [FIRST, FIRST + 1]
    assert [values["leakaudit/step"] for values, _ in own.points] == [FIRST, FIRST + 1]


def test_a_plain_log_gets_the_step_as_a_number_alone() -> None:
    """What stands behind it may have an axis that never goes back."""
    rows: list[dict[str, float]] = []
    (only,) = trackers_behind(rows.append)
    only.send(3, NUMBERS)
    assert rows == [{"leakaudit/step": 3, **NUMBERS}]


def test_a_tracker_that_cannot_say_what_it_is_built_around_is_logged_to() -> None:
    """Its error is not the training's."""
    own, writer = OwnTracker(), Writer()
    holder: Any = SimpleNamespace(trackers=[own, OwnTracker(inner=writer)])
    log: Any = accelerate.Accelerator.log.__get__(holder)
    found = trackers_behind(log)
    assert [type(one) for one in found] == [OtherLogger, TensorBoardWriter]
    Trackers.of(found).send(3, NUMBERS)
    assert own.points == [({"leakaudit/step": 3, **NUMBERS}, 3)]
