"""Two processes on gloo keep what both send together.

Neither waits for the other.
"""

from __future__ import annotations

import pytest
import torch

from leakaudit.audit.verification import verify
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.results.schema import VerificationStatus
from tests.support import tiny
from tests.support.pair import Run, pair
from tests.support.tiny_trainer import distance, stamp
from tests.support.two_processes import batches


@pytest.fixture(scope="module")
def run() -> Run:
    return pair()


@pytest.mark.parametrize("name", ["ddp", "windows", "fsdp2", "fsdp2-windows"])
def test_row_13_the_reduced_update_comes_from_the_batches_of_all_processes(run: Run, name: str) -> None:
    """The whole global batch is the truth; one process's share alone explains nothing."""
    found = run.kept(name)
    assert list(found) == [0, 1, 2]
    windows = 2 if name.endswith("windows") else 1
    for step, snapshot in found.items():
        assert distance(snapshot.observation.update, run.updates[0][name][step]) == 0.0
        assert distance(snapshot.observation.update, run.updates[1][name][step]) == 0.0
        assert snapshot.observation.facts.view == "reduced" and snapshot.recipe.processes == 2
        own = [batch for rank in range(2) for batch in batches(rank)[step * windows : (step + 1) * windows]]
        assert [batch.inputs["input_ids"].tolist() for batch in snapshot.truth.micro_batches] == [
            batch["input_ids"].tolist() for batch in own
        ]
        verified = stamp(snapshot)
        assert verified.status is VerificationStatus.VERIFIED, verified
        assert verified.relative_error is not None and verified.relative_error < 1e-5
        alone = Truth(snapshot.truth.micro_batches[:windows])
        step_alone = ClientStep(snapshot.observation.model, alone, snapshot.recipe, snapshot.observation.facts)
        assert verify(step_alone, snapshot.observation.update).status is VerificationStatus.MISMATCH


@pytest.mark.parametrize("name", ["trainer", "lightning", "accelerate", "trainer-fsdp2", "accelerate-fsdp2"])
def test_row_13_trainers_over_two_processes_send_what_is_kept(run: Run, name: str) -> None:
    """The Hugging Face Trainer multiplies losses and clips.

    It multiplies by the number of processes. Lightning does neither.
    """
    found = run.kept(name)
    assert list(found) == [0, 1, 2]
    for step, snapshot in found.items():
        assert distance(snapshot.observation.update, run.updates[0][name][step]) == 0.0
        assert distance(snapshot.observation.update, run.updates[1][name][step]) == 0.0
        assert len(snapshot.truth.sequences()) == (8 if name.startswith("accelerate") else 4)
        verified = stamp(snapshot)
        assert verified.status is VerificationStatus.VERIFIED, verified
        assert verified.relative_error is not None and verified.relative_error < 1e-5


def test_row_13_the_local_update_is_one_processs_own(run: Run) -> None:
    """Before anything is summed, micro-batches without synchronisation included."""
    for step, snapshot in run.kept("local").items():
        assert snapshot.observation.facts.view == "local" and snapshot.recipe.processes == 1
        assert len(snapshot.truth.micro_batches) == 2
        assert distance(snapshot.observation.update, run.updates[0]["local"][step]) > 0.1
        verified = stamp(snapshot)
        assert verified.status is VerificationStatus.VERIFIED, verified
        assert verified.relative_error is not None and verified.relative_error < 1e-5


@pytest.mark.parametrize("name", ["busy", "stumbling"])
def test_row_14_one_process_that_cannot_keep_a_step_keeps_all_from_it_and_none_hangs(run: Run, name: str) -> None:
    """Training goes through in both, to the same weights, and nothing is kept."""
    assert len(run.updates[0][name]) == len(run.updates[1][name]) == 3
    assert not (run.folder / name / "audit" / "spool").exists()
    assert not list((run.folder / name / "audit").glob("taken/*"))


def test_row_14_one_process_whose_audit_ended_still_answers_the_other(run: Run) -> None:
    """Somebody removed the spool: one process says so, both train to the end."""
    assert len(run.updates[0]["removed"]) == len(run.updates[1]["removed"]) == 3
    assert run.said[0].count("leakaudit is off for this run: SpoolError: somebody removed") == 1
    assert "this run was not audited: SpoolError: somebody removed" in run.said[0]
    assert "somebody removed" not in run.said[1]


