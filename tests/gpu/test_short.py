"""The tests for a GPU, tried on the CPU with a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.families import FAMILIES, batches, measured, off, train


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tests_for_a_gpu_pass_on_a_cpu(family: str, tmp_path: Path) -> None:
    """Two steps of each family."""
    trained = train(FAMILIES[family], "float32", "cpu", 2, tmp_path)
    assert off(trained) == []
    row = measured(family, "float32", trained, "cpu", [1])
    assert row.verified == (2, 2)
    assert row.error < (1e-5, 1e-5)


def test_a_kept_update_that_is_not_the_optimizers_is_named(tmp_path: Path) -> None:
    """One entry of one parameter is enough."""
    trained = train(FAMILIES["GPT-2"], "float32", "cpu", 2, tmp_path)
    name = next(iter(trained.given[1]))
    trained.given[1][name].view(-1)[0] += 1e-6
    assert off(trained) == [f"step 1: {name}"]


def test_a_step_that_is_not_verified_fails(tmp_path: Path) -> None:
    """An update of another batch is a mismatch on every device."""
    trained = train(FAMILIES["GPT-2"], "float32", "cpu", 2, tmp_path)
    trained.snapshots[1].observation.update.update(trained.given[0])  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match=r"verified \[1, 1\]: cosine"):
        measured("GPT-2", "float32", trained, "cpu", [0])


def test_training_in_bf16_is_verified(tmp_path: Path) -> None:
    """And its updates are kept to the bit."""
    trained = train(FAMILIES["Llama"], "bf16", "cpu", 2, tmp_path)
    assert off(trained) == []
    assert measured("Llama", "bf16", trained, "cpu", []).verified == (2, 2)
    assert trained.snapshots[0].observation.facts.dtype == str(torch.bfloat16).removeprefix("torch.")


def test_the_texts_of_a_batch_differ() -> None:
    """Two equal texts would count as one recovered text."""
    for batch in batches(FAMILIES["GPT-2"], 50):
        assert len(set(map(tuple, batch["input_ids"].tolist()))) == 2
