"""Pictures and tables: any classifier is audited for labels.

This works from the command line and from code.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from leakaudit.audit.simulation.arrays import ArraySimulation, ArraySimulator
from leakaudit.audit.verification import verify
from leakaudit.cli import main
from leakaudit.client.array_batches import array_batch
from leakaudit.client.step import ClientStep
from leakaudit.errors import ConfigError, DataError
from leakaudit.models.array_classifier import save_auxiliary
from leakaudit.results.schema import VerificationStatus


def table_classifier() -> nn.Module:
    """Return a classifier of rows of six numbers into three classes."""
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def no_classifier() -> nn.Module:
    """Return a model with one output where three are wanted."""
    return nn.Linear(6, 1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Give a file of 40 rows."""
    rng = torch.Generator().manual_seed(0)
    path = tmp_path / "rows.safetensors"
    save_auxiliary(path, {"inputs": torch.randn(40, 6, generator=rng)}, torch.randint(3, (40,), generator=rng))
    return path


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_step_of_arrays_is_verified_like_one_of_text(data: Path, mode: str) -> None:
    """Dropout masks come again from the kept random state."""
    made = ArraySimulation(table_classifier(), data, batch_size=8, steps=2, mode=mode)  # type: ignore[arg-type]
    snapshots = list(ArraySimulator(made))
    assert len(snapshots) == 2
    for snapshot in snapshots:
        assert verify(ClientStep.of(snapshot), snapshot.observation.update).status is VerificationStatus.VERIFIED
        assert len(snapshot.truth.labels() or []) == len(snapshot.truth.sequences()) == 8


def test_local_steps_and_frozen_parameters_are_those_of_text(data: Path) -> None:
    """The update is a difference of weights, without the frozen layer."""
    what = ArraySimulation(
        table_classifier(), data, batch_size=4, steps=1, local_steps=3, learning_rate=0.1, freeze=("net.0.*",)
    )
    (snapshot,) = ArraySimulator(what)
    assert snapshot.observation.facts.view == "delta" and len(snapshot.truth.micro_batches) == 3
    assert set(snapshot.observation.update) == {"net.3.weight", "net.3.bias"}


def test_an_audit_of_a_table_classifier_from_the_command_line(data: Path, tmp_path: Path) -> None:
    """Label attacks run, text attacks find no text, the control is recovered."""
    out = tmp_path / "out"
    words = f"simulate --model {__name__}:table_classifier --batch-size 8 --steps 3 --controls 1"
    attacks = "span,tag,embedding-rows,random-labels,ilrg,llg-star"
    asked = [*words.split(), "--data", str(data), "--attacks", attacks, "--out", str(out)]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code in (0, 3, 4), result.output
    results = json.loads((out / "results.json").read_text())
    by_attack = {a["attack"]: a for a in results["attempts"]}
    assert by_attack["ilrg"]["status"] == by_attack["llg-star"]["status"] == "ran"
    assert by_attack["ilrg"]["scores"]["label_accuracy"]["value"] > 0.8
    for name in ("span", "tag", "embedding-rows"):
        assert by_attack[name]["status"] == "not_applicable" and "hold no text" in by_attack[name]["reason"]
    labels = results["controls"]["kinds"]["labels"]
    assert labels["k"] == labels["n"] == 1
    assert "Labels" in (out / "report.html").read_text()


def test_what_does_not_fit_is_said(data: Path, tmp_path: Path) -> None:
    """Models that cannot be made, wrong data, and sizes that make no batch."""
    with pytest.raises(ConfigError, match=r"gives \(1, 1\) for one example; a classifier gives \(1, 3\)"):
        ArraySimulator(ArraySimulation(f"{__name__}:no_classifier", data))
    with pytest.raises(ConfigError, match=r"does not take inputs of shape \(6,\)"):
        ArraySimulator(ArraySimulation(nn.Linear(5, 3), data))
    for name, reason in (("nowhere.at_all:x", "cannot be imported"), ("math", "write `package.module:function`")):
        with pytest.raises(ConfigError, match=reason):
            ArraySimulator(ArraySimulation(name, data))
    with pytest.raises(DataError, match="labels outside 0 to 1"):
        ArraySimulator(ArraySimulation(nn.Linear(6, 2), data, num_labels=2))
    with pytest.raises(DataError, match="fewer than one batch of 64"):
        ArraySimulator(ArraySimulation(table_classifier(), data, batch_size=64))
    save_auxiliary(tmp_path / "ids.safetensors", {"input_ids": torch.zeros(3, 4)}, torch.zeros(3, dtype=torch.long))
    with pytest.raises(DataError, match="takes `inputs`"):
        ArraySimulator(ArraySimulation(table_classifier(), tmp_path / "ids.safetensors"))
    with pytest.raises(ConfigError, match="need a learning rate"):
        ArraySimulation(table_classifier(), data, local_steps=2)
    with pytest.raises(ConfigError, match="at least 1, got 0, 10 and 1"):
        ArraySimulation(table_classifier(), data, batch_size=0)
    with pytest.raises(DataError, match="at least one example with one label each"):
        array_batch(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 10**18]), r"label above 99,999.*renumber"),
        (torch.tensor([0.0, 1.0]), r"`labels` is a float32 tensor"),
        (torch.tensor([False, True]), r"`labels` is a bool tensor"),
        (torch.tensor([[0], [1]]), r"of shape \(2, 1\)"),
        (torch.tensor([], dtype=torch.int64), r"holds no examples"),
    ],
)
def test_labels_that_are_no_classes_are_refused(tmp_path: Path, labels: torch.Tensor, message: str) -> None:
    """A huge label is an identifier in the wrong field, and would fill memory."""
    path = tmp_path / "arrays.safetensors"
    save_auxiliary(path, {"inputs": torch.rand(len(labels), 3)}, labels)
    with pytest.raises(DataError, match=message):
        ArraySimulator(ArraySimulation(model=torch.nn.Linear(3, 2), data=path))
