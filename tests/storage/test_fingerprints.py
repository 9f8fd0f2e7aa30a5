"""A fingerprint of a weight changes with its bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leakaudit.errors import SnapshotError
from leakaudit.storage.frozen_weights import CHUNK, PIECE, RUN, FrozenWeights, checksum_of, sample_of


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (RUN, 2 * RUN + 3)])
def test_every_entry_counts_whatever_the_type_and_the_size(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The highest bit of an entry changes, which sums modulo 2^64 lose easily."""
    tensor = numbers(*shape, dtype=dtype)
    was, entries = checksum_of(tensor), tensor.view(-1)
    for entry in {0, 1, tensor.numel() // 2, tensor.numel() - 1} & set(range(tensor.numel())):
        changed = entries.clone()
        changed.view(torch.uint8)[(entry + 1) * tensor.element_size() - 1] ^= 1 if dtype is torch.bool else 128
        assert not torch.equal(checksum_of(changed.view(shape)), was)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.flip(0),
        lambda w: -w,
        lambda w: w.roll(1, 1),
        lambda w: torch.cat([w[1:2], w[:1], w[2:]]),
        lambda w: torch.cat([-w[:2], w[2:]]),
    ],
    ids=["rows backwards", "signs", "columns", "two rows", "signs of two rows"],
)
def test_the_same_words_in_another_order_are_another_weight(change: object) -> None:
    """A plain sum modulo 2^64 is the same after each of these changes."""
    weight = numbers(40, 2 * RUN, dtype=torch.float64)
    assert not torch.equal(checksum_of(change(weight)), checksum_of(weight))  # type: ignore[operator]


def test_flipped_signs_of_many_weights_never_cancel() -> None:
    """In float64 each flips the highest bit of a word only."""
    weights = torch.randn(2000, 10 * RUN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert not any(torch.equal(checksum_of(w), checksum_of(-w)) for w in weights)


def test_reading_in_one_thread_gives_the_same_checksum() -> None:
    """Whatever is left over after chunks and pieces."""
    for length in (2 * CHUNK, 2 * CHUNK + RUN + 1, PIECE + CHUNK + 5):
        tensor = torch.arange(length)
        assert torch.equal(checksum_of(tensor, one_thread=True), checksum_of(tensor))


def test_a_transposed_weight_is_read_where_it_is() -> None:
    """In the order of its memory; a part of it with gaps is not taken for frozen."""
    weight = numbers(6, 10)
    assert torch.equal(checksum_of(weight.t()), checksum_of(weight))
    assert torch.equal(sample_of(weight.t()), sample_of(weight))
    assert not FrozenWeights.of([("w", weight[:, :4])]).tensors


def test_a_sample_of_a_matrix_has_words_of_every_column() -> None:
    """Although its rows are a power of two long, as those of most models are."""
    columns = torch.arange(64).expand(4096, 64).contiguous()
    assert set(sample_of(columns).tolist()) == set(range(64))
    assert 256 <= len(sample_of(columns)) < 512


def test_a_weight_that_was_found_changed_is_never_frozen_again() -> None:
    """All later steps know of it."""
    weights = {"a": nn.Parameter(numbers(9000)), "b": nn.Parameter(numbers(9000))}
    first = FrozenWeights.of(weights.items())
    weights["a"].data[3] += 1
    second = first.still_in(weights.items())
    assert second.tensors.keys() == {"a", "b"}, "the change is in no sampled word"
    with pytest.raises(SnapshotError, match=r"'a' .*not known whether the step saw"):
        second.check()
    assert first.still_in(weights.items()).tensors.keys() == second.still_in(weights.items()).tensors.keys() == {"b"}
