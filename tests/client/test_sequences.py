"""Which texts a batch holds: every expectation is written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from leakaudit.client.sequences import Reading, texts_of
from leakaudit.client.truth import MicroBatch, Truth

LOWEST = torch.finfo(torch.float32).min


def ids(*rows: Any) -> Tensor:
    return torch.tensor(rows)


def blocks(*sizes: int, causal: bool = False) -> Tensor:
    """Return (1, 1, T, T): each token attends to those of its own text."""
    mask: Tensor = torch.block_diag(*(torch.ones(size, size) for size in sizes))
    return (mask.tril() if causal else mask)[None, None]


PACKED = {"input_ids": ids([5, 6, 7, 8, 9])}
TWO = [(5, 6, 7), (8, 9)]


@pytest.mark.parametrize(
    "more",
    [
        {"position_ids": ids([0, 1, 2, 0, 1])},
        {"position_ids": ids([0, 1, 2, 0, 1]), "attention_mask": blocks(3, 2).bool()},
        {"position_ids": ids([0, 1, 2, 0, 1]), "attention_mask": torch.ones(1, 5)},
        {"position_ids": ids([2, 3, 4, 2, 3])},
        {"position_ids": ids([0, 1, 2, 0, 1]).expand(3, 1, 5)},
        {"attention_mask": blocks(3, 2).bool()},
        {"attention_mask": blocks(3, 2, causal=True)},
        {"attention_mask": (1 - blocks(3, 2)) * LOWEST},
        {"attention_mask": blocks(3, 2)[0]},
        {"attention_mask": ids([1, 1, 1, 2, 2])},
        {"seq_idx": ids([0, 0, 0, 1, 1])},
        {"cu_seq_lens_q": torch.tensor([0, 3, 5], dtype=torch.int32)},
    ],
    ids=[
        "positions",
        "positions and a mask of pairs",
        "positions and a mask",
        "positions of RoBERTa",
        "positions in three dimensions",
        "mask of pairs",
        "causal mask of pairs",
        "mask that is added",
        "mask of pairs without heads",
        "mask that numbers texts",
        "numbers of texts",
        "lengths for flash attention",
    ],
)
def test_packed_texts_are_cut_apart(more: dict[str, Tensor]) -> None:
    """Whatever it is that tells them apart."""
    assert Truth((MicroBatch({**PACKED, **more}),)).sequences() == TWO


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"position_ids": ids([0, 0, 0, 0, 0])},
        {"position_ids": ids([3, 4, 5, 6, 7])},
        {"attention_mask": torch.ones(1, 1, 5, 5).tril()},
        {"attention_mask": torch.ones(1, 1, 1, 5)},
        {"cu_seq_lens_q": torch.tensor([0, 5])},
    ],
    ids=["nothing", "positions all alike", "shifted positions", "causal", "one row for all", "one length"],
)
def test_one_text_stays_in_one_piece(more: dict[str, Tensor]) -> None:
    """Nothing here says that a second one begins."""
    assert Truth((MicroBatch({**PACKED, **more}),)).sequences() == [(5, 6, 7, 8, 9)]


def test_two_packed_rows_are_four_texts() -> None:
    """Padding at the end of a row belongs to none of them."""
    batch = {
        "input_ids": ids([5, 6, 7, 8, 0], [4, 5, 6, 7, 8]),
        "attention_mask": ids([1, 1, 1, 1, 0], [1, 1, 1, 1, 1]),
        "position_ids": ids([0, 1, 0, 1, 2], [0, 0, 1, 2, 3]),
    }
    assert Truth((MicroBatch(batch),)).sequences() == [(5, 6), (7, 8), (4,), (5, 6, 7, 8)]


def test_padding_on_the_left_is_no_text() -> None:
    """The mask decides, then positions, then the padding token."""
    rows, mask = ids([0, 0, 5, 6], [7, 8, 9, 4]), ids([0, 0, 1, 1], [1, 1, 1, 1])
    true = [(5, 6), (7, 8, 9, 4)]
    positions = ids([1, 1, 0, 1], [0, 1, 2, 3])
    assert Truth((MicroBatch({"input_ids": rows, "attention_mask": mask}),)).sequences() == true
    padded = {"input_ids": rows, "attention_mask": mask, "position_ids": positions}
    assert Truth((MicroBatch(padded),)).sequences() == true
    bare = MicroBatch({"input_ids": rows, "position_ids": positions})
    assert Truth((bare,), Reading(pad=0)).sequences() == true


def test_without_a_mask_padding_is_told_by_its_token() -> None:
    """A padding token that also ends texts is kept once at the end.

    Inside a text it is a word like any other.
    """
    rows = {"input_ids": ids([5, 0, 6, 0, 0], [7, 8, 9, 4, 0])}
    assert Truth((MicroBatch(rows),), Reading(pad=0)).sequences() == [(5, 0, 6), (7, 8, 9, 4)]
    ending = Reading(pad=0, pad_ends_texts=True)
    assert Truth((MicroBatch(rows),), ending).sequences() == [(5, 0, 6, 0), (7, 8, 9, 4, 0)]
    assert Truth((MicroBatch(rows),)).sequences() == [(5, 0, 6, 0, 0), (7, 8, 9, 4, 0)]


def test_masked_words_are_filled_in_from_the_labels() -> None:
    """The id 103 hides 6, chance replaced 8 by 9, and 7 is shown and predicted."""
    batch = {"input_ids": ids([2, 103, 7, 9, 3]), "attention_mask": torch.ones(1, 5)}
    labels = ids([-100, 6, 7, 8, -100])
    (text,) = texts_of(batch, labels, Reading("masked-lm"))
    assert text.ids == (2, 6, 7, 8, 3) and text.masked == (6, 8)
    (shown,) = texts_of(batch, labels, Reading("other"))
    assert shown.ids == (2, 103, 7, 9, 3) and shown.masked == ()


def test_classes_of_tokens_are_not_filled_in() -> None:
    """Labels of token classification have the shape of the text, and are no words."""
    batch = MicroBatch({"input_ids": ids([2, 7, 3]), "labels": ids([0, 4, 0])})
    assert Truth((batch,), Reading("other")).sequences() == [(2, 7, 3)]


@pytest.mark.parametrize("withheld_inputs", [False, True])
def test_the_targets_of_a_decoder_are_texts_of_their_own(withheld_inputs: bool) -> None:
    """After those of the encoder; -100 and padding are no words of them."""
    inputs = {"input_ids": ids([5, 6, 1], [7, 8, 1]), "attention_mask": ids([1, 1, 1], [1, 1, 1])}
    labels = {"labels": ids([9, 1, -100], [4, 9, 1])}
    batch = MicroBatch(
        {**inputs, **({} if withheld_inputs else labels)}, withheld_inputs=labels if withheld_inputs else {}
    )
    truth = Truth((batch,), Reading("encoder-decoder", pad=0))
    assert truth.sequences() == [(5, 6, 1), (7, 8, 1), (9, 1), (4, 9, 1)]
    assert truth.examples() == 2
    shifted = MicroBatch({**inputs, "decoder_input_ids": ids([0, 9, 0], [0, 4, 9])})
    assert Truth((shifted,), Reading("encoder-decoder", pad=0)).sequences()[2:] == [(9,), (4, 9)]


def test_texts_of_a_multiple_choice_are_read_one_by_one() -> None:
    """Two questions with three choices each are six sequences."""
    rows = torch.arange(24).reshape(2, 3, 4)
    mask = torch.ones_like(rows)
    mask[0, 0, 3] = 0
    batch = MicroBatch({"input_ids": rows, "attention_mask": mask, "labels": torch.tensor([2, 0])})
    found = Truth((batch,)).sequences()
    assert len(found) == 6 and found[:2] == [(0, 1, 2), (4, 5, 6, 7)] and Truth((batch,)).labels() is None


def test_a_pass_over_texts_without_labels_adds_none() -> None:
    """In FixMatch the labels are those of the first pass.

    An unknown label makes all unknown.
    """
    labelled = MicroBatch({"input_ids": ids([5, 6], [7, 8])}, withheld_inputs={"labels": torch.tensor([1, 0])})
    without = MicroBatch(
        {"input_ids": ids([9, 9], [4, 4])}, withheld_inputs={"labels": torch.zeros(0, dtype=torch.long)}
    )
    unknown = MicroBatch({"input_ids": ids([9, 9], [4, 4])})
    assert Truth((labelled, without)).labels() == [1, 0]
    assert Truth((without, labelled)).labels() == [1, 0]
    assert Truth((labelled, unknown)).labels() is None and Truth((without,)).labels() is None
