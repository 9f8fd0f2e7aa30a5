"""A forged snapshot is refused in one sentence, before it costs memory or time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leakaudit.client.snapshot import MANIFEST, OBSERVED, TRUTH, Manifest, Provenance
from leakaudit.errors import ModelError, SnapshotDamagedError, SnapshotError
from leakaudit.models import factories
from leakaudit.models.rebuilding import build_model
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.tensors import state_of
from leakaudit.storage import snapshot_content
from leakaudit.storage.digests import digest_of
from leakaudit.storage.snapshot_content import check_truth
from leakaudit.storage.snapshot_files import read_tensors
from leakaudit.storage.snapshots import read_manifest, read_snapshot, write_snapshot
from leakaudit.storage.truth_tensors import truth_of
from tests.support import tiny
from tests.support.snapshots import edit_manifest, write_step

SECONDS = 5.0
"""What a refusal may take on a loaded machine."""


def written(folder: Path) -> Path:
    """Return a sound snapshot of two sentences."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["the dog", "a cat saw the bird"], [0, 1])
    target = folder / "000012.ready"
    write_step(target, step, 12)
    return target


def forge(folder: Path, name: str, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change one tensor file and make its digest fit again."""
    tensors = {key: value.clone() for key, value in load_file(folder / name).items()}
    change(tensors)
    save_file(tensors, folder / name)
    edit_manifest(folder, lambda raw: raw["digests"].update({name: digest_of(folder / name)}))


IDS, MASK = "0/inputs/input_ids", "0/inputs/attention_mask"


@pytest.mark.parametrize(
    ("key", "tensor", "said"),
    [
        (
            IDS,
            torch.zeros(7, dtype=torch.long),
            r"not whole numbers of shape \(B, T\) or .*; found shape \(7,\), int64",
        ),
        (IDS, torch.zeros(2, 3, 4, 5, dtype=torch.long), r"not whole numbers of shape \(B, T\) or .*"),
        (IDS, torch.tensor(3), r"not whole numbers of shape \(B, T\) or .*; found shape \(\), int64"),
        (IDS, torch.zeros(2, 3, 4, dtype=torch.long), "not of the shape of `input_ids`"),
        (IDS, torch.zeros(2, 0, dtype=torch.long), r"not whole numbers of shape \(B, T\) or .*"),
        (IDS, torch.zeros(2, 7), r"not whole numbers of shape \(B, T\) or .*; found shape \(2, 7\), float32"),
        (IDS, torch.full((2, 7), 10**6), "outside the vocabulary"),
        (IDS, torch.full((2, 7), -1), "outside the vocabulary"),
        (MASK, torch.ones(2, 3, dtype=torch.long), "not of the shape of `input_ids`"),
        (MASK, torch.ones(2, 1, 7, 6, dtype=torch.long), "not of the shape of `input_ids`"),
        ("0/inputs/more", torch.zeros([1] * 9), "no tensor of at most 8 dimensions"),
        ("0/options/use_cache", torch.zeros(3), "no finite scalar"),
        ("0/options/use_cache", torch.zeros(0), "no finite scalar"),
        ("0/options/scale", torch.tensor(float("nan")), "no finite scalar"),
        ("0/num_items", torch.zeros(0), "no finite number of items"),
        ("0/rng/cpu", torch.zeros(3), "no state of a random generator"),
        ("0/pulls/loss", torch.zeros(3, dtype=torch.long), "no gradient"),
        ("9" * 5_000 + "/inputs/input_ids", torch.zeros(1, 1, dtype=torch.long), "a name of 5017 characters"),
        ("7/inputs/input_ids", torch.zeros(1, 1, dtype=torch.long), "no micro-batches numbered from 0"),
        ("-1/inputs/input_ids", torch.zeros(1, 1, dtype=torch.long), "no recorder writes"),
        ("²/inputs/input_ids", torch.zeros(1, 1, dtype=torch.long), "no recorder writes"),
        ("0/else/input_ids", torch.zeros(1, 1, dtype=torch.long), "no recorder writes"),
        ("1/inputs/labels", torch.zeros(1, dtype=torch.long), "a batch without `input_ids`"),
    ],
)
def test_tensors_of_the_batch_that_do_not_belong_together_are_named(
    tmp_path: Path, key: str, tensor: Tensor, said: str
) -> None:
    """Also where the digest fits; and no value of a tensor is quoted."""
    folder = written(tmp_path)
    forge(folder, TRUTH, lambda tensors: tensors.update({key: tensor}))
    with pytest.raises(SnapshotDamagedError, match=said) as caught:
        read_snapshot(folder)
    assert len(str(caught.value)) < 600 and "Remove the snapshot" in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "sequences", "labels"),
    [
        ({IDS: torch.ones(2, 3, 4, dtype=torch.long), "0/inputs/labels": torch.tensor([0, 2])}, 6, None),
        ({IDS: torch.ones(2, 4, dtype=torch.long), "0/kept_back/labels": torch.tensor([1])}, 2, None),
        (
            {
                IDS: torch.ones(1, 5, dtype=torch.long),
                "0/inputs/position_ids": torch.tensor([[0, 1, 2, 0, 1]]),
                "0/inputs/labels": torch.tensor([1, 0]),
            },
            2,
            [1, 0],
        ),
        (
            {
                IDS: torch.ones(2, 4, dtype=torch.long),
                "0/inputs/labels": torch.tensor([1, 0]),
                "1/inputs/input_ids": torch.ones(0, 4, dtype=torch.long),
                "1/inputs/labels": torch.zeros(0, dtype=torch.long),
            },
            2,
            [1, 0],
        ),
    ],
    ids=["multiple choice", "one label for a pair", "packed", "an empty share of a process"],
)
def test_batches_that_training_loops_have_are_read(
    tensors: dict[str, Tensor], sequences: int, labels: list[int] | None
) -> None:
    """Unusual batches are not damaged; odd labels are not scored as classes."""
    check_truth(tensors, "here", arrays=False, vocabulary=10)
    truth = truth_of(tensors)
    assert len(truth.sequences()) == sequences and truth.labels() == labels


def test_a_batch_without_any_sequence_is_refused() -> None:
    """Nobody's data."""
    empty = torch.ones(0, 4, dtype=torch.long)
    with pytest.raises(SnapshotDamagedError, match="no sequence"):
        check_truth({IDS: empty, "1/inputs/input_ids": empty}, "here", arrays=False, vocabulary=10)


def test_an_update_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    """An update is a gradient."""
    folder = written(tmp_path)
    name = "update/classifier.bias"
    forge(folder, OBSERVED, lambda tensors: tensors.update({name: tensors[name].long()}))
    with pytest.raises(SnapshotDamagedError, match=r"an update of 'classifier\.bias' that is not floating point"):
        read_snapshot(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw["facts"].update(max_grad_norm=-1.0),
        lambda raw: raw["facts"].update(max_grad_norm="NaN"),
        lambda raw: raw["facts"].update(max_grad_norm=float("nan")),
        lambda raw: raw["facts"].update(loss_divisor=0.0),
        lambda raw: raw["facts"].update(loss_divisor=float("inf")),
        lambda raw: raw["facts"].update(local_steps=0),
        lambda raw: raw["facts"].update(local_steps=10**18),
        lambda raw: raw["facts"].update(num_labels=10**18),
        lambda raw: raw["facts"].update(num_labels=0),
        lambda raw: raw["facts"].update(batch_size_bound=-3),
        lambda raw: raw["facts"].update(dropout={"a": 7.0}),
        lambda raw: raw["facts"].update(input_shape=[10**18, 2]),
        lambda raw: raw["facts"].update(input_shape=[1] * 1000),
        lambda raw: raw["facts"]["vocabulary"].update(size=-1),
        lambda raw: raw["facts"]["vocabulary"].update(size=10**18),
        lambda raw: raw["facts"]["vocabulary"]["special"].update(cls=10**9),
        lambda raw: raw["recipe"].update(max_grad_norm="nan"),
        lambda raw: raw["recipe"].update(loss_scale=0.0),
        lambda raw: raw["recipe"].update(processes=-1),
        lambda raw: raw["provenance"].update(step=-1),
        lambda raw: raw["provenance"].update(step=10**18),
        lambda raw: raw["provenance"].update(step="12"),
        lambda raw: raw["provenance"].update(framework="\ud800"),
        lambda raw: raw.update(facts=[]),
        lambda raw: raw.update(model=7),
    ],
)
def test_public_facts_that_no_step_has_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Whatever the type they come in."""
    folder = written(tmp_path)
    edit_manifest(folder, change)
    with pytest.raises(SnapshotDamagedError):
        read_snapshot(folder)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"schema":' * 100_000,
        '{"schema": ' + "9" * 5_000 + "}",
        '{"schema": "leakaudit.snapshot/1.1", "schema": "leakaudit.snapshot/1.1"}',
        '{"schema": "\\ud800"}',
        " " * (snapshot_content.MAX_MANIFEST_BYTES + 1),
        "null",
    ],
)
def test_json_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    """Deep, long, doubled, half a character, large."""
    folder = written(tmp_path)
    (folder / MANIFEST).write_text(text)
    began = time.monotonic()
    with pytest.raises(SnapshotError):
        read_manifest(folder)
    assert time.monotonic() - began < SECONDS


def header(folder: Path, entries: Any, *, length: int | None = None) -> Path:
    """Write a safetensors file that declares much and holds nothing."""
    path = folder / TRUTH
    text = json.dumps(entries).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text)
    return path


@pytest.mark.parametrize(
    ("entries", "length"),
    [
        ({"0/inputs/input_ids": {"dtype": "I64", "shape": [10**12], "data_offsets": [0, 8 * 10**12]}}, None),
        ({"0/inputs/input_ids": {"dtype": "I64", "shape": [0] * 1_000_000, "data_offsets": [0, 0]}}, None),
        ({"0/inputs/input_ids": {"dtype": "I64", "shape": [10**19, 0], "data_offsets": [0, 0]}}, None),
        ({"0/inputs/input_ids": {"dtype": "I64", "shape": [2**62, 2**62], "data_offsets": [0, 0]}}, None),
        ({}, 2**63),
        ({}, 10**9),
        ({"a": 7}, None),
        ([], None),
    ],
)
def test_a_file_that_declares_more_than_it_holds_is_refused(tmp_path: Path, entries: Any, length: int | None) -> None:
    """Before memory is asked for."""
    began = time.monotonic()
    with pytest.raises(SnapshotDamagedError):
        read_tensors(header(tmp_path, entries, length=length))
    assert time.monotonic() - began < SECONDS


def test_a_file_larger_than_memory_is_refused_before_it_is_hashed(tmp_path: Path) -> None:
    """A file with holes takes no room on the disk, and hours to hash."""
    folder = written(tmp_path)
    with (folder / OBSERVED).open("r+b") as file:
        file.truncate(2**42)
    began = time.monotonic()
    with pytest.raises(SnapshotDamagedError, match=r"a file larger than this machine.s memory of .*; found 4398 GB"):
        read_snapshot(folder)
    assert time.monotonic() - began < SECONDS


def test_sequences_without_tokens_are_bounded_although_they_take_no_bytes(tmp_path: Path) -> None:
    """A batch of arrays holds (B, 0) token ids."""
    many = {IDS: torch.zeros(10**9, 0, dtype=torch.long)}
    with pytest.raises(SnapshotDamagedError, match="too many sequences; found 1000000000"):
        snapshot_content.check_truth(many, "here", arrays=True)


def test_too_many_micro_batches_are_refused() -> None:
    """In less time than it takes to build them."""
    one = torch.zeros(1, 1, dtype=torch.long)
    many = {f"{number}/inputs/input_ids": one for number in range(100_000)}
    began = time.monotonic()
    with pytest.raises(SnapshotDamagedError, match="more than 4096"):
        snapshot_content.check_truth(many, "here", arrays=False)
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**7},
        {"num_hidden_layers": 10**300},
        {"num_hidden_layers": 9_999},
        {"num_labels": 10**9, "id2label": None, "label2id": None},
        {"vocab_size": 10**9},
        {"hidden_size": 10**6, "num_attention_heads": 1},
        {"intermediate_size": 10**9},
        {"max_position_embeddings": 10**12},
        {"num_attention_heads": 0},
        {"hidden_act": "\ud800"},
        {"text_config": {"num_hidden_layers": 10**9}},
    ],
)
def test_a_model_larger_than_its_weights_is_refused_before_it_is_built(config: dict[str, Any]) -> None:
    """Whatever key of the configuration asks for it."""
    model = tiny.bert()
    recipe = ModelRecipe.of(model)
    recipe = recipe.model_copy(update={"config": recipe.config | config})
    began = time.monotonic()
    with pytest.raises(ModelError):
        build_model(recipe, state_of(model))
    assert time.monotonic() - began < SECONDS


def test_a_made_model_larger_than_its_weights_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a recipe names a call, its arguments may ask for anything."""
    monkeypatch.setattr(factories, "_vouched", {"torch.nn:Linear"})
    recipe = ModelRecipe(
        class_name="Linear", made_by="torch.nn:Linear", arguments={"in_features": 40_000, "out_features": 40_000}
    )
    with pytest.raises(ModelError, match="larger than its 2 stored weights"):
        build_model(recipe, {"weight": torch.zeros(1, 1), "bias": torch.zeros(1)})


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    """The same check on both sides, and nothing is left behind."""
    model = tiny.bert()
    step = tiny.client_step(model, tiny.bert_tokenizer(), ["the dog"], [0])
    odd, update = step.truth.micro_batches[0], step.update()
    odd.inputs["attention_mask"] = torch.ones(1, 1, 4, 3)  # type: ignore[index]
    with pytest.raises(SnapshotDamagedError, match="not of the shape of `input_ids`"):
        write_snapshot(
            tmp_path / "000001.ready",
            update=update,
            weights=state_of(model),
            truth=type(step.truth)((odd,)),
            manifest=Manifest(
                model=ModelRecipe.of(model),
                facts=step.facts,
                recipe=step.recipe,
                provenance=Provenance(framework="test", step=1),
            ),
        )
    assert list(tmp_path.iterdir()) == []
