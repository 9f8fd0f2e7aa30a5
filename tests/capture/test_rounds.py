"""A round of local steps: its length, its passes, and when it is over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from leakaudit.capture.context import configuration
from leakaudit.capture.recording.kept_step import KeptStep
from leakaudit.capture.recording.recorder import Recorder
from leakaudit.client.local_steps import weight_difference
from leakaudit.errors import ConfigError
from tests.capture.test_recorder import manifest
from tests.support import stacks, tiny


class Rounds:
    """A loop on the tiny BERT with a recorder of rounds."""

    def __init__(self, local_steps: int | None, rate: float = 1e-3) -> None:
        self.model = tiny.bert().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.written: list[KeptStep] = []
        self.recorder = Recorder(
            self.model, self.optimizer, self.written.append, observe="delta", local_steps=local_steps
        )
        self.recorder.install()
        self.manifest = manifest(self.model)
        self.manifest = self.manifest.model_copy(
            update={"facts": self.manifest.facts.model_copy(update={"view": "delta"})}
        )

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def train(self, steps: int) -> None:
        for batch in stacks.classes(count=steps):
            self.model(**batch).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def kept(self) -> list[KeptStep]:
        self.recorder.written(10)
        return self.written


@pytest.mark.parametrize("steps", [1, 3])
def test_a_round_of_unknown_length_is_kept_with_the_steps_that_were_taken(steps: int) -> None:
    """`end_round` says when it is over; the facts hold the number K and the rates."""
    loop = Rounds(None)
    before = loop.weights()
    loop.recorder.start(0, loop.manifest)
    loop.train(steps)
    assert loop.kept() == []
    loop.recorder.end_round()
    (kept,) = loop.kept()
    facts: Any = kept.manifest.facts
    assert (facts.local_steps, facts.learning_rate, facts.optimizer.fresh) == (steps, 1e-3, True)
    assert facts.optimizer.groups[0].learning_rates == (1e-3,) * steps
    expected = weight_difference(before, loop.weights(), 1e-3 * steps)
    assert all(torch.equal(kept.update[name], change) for name, change in expected.items())
    assert all(torch.equal(kept.weights[name], weight) for name, weight in before.items())
    loop.recorder.remove()


def test_a_round_without_a_local_step_is_not_kept_and_the_next_one_is() -> None:
    """Nothing failed, so nothing is counted as failed."""
    loop = Rounds(None)
    loop.recorder.start(0, loop.manifest)
    loop.recorder.end_round()
    loop.recorder.end_round()
    assert (loop.kept(), loop.recorder.counters.failed) == ([], 0)
    loop.recorder.start(1, loop.manifest)
    loop.train(2)
    loop.recorder.end_round()
    assert [kept.step for kept in loop.kept()] == [1]
    loop.recorder.remove()


def test_steps_after_a_round_of_known_length_are_no_part_of_it() -> None:
    """The loop goes on while the round is written."""
    loop = Rounds(2)
    before = loop.weights()
    loop.recorder.start(0, loop.manifest)
    loop.train(2)
    after = loop.weights()
    loop.train(3)
    loop.recorder.end_round()
    (kept,) = loop.kept()
    assert kept.manifest.facts.local_steps == 2
    assert len(kept.truth.micro_batches) == 2
    expected = weight_difference(before, after, 1e-3 * 2)
    assert all(torch.equal(kept.update[name], change) for name, change in expected.items())
    loop.recorder.remove()


def test_a_round_whose_optimizer_never_moved_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A GradScaler skips the step of a loss that overflows."""
    loop = Rounds(None)
    loop.recorder.start(0, loop.manifest)
    loop.model(**stacks.classes()[0]).loss.backward()
    loop.recorder.end_round()
    assert (loop.kept(), loop.recorder.counters.failed) == ([], 1)
    assert "its optimizer made no step after its backward passes; a GradScaler skips steps" in caplog.text
    loop.recorder.remove()


def test_a_wrong_value_of_a_mapping_is_named() -> None:
    """Callbacks take mappings as well as files."""
    with pytest.raises(ConfigError, match="`budget_s`: Input should be greater than 0"):
        configuration({"budget_s": 0})
