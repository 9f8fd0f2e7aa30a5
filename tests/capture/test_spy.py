"""The test harness notices errors: each test falsifies one thing that it compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.client.snapshot import Snapshot
from leakaudit.client.truth import Truth
from leakaudit.storage.snapshots import read_snapshot
from tests.support import spy
from tests.support.other_runs import looped
from tests.support.spy import Configuration, Training, distance, row_of, sequences_in

PLAIN = Configuration("plain", looped())


def _update(snapshot: Snapshot) -> Snapshot:
    """Change one entry of the update by a thousandth."""
    update = {name: value.clone() for name, value in snapshot.observation.update.items()}
    update["classifier.weight"][0, 0] += 1e-3 * update["classifier.weight"].norm()
    return replace(snapshot, observation=replace(snapshot.observation, update=update))


def _weights(snapshot: Snapshot) -> Snapshot:
    """Change one weight in its fifth digit."""
    with torch.no_grad():
        next(p for p in snapshot.observation.model.parameters() if p.dim() > 1)[1, 1] += 1e-5
    return snapshot


def _word(snapshot: Snapshot) -> Snapshot:
    """Change one word of the truth."""
    first, *rest = snapshot.truth.micro_batches
    ids = first.inputs["input_ids"].clone()
    ids[0, 1] += 1
    return replace(snapshot, truth=Truth((replace(first, inputs={**first.inputs, "input_ids": ids}), *rest)))


def _label(snapshot: Snapshot) -> Snapshot:
    """Change one label of the truth."""
    first, *rest = snapshot.truth.micro_batches
    labels = 1 - first.inputs["labels"]
    labels[0] = first.inputs["labels"][0]
    return replace(snapshot, truth=Truth((replace(first, inputs={**first.inputs, "labels": labels}), *rest)))


def _facts(**facts: Any) -> Callable[[Snapshot], Snapshot]:
    def change(snapshot: Snapshot) -> Snapshot:
        told = snapshot.observation.facts.model_copy(update=facts)
        return replace(snapshot, observation=replace(snapshot.observation, facts=told))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_update, "off what the optimizer was handed"),
        (_weights, "weights are"),
        (_word, "texts are"),
        (_label, "labels"),
        (_facts(batch_size_bound=1), "batch bound 1 for 2 texts"),
        (_facts(loss_divisor=0.5), "divisor 0.5 for 1.0"),
        (_facts(dtype="bfloat16"), "precision bfloat16 for float32"),
        (_facts(frozen=("classifier.weight",)), "called frozen"),
    ],
    ids=["update", "weights", "word", "label", "bound", "divisor", "precision", "frozen"],
)
def test_what_is_false_in_a_snapshot_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Snapshot], Snapshot], said: str
) -> None:
    """Only that is reported, and the stamp stays, so that a wrong one cannot hide it."""
    monkeypatch.setattr(spy, "stamped", lambda snapshot: ("verified", 0.0))
    monkeypatch.setattr(spy, "read_snapshot", lambda path: change(read_snapshot(path)))
    row = row_of(replace(PLAIN, divisor=1.0), tmp_path)
    assert row.kept == 4 and row.same_training
    assert row.wrong and all(said in one for one in row.wrong), row.wrong


def test_nothing_is_said_of_what_is_right(tmp_path: Path) -> None:
    """All steps are kept, and all of them verified."""
    row = row_of(replace(PLAIN, divisor=1.0), tmp_path)
    assert (row.kept, row.steps, row.stamp, row.wrong, row.same_training) == (4, 4, "verified", [], True)


@pytest.mark.parametrize("what", ["weights", "random state", "one gradient"])
def test_a_training_that_the_audit_changes_is_noticed(tmp_path: Path, what: str) -> None:
    """By a millionth of a weight, by one random number, by something in a gradient."""

    def train(run: Training) -> None:
        def between(model: Any, optimizer: Any, step: int) -> None:
            if not run.audited or step:
                return
            with torch.no_grad():
                if what == "weights":
                    model.classifier.weight += 1e-6
                elif what == "random state":
                    torch.rand(1)
                else:
                    model.classifier.bias.grad = torch.full((2,), 1e-3)

        looped(between=lambda: between, then=lambda model, optimizer, step: None)(run)

    assert not row_of(Configuration("changed", train), tmp_path).same_training


def test_a_gradient_of_another_loss_is_noticed_by_the_formula(tmp_path: Path) -> None:
    """The formula is of the cross-entropy; what is trained is a hundredth more."""
    from tests.support import tiny
    from tests.support.other_runs import mean_over_batches, own_loss

    more = looped(lambda: lambda model, batch: 1.01 * own_loss(model, batch), make=tiny.bert)
    row = row_of(Configuration("more", more, loss=mean_over_batches, fresh=tiny.bert), tmp_path)
    assert row.form == pytest.approx(0.01, rel=1e-2)
    assert row.wrong


def test_texts_of_a_batch_are_read_by_masks_positions_and_choices() -> None:
    """Padding is removed on either side; packed rows are cut where positions restart."""
    ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
    assert sequences_in({"input_ids": ids, "attention_mask": (ids != 0).long()}) == [(5, 6), (7, 8, 9)]
    assert sequences_in({"input_ids": ids[1:], "position_ids": torch.tensor([[0, 0, 1]])}) == [(7,), (8, 9)]
    assert sequences_in({"a_input_ids": ids[None], "b_input_ids": ids[1:]}) == [(0, 5, 6), (7, 8, 9), (7, 8, 9)]


def test_a_distance_is_relative() -> None:
    """And one from nothing is whole."""
    one = {"w": torch.tensor([3.0, 4.0])}
    assert distance(one, one) == 0.0
    assert distance({"w": torch.tensor([3.0, 4.05])}, one) == pytest.approx(0.01, rel=1e-4)
    assert distance(one, {"w": torch.zeros(2)}) == 1.0
