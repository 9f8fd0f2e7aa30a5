"""The private texts of a batch, read from its tensors.

Padding is removed, packed texts are split, masked words are filled in, and a decoder's targets are added.

Letters: N rows, T tokens of one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from leakaudit.client.facts import IGNORED_LABEL

LENGTHS_OF_PACKED = ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens")
"""Arguments that tell flash attention where packed texts end.

Each is (texts + 1,) cumulative token counts, beginning with 0.
"""


TARGETS_MASK = "decoder_attention_mask"


@dataclass(frozen=True)
class Reading:
    """Facts about a model and its tokenizer that reading texts needs."""

    task: str = "other"
    """Task of the model, as in `leakaudit.client.facts.PublicFacts`.

    It tells whether labels are words, and to which text they belong.
    """
    pad: int | None = None
    """Id of the padding token; None if there is no padding token."""
    pad_ends_texts: bool = False
    """Whether the padding token also ends texts, as in GPT-2."""


PLAIN = Reading()
"""Reading without any facts: labels are not words, and no token is padding."""


@dataclass(frozen=True)
class Text:
    """One private text of a batch."""

    ids: tuple[int, ...]
    """Token ids in order, special tokens included.

    Padding is left out; masked words are filled in.
    """
    masked: tuple[int, ...] = ()
    """The ids that were hidden from the model, in order.

    A masked language model has to predict them.
    """


def texts_of(inputs: Mapping[str, Tensor], labels: Tensor | None, reading: Reading) -> list[Text]:
    """Return the texts of one forward pass.

    The texts that the model read come first, then the texts that its decoder had to write.

    Args:
        inputs: arguments of the forward pass; `input_ids` is (N, T) or (..., T).
        labels: labels of the pass, passed to the model or not; None if they are unknown.
        reading: how to read the tensors.
    """
    return [*texts_read(inputs, labels, reading), *_texts_written(inputs, labels, reading)]


def texts_read(inputs: Mapping[str, Tensor], labels: Tensor | None, reading: Reading) -> list[Text]:
    """Return the texts that `input_ids` hold, in the order of the batch.

    In a multiple choice, each choice is a text of its own.

    Args:
        inputs: as for `texts_of`.
        labels: as for `texts_of`.
        reading: as for `texts_of`.
    """
    shown = _rows(inputs["input_ids"])  # (N, T)
    true = shown
    if reading.task == "masked-lm" and labels is not None and labels.shape == inputs["input_ids"].shape:
        answers = _rows(labels)
        true = torch.where(answers == IGNORED_LABEL, shown, answers)
    kept = _kept(inputs, shown, reading)
    found: list[Text] = []
    for number in range(len(shown)):
        places = kept[number].nonzero().flatten().tolist()
        words, seen = true[number].tolist(), shown[number].tolist()
        for piece in _pieces(inputs, number, places):
            hidden = tuple(words[place] for place in piece if words[place] != seen[place])
            found.append(Text(tuple(words[place] for place in piece), hidden))
    return found


def _texts_written(inputs: Mapping[str, Tensor], labels: Tensor | None, reading: Reading) -> list[Text]:
    """Return the texts that the decoder of an encoder-decoder has to write.

    Other models have no such texts.
    """
    if reading.task == "encoder-decoder" and labels is not None and labels.dim() > 1:
        rows = _rows(labels)
        kept = (rows != IGNORED_LABEL) & _without_padding(rows, reading)
    elif (given := inputs.get("decoder_input_ids")) is not None:
        rows = _rows(given)
        mask = inputs.get(TARGETS_MASK)
        fits = mask is not None and mask.shape == given.shape
        kept = _rows(mask).bool() if mask is not None and fits else _without_padding(rows, reading)
    else:
        return []
    return [Text(tuple(row[keep].tolist())) for row, keep in zip(rows, kept, strict=True)]


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor (..., T) as (N, T)."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]


def _kept(inputs: Mapping[str, Tensor], rows: Tensor, reading: Reading) -> Tensor:
    """Return (N, T) whether a token belongs to a text.

    The attention mask decides. Without a mask, the padding token decides.
    """
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape == inputs["input_ids"].shape:
        return _rows(mask).bool()
    if (allowed := _allowed(inputs, rows)) is not None:
        return allowed.diagonal(dim1=-2, dim2=-1)
    return _without_padding(rows, reading)


def _allowed(inputs: Mapping[str, Tensor], rows: Tensor) -> Tensor | None:
    """Return (N, T, T) whether a token attends to another one.

    None if the mask does not contain this.

    In masks of truth values or of 0 and 1, entries other than 0 allow attention. In masks that are added to the scores, entries of 0 do.
    """
    mask, width = inputs.get("attention_mask"), rows.shape[1]
    if mask is None or mask.dim() not in (3, 4) or mask.shape[-1] != width or mask.shape[-2] not in (1, width):
        return None
    added = mask.is_floating_point() and not bool((mask > 0).any())
    allowed = (mask >= 0) if added else mask.bool()
    allowed = allowed.any(dim=1) if allowed.dim() == 4 else allowed
    return allowed.expand(len(rows), width, -1) if len(allowed) in (1, len(rows)) else None


def _without_padding(rows: Tensor, reading: Reading) -> Tensor:
    """Return (N, T) whether a token is not part of the padding at either end.

    If the padding token also ends texts, one of them is kept.
    """
    kept = torch.ones_like(rows, dtype=torch.bool)
    if reading.pad is None:
        return kept
    for row, keep in zip(rows.tolist(), kept, strict=True):
        words = [place for place, token in enumerate(row) if token != reading.pad]
        if not words:
            keep[:] = False
            continue
        keep[: words[0]] = False
        keep[words[-1] + 1 + reading.pad_ends_texts :] = False
    return kept


def _pieces(inputs: Mapping[str, Tensor], number: int, places: list[int]) -> list[list[int]]:
    """Split a row into its packed texts; a row with one text is one piece.

    Args:
        inputs: arguments of the forward pass.
        number: number of the row.
        places: places of the row's tokens, without padding.
    """
    numbers = _numbers_of_texts(inputs, number, places)
    if numbers is None or not places:
        return [places]
    paired = zip(numbers, places, strict=True)
    return [[place for _, place in group] for _, group in groupby(paired, key=lambda pair: pair[0])]


def _numbers_of_texts(inputs: Mapping[str, Tensor], row: int, places: list[int]) -> list[int] | None:
    """Return a number for each token; it changes between packed texts.

    None means that no input separates the texts.
    """
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    length = ids.shape[-1]
    for named in (inputs.get("seq_idx"), mask):  # a mask that numbers the packed texts 1, 2, 3 ...
        if named is not None and named.shape == ids.shape and bool((named > 1).any()):
            of_row = _rows(named)[row].tolist()
            return [int(of_row[place]) for place in places]
    if (numbered := inputs.get("seq_idx")) is not None and numbered.shape == ids.shape:
        of_row = _rows(numbered)[row].tolist()
        return [int(of_row[place]) for place in places]
    ends = next((inputs[name] for name in LENGTHS_OF_PACKED if name in inputs), None)
    if ends is not None:
        return torch.bucketize(torch.tensor(places) + row * length, ends.flatten().cpu(), right=True).tolist()
    if (positions := _positions(inputs, row)) is not None:
        return _counted([positions[place] for place in places])
    allowed = _allowed(inputs, _rows(ids))
    if allowed is None:
        return None
    joined = allowed[row].diagonal(offset=-1).tolist()  # whether token i + 1 attends to token i
    starts = [place == 0 or not joined[place - 1] for place in places]
    return torch.tensor(starts).cumsum(0).tolist()


def _positions(inputs: Mapping[str, Tensor], row: int) -> list[int] | None:
    """Return the positions of a row's tokens, if the trainer gave them.

    The input has the shape (T,), (1, T), (N, T) or (3, N, T).
    """
    positions, ids = inputs.get("position_ids"), inputs["input_ids"]
    if positions is None or positions.shape[-1] != ids.shape[-1]:
        return None
    if positions.dim() == 3 and positions.shape != ids.shape:
        positions = positions[0]  # time, height, width: text counts alike in all three
    rows = _rows(positions)
    count = len(_rows(ids))
    return rows[row if len(rows) == count else 0].tolist() if len(rows) in (1, count) else None


def _counted(positions: list[int]) -> list[int] | None:
    """Return a number for each token; it grows by one where a new text begins.

    A text begins where the position has its smallest value. None if the positions say nothing about texts.
    """
    first = min(positions, default=0)
    starts = [position == first for position in positions]
    if not positions or not starts[0] or (all(starts) and len(starts) > 1):
        return None  # shifted, or positions that say nothing
    return torch.tensor(starts).cumsum(0).tolist()
