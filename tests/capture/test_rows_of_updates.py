"""Of a table's update, the rows that are not zero are kept, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.recording.copies import CopyBuffers, Source
from leakaudit.client.snapshot import OBSERVED
from leakaudit.errors import NonFiniteUpdateError
from leakaudit.models.tensors import bytes_of, in_rows
from leakaudit.storage.disk_use import size_of
from leakaudit.storage.snapshot_files import read_tensors
from leakaudit.storage.snapshots import read_snapshot
from tests.support import tiny
from tests.support.tiny_trainer import audit_config, stamp, without_side_process

TABLE = "bert.embeddings.word_embeddings.weight"


@pytest.mark.parametrize("shape", [(1000, 16), (1000, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_matrix_of_few_rows_becomes_sparse_and_comes_back_the_same(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """The smallest number and NaN are no zeros."""
    matrix = torch.zeros(shape, dtype=dtype)
    matrix[3], matrix[500, 0], matrix[700, 1], matrix[999, -1] = (
        1.5,
        -0.0,
        torch.finfo(dtype).smallest_normal,
        torch.nan,
    )
    found = in_rows(matrix)
    assert found.is_sparse and found.indices().tolist() == [[3, 700, 999]]
    assert bytes_of(found) < bytes_of(matrix) / 100
    assert torch.equal(found.to_dense().nan_to_num(7.0), matrix.nan_to_num(7.0))
    matrix[3] = 2.0
    assert float(found.to_dense()[3, 0]) == 1.5, "the values are a copy"


@pytest.mark.parametrize(
    "matrix", [torch.ones(1000, 8), torch.ones(100), torch.zeros(0, 4), torch.eye(2), torch.ones(4, 4, 4)]
)
def test_what_is_mostly_not_zero_stays_as_it_is(matrix: torch.Tensor) -> None:
    """Also where the rows that are looked at first are zero."""
    assert in_rows(matrix) is matrix
    odd = torch.ones(1000, 8)
    odd[::15] = 0
    assert in_rows(odd) is odd


def _train(
    folder: Path, *, sparse: bool = False, change: bool = False, padding: int | None = None
) -> tuple[nn.Module, torch.Tensor]:
    """Train one step; return the model and the gradient of its table of words."""
    model: Any = tiny.bert().train()
    words = model.bert.embeddings.word_embeddings
    if sparse:
        words.sparse, words.padding_idx = True, padding
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokenizer = tiny.bert_tokenizer()
    batch = tokenizer(["the old dog", "a small blue fish"], padding=True, return_tensors="pt")
    with without_side_process(), watch(model, optimizer, tokenizer=tokenizer, config=audit_config(folder)):
        model(**batch, labels=torch.tensor([0, 1])).loss.backward()
        if change:
            words.weight.grad.add_(1e-3)
        table = words.weight.grad
        optimizer.step()
    return model, table.to_dense()


@pytest.mark.parametrize("sparse", [False, True])
def test_a_kept_step_holds_the_rows_of_its_words_only(tmp_path: Path, sparse: bool) -> None:
    """A gradient that torch itself keeps sparse as well."""
    model, table = _train(tmp_path, sparse=sparse)
    (path,) = (tmp_path / "audit" / "spool").glob("*.ready")
    stored = read_tensors(path / OBSERVED)
    assert f"update/{TABLE}" not in stored
    rows = len(stored[f"row_index/{TABLE}"])
    assert rows - sparse <= int((table != 0).any(1).sum()) <= rows < len(table) / 2, (
        "torch keeps the row of the padding"
    )
    assert torch.equal(read_snapshot(path).observation.update[TABLE], table)
    numbers = sum(p.numel() for p in model.parameters())
    assert size_of(path) < 4 * (2 * numbers - table.numel() / 2) + 300_000


@pytest.mark.parametrize("padding", [None, 0])
def test_a_step_with_a_sparse_gradient_is_verified(tmp_path: Path, padding: int | None) -> None:
    """The update is computed again as a dense one."""
    _train(tmp_path, sparse=True, padding=padding)
    (path,) = (tmp_path / "audit" / "spool").glob("*.ready")
    found = stamp(read_snapshot(path))
    assert found.status.value == "verified", found.note


def test_an_update_of_every_row_is_kept_whole(tmp_path: Path) -> None:
    """As noise or a tied head make it."""
    _, table = _train(tmp_path, change=True)
    (path,) = (tmp_path / "audit" / "spool").glob("*.ready")
    assert f"update/{TABLE}" in read_tensors(path / OBSERVED)
    assert torch.equal(read_snapshot(path).observation.update[TABLE], table)


def test_a_gradient_of_single_sparse_entries_is_kept_dense() -> None:
    """Only whole rows are stored as rows."""
    dense = torch.zeros(40, 4)
    dense[3, 1] = 2.0
    kept = CopyBuffers(None).into_buffer("u/table", Source(dense.to_sparse(), torch.float32))
    assert not kept.is_sparse and torch.equal(kept, dense)


def test_rows_that_are_not_finite_are_refused() -> None:
    """As any update is."""
    from leakaudit.client.observation import check_finite

    matrix = torch.zeros(100, 4)
    matrix[3] = torch.inf
    with pytest.raises(NonFiniteUpdateError):
        check_finite({"table": in_rows(matrix)})