def test_row_14_one_process_that_cannot_begin_keeps_all_from_it(run: Run) -> None:
    """Each says why: its own reason, or that it is another's."""
    assert "there is no tokenizer" in run.said[1]
    assert "another process of this run cannot be audited" in run.said[0]
    assert not (run.folder / "alone" / "audit" / "spool").exists()


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-windows", "trainer-fsdp2", "accelerate-fsdp2"])
def test_row_15_sharded_parameters_are_kept_whole(run: Run, name: str) -> None:
    """Under FSDP2, every update and weight has its whole shape.

    No process wrote a shard.
    """
    shapes = {name: p.shape for name, p in tiny.bert().named_parameters()}
    for snapshot in run.kept(name).values():
        assert {name: g.shape for name, g in snapshot.observation.update.items()} == shapes
        assert snapshot.model_recipe.class_name == "BertForSequenceClassification"


@pytest.mark.integrations
@pytest.mark.parametrize("name", ["whole", "adapters"])
def test_a_trainer_that_shards_with_fsdp2_is_kept_whole(name: str) -> None:
    """Accelerate divides the model, whole or with adapters, over the processes."""
    run = pair("tests.support.sharded_trainer")
    found = run.kept(name)
    assert list(found) == [0, 1, 2]
    for step, snapshot in found.items():
        given = run.updates[0][name][step]
        assert snapshot.observation.update.keys() == {one.removeprefix("base_model.model.") for one in given}
        for one, gradient in given.items():
            assert torch.equal(snapshot.observation.update[one.removeprefix("base_model.model.")], gradient)
        assert len(snapshot.truth.sequences()) == 4 and snapshot.recipe.processes == 2
        assert stamp(snapshot).status is VerificationStatus.VERIFIED


FLAT = "tests.support.flat_shards"


@pytest.mark.integrations
@pytest.mark.parametrize(
    "name",
    [
        "flat", "windows", "no_sync", "clipped", "frozen", "gradients only", "not sharded", "empty pieces left out",
    ],
)  # fmt: skip
def test_pieces_of_fsdp1_are_kept_whole(name: str) -> None:
    """Update and weights are those that FSDP1 itself puts together, to the bit."""
    run = pair(FLAT)
    found = run.kept(name)
    assert list(found) == [0, 1, 2]
    shapes = {name: p.shape for name, p in tiny.bert().named_parameters()}
    for step, snapshot in found.items():
        given, before = (run.updates[0][name][what][step] for what in ("gradients", "weights"))
        update, model = snapshot.observation.update, dict(snapshot.observation.model.named_parameters())
        assert update.keys() == given.keys() and all(torch.equal(update[one], given[one]) for one in given)
        assert {one: w.shape for one, w in before.items()} == shapes
        assert all(torch.equal(model[one], before[one]) for one in before)
        assert snapshot.recipe.processes == 2 and snapshot.observation.facts.view == "reduced"
        verified = stamp(snapshot)
        assert verified.status is VerificationStatus.VERIFIED, verified
        assert verified.relative_error is not None and verified.relative_error < 1e-5


@pytest.mark.integrations
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("flat parameters", "with `use_orig_params=False`, where the model has no parameters but flat ones"),
        ("half", "with `mixed_precision`, which changes the type of weights or gradients"),
        ("own share", "FSDP1 sums the gradients of the processes before a hook sees them"),
    ],
)
def test_fsdp1_with_an_option_that_hides_the_update_trains_without_an_audit(name: str, why: str) -> None:
    """Each process says why, and nothing is kept."""
    run = pair(FLAT)
    assert all(why in said for said in run.said)
    assert not (run.folder / name / "audit" / "spool").exists()
    assert len(run.updates[0][name]["weights"]) == 4


@pytest.mark.integrations
def test_an_audit_changes_no_weight_and_no_collective_of_fsdp1() -> None:
    """Both processes train to the same bits with it and without it."""
    run = pair(FLAT)
    for got in run.updates:
        with_audit, without = got["with an audit"], got["without an audit"]
        assert with_audit["collectives"] == without["collectives"] > 0
        for one, other in zip(with_audit["weights"], without["weights"], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
