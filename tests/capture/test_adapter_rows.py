"""Adapters and small optimizers by base: what each cell of the page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import frozen_base
from tests.support import adapter_rows
from tests.support.adapter_rows import ADAPTERS, OPTIMIZERS, columns, on_page, said_of, small, train, worst
from tests.support.own_optimizers import Lion

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

UNKNOWN = ("8 bits", "paged", "Lion", "schedule-free", "Muon")
"""Parts of the names of the rows whose rule or state is not known."""


def _cells() -> list[Any]:
    """Return every cell of the page.

    Most of them repeat a row and a column that other cells show.
    """
    rows, first = list(ADAPTERS), columns()[0]
    quick = {(row, *first) for row in rows} | {(rows[0], *column) for column in columns()}
    every = [(row, *column) for column in columns() for row in rows]
    return [pytest.param(*cell, marks=() if cell in quick else pytest.mark.integrations) for cell in every]


@pytest.mark.parametrize(("row", "base", "unit"), _cells())
def test_adapters_on_a_base_are_what_the_page_says(row: str, base: str, unit: str, tmp_path: Path) -> None:
    """`python -m tests.support.adapter_rows --write` makes the page again."""
    said = on_page("adapters")[row][columns().index((base, unit))]
    optimizer = adapter_rows.adamw if unit == "round" else adapter_rows.sgd
    found = train(lambda: ADAPTERS[row].on(base), optimizer, unit, tmp_path)
    assert said_of(found).split(",")[0] == said.split(",")[0], found.refusal
    assert len(found.snapshots) == (1 if unit == "round" else 2)
    assert (worst(found).relative_error or 0.0) < 1e-5


def test_the_page_has_every_row_of_adapters_and_all_are_verified() -> None:
    """With an error of less than rounding."""
    page = on_page("adapters")
    assert set(page) == set(ADAPTERS)
    assert all(
        cell.startswith("verified, ") and float(cell.split(", ")[1]) < 1e-5 for row in page.values() for cell in row
    )


@pytest.mark.parametrize("row", OPTIMIZERS)
def test_an_optimizer_on_a_base_of_4_bits_is_what_the_page_says(row: str, tmp_path: Path) -> None:
    """A gradient is verified whatever the rule; a round of an unknown one is read."""
    said = on_page("optimizers")[row]
    found = adapter_rows.optimizer_cells(row, tmp_path)
    assert [cell.split(",")[0] for cell in found[:2]] == [cell.split(",")[0] for cell in said[:2]]
    assert said[0].startswith("verified, ")
    assert (said[1] == "unverifiable, unknown moments") is any(part in row for part in UNKNOWN)
    assert found[2] == said[2] and "`: 0 of" not in found[2]


def test_the_page_has_every_row_of_optimizers() -> None:
    assert set(on_page("optimizers")) == set(OPTIMIZERS)


def test_schedule_free_as_its_package_has_it_is_like_the_stand_in(tmp_path: Path) -> None:
    """It counts its steps in an option, which is no change of the rule."""
    schedulefree: Any = pytest.importorskip("schedulefree")
    make = lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=1e-3)
    for unit in ("step", "round"):
        mine = train(small("schedule-free"), make, unit, tmp_path / unit)
        other = train(
            small("schedule-free"), OPTIMIZERS["AdamW, schedule-free (stand-in)"], unit, tmp_path / f"{unit} 2"
        )
        assert said_of(mine) == said_of(other)


def test_a_decay_that_changes_during_a_round_of_an_unknown_rule_is_refused(tmp_path: Path) -> None:
    """Attacks on rows ask for the decay, and it must be one number."""

    class Changing(Lion):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.param_groups[0]["weight_decay"] += 0.01

    found = train(small("Lion"), Changing, "round", tmp_path)
    assert not found.snapshots and "the option `weight_decay` of its optimizer changed" in found.refusal


def test_a_trained_bias_beside_a_packed_matrix_is_in_the_update(tmp_path: Path) -> None:
    """Its update is that of autograd, and not zero."""
    found = train(lambda: ADAPTERS['`bias="lora_only"`'].on("4 bits"), adapter_rows.sgd, "step", tmp_path)
    biases = {n: u for n, u in found.snapshots[0].observation.update.items() if n.endswith(".bias")}
    assert len(biases) == 4 and all(bool(torch.isfinite(update).all()) for update in biases.values())
    assert all(bool(update.any()) for update in biases.values())


@pytest.mark.parametrize("base", frozen_base.BASES)
def test_a_second_snapshot_adds_the_adapters_alone(base: str, tmp_path: Path) -> None:
    """The frozen weights are in one file, in the type in which the layers multiply."""
    small_shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    found = frozen_base.measure(small_shape, base, tmp_path)
    item = 2 if "bfloat16" in base else 4
    head, matrices = 4 * 64 + 4, 2 * 2 * 2 * 64 * frozen_base.RANK  # A and B of two layers in each of two blocks
    adapters = 4 * (head + matrices)  # in float32
    assert found.base == pytest.approx(item * found.parameters, rel=0.02)
    assert found.own[0] == pytest.approx(found.own[1], rel=0.05)
    assert 1.9 * adapters < found.own[1] < 2 * adapters + 100_000  # weights, update; batch and description of the model
