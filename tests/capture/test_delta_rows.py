"""Differences of weights, by optimizer: what each row of the page shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leakaudit.audit.accuracy import FLOAT32_TOLERANCE
from leakaudit.audit.verification import verify
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.results.schema import Verification, VerificationStatus
from tests.support import delta_rows, tiny
from tests.support.delta_rows import ROWS, Row, Trained, train

COARSE = ("AdamW, weights in bfloat16",)
"""Rows in which a step of one learning rate is smaller than the rounding of a weight."""


def changed(snapshot: Snapshot, name: str, rates: float = 1.0) -> Verification:
    """Return the stamp of a step of which one entry was moved by some learning rates."""
    update = {key: value.clone() for key, value in snapshot.observation.update.items()}
    update[name].view(-1)[-1] += rates / snapshot.observation.facts.local_steps
    return verify(ClientStep.of(snapshot), update)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Return the trainings that were asked for, by the name of their row."""

    class Made(dict[str, Trained]):
        def __missing__(self, name: str) -> Trained:
            self[name] = train(ROWS[name], tmp_path_factory.mktemp("row"))
            return self[name]

    return Made()


@pytest.mark.parametrize("name", ROWS)
def test_both_rounds_are_what_the_page_says(name: str, trained: dict[str, Trained]) -> None:
    """`python -m tests.support.delta_rows --write` makes the page again."""
    found = trained[name].snapshots
    assert [delta_rows.stamp_of(found.get(number)) for number in range(delta_rows.ROUNDS)] == delta_rows.on_page()[name]


@pytest.mark.parametrize("name", ROWS)
def test_training_is_the_same_to_the_bit_without_the_audit(name: str, trained: dict[str, Trained]) -> None:
    """The weights and the state of the optimizer."""
    assert train(ROWS[name]).equals(trained[name])


@pytest.mark.parametrize("name", ROWS)
def test_the_facts_say_what_the_server_knows(name: str, trained: dict[str, Trained]) -> None:
    """K, the rate, the optimizer; the moments are truth and nowhere public."""
    row, found = ROWS[name], trained[name].snapshots
    for number, snapshot in found.items():
        facts = snapshot.observation.facts
        assert facts.local_steps == row.local_steps
        assert facts.optimizer is not None
        assert facts.optimizer.local_steps == row.local_steps
        assert facts.optimizer.learning_rate == pytest.approx(facts.learning_rate)
        names = [one for group in facts.optimizer.groups for one in group.parameters]
        assert sorted(names) == sorted(facts.shared) == sorted(snapshot.observation.update)
        assert bool(snapshot.truth.optimizer_state) is not facts.optimizer.fresh
        assert facts.optimizer.fresh is (number == 0 or ("rates of a cosine" in name and name.startswith("SGD")))


@pytest.mark.parametrize("name", [name for name in ROWS if name not in COARSE])
def test_one_wrong_entry_is_a_mismatch(name: str, trained: dict[str, Trained]) -> None:
    """It is off by one learning rate, in the smallest and in the largest tensor."""
    snapshot = trained[name].snapshots[0]
    by_size = sorted(snapshot.observation.update.items(), key=lambda item: item[1].numel())
    for place, _ in (by_size[0], by_size[-1]):
        assert changed(snapshot, place).status is VerificationStatus.MISMATCH


def test_the_note_on_a_wrong_entry_names_its_parameter(trained: dict[str, Trained]) -> None:
    """The names of parameters are public."""
    note = changed(trained["AdamW, K = 1"].snapshots[0], "classifier.bias").note
    assert "entries of 1 of 41 parameters differ by more than rounding (first 'classifier.bias')" in note


def test_a_wrong_entry_that_the_relative_error_hides_is_a_mismatch(trained: dict[str, Trained]) -> None:
    """It is off by a twentieth of a learning rate, among 39,000 entries."""
    snapshot = trained["AdamW, K = 1"].snapshots[0]
    found = changed(snapshot, "bert.embeddings.word_embeddings.weight", rates=0.05)
    assert found.status is VerificationStatus.MISMATCH
    assert found.relative_error is not None
    assert found.relative_error < FLOAT32_TOLERANCE


def test_the_moments_before_the_round_decide_the_repetition(trained: dict[str, Trained]) -> None:
    """A repetition with other moments gives another difference."""
    snapshot = trained["AdamW, K = 1"].snapshots[1]
    moments = {
        path: value * 1.5 if path.endswith("exp_avg") else value
        for path, value in snapshot.truth.optimizer_state.items()
    }
    step = replace(ClientStep.of(snapshot), truth=replace(snapshot.truth, optimizer_state=moments))
    assert verify(step, snapshot.observation.update).status is VerificationStatus.MISMATCH


def test_the_page_has_every_row_and_all_are_verified() -> None:
    """Each round is repeated to the last bit on the machine that wrote the page."""
    page = delta_rows.on_page()
    assert set(page) == set(ROWS)
    assert {cell for cells in page.values() for cell in cells} == {"verified, to the bit"}


@pytest.mark.parametrize("local_steps", [1, 4])
def test_a_machine_that_rounds_gradients_otherwise_is_no_mismatch(tmp_path: Path, local_steps: int) -> None:
    """Gradients that are off by a millionth of their largest entry are accepted.

    AdamW makes more of such a difference. One wrong entry is a mismatch there, too.
    """
    snapshot = train(Row(delta_rows.adamw, local_steps=local_steps, model=tiny.bert), tmp_path).snapshots[0]
    step, draw = ClientStep.of(snapshot), tiny.generator(0)

    def rounded(gradient: Tensor) -> Tensor:
        noise = torch.rand(gradient.shape, generator=draw) * 2 - 1
        return gradient + 1e-6 * gradient.abs().max() * noise * (gradient != 0)

    hooks = [parameter.register_hook(rounded) for parameter in step.model.parameters()]
    update = step.update()
    for hook in hooks:
        hook.remove()
    found = verify(step, update)
    assert found.status is VerificationStatus.VERIFIED
    assert found.relative_error is not None
    assert found.relative_error > 1e-6
    update["bert.encoder.layer.0.output.dense.weight"][0, 0] += 1 / local_steps
    assert verify(step, update).status is VerificationStatus.MISMATCH


def test_the_frozen_base_of_adapters_is_on_the_disk_once(tmp_path: Path) -> None:
    """Each round has the adapters and a reference to the base."""
    train(ROWS["LoRA, AdamW, K = 10"], tmp_path)
    folders = sorted((tmp_path / "audit" / "taken").iterdir())
    own = [sum(file.stat().st_size for file in folder.iterdir() if file.stat().st_nlink == 1) for folder in folders]
    shared = {file.stat().st_ino for folder in folders for file in folder.iterdir() if file.stat().st_nlink > 1}
    assert len(folders) == delta_rows.ROUNDS
    assert len(shared) == 1
    assert max(own) > 0
