"""What a batch is taken to look like before its gradient is matched: how many sequences, how long, which tokens are public."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from torch import nn

from leakaudit.anatomy import anatomy_of
from leakaudit.attacks.span_basis import span_of, stacked_update
from leakaudit.errors import AnatomyError
from leakaudit.models import Vocabulary
from leakaudit.snapshot import Observation


class BatchShape(NamedTuple):
    """What a batch is taken to look like."""

    lengths: tuple[int, ...]
    """(B,) tokens of each sequence, special ones included."""
    evidence: Literal["granted", "positions", "rank", "span"]
    """What said so: the threat model, the position table, the span's rank, or the sequences that exact recovery read."""


def guess_shape(seen: Observation) -> BatchShape:
    """Say how many sequences there are and how long they are, from what an adversary has.

    - B: number of granted lengths or labels, else the protocol's batch size for each local step, else 1 for each.
    - Lengths: where the position table is shared, its non-zero rows are the positions of the longest sequence, and all
      sequences are taken to be that long. Otherwise the rank of the first block's attention updates is the number of
      distinct tokens, and all sequences are taken to be equally long.

    Raises:
        AnatomyError: nothing says so.
    """
    facts = seen.facts
    if facts.granted.lengths is not None:
        return BatchShape(facts.granted.lengths, "granted")
    labels = facts.granted.labels
    sequences = len(labels) if labels is not None else (facts.batch_size_bound or 1) * facts.local_steps
    if facts.declared("gaussian-noise"):
        raise AnatomyError("under noise neither position rows nor ranks tell how long the texts are; grant `lengths`")
    positions = _touched_positions(seen)
    if positions:
        return BatchShape((positions,) * sequences, "positions")
    stacked = stacked_update(seen.update, anatomy_of(seen.model))
    basis = span_of(stacked) if bool(stacked.any()) else None
    if basis is None or basis.noisy:
        raise AnatomyError(
            "the lengths are unknown: no position table is shared, and the first block's attention update is missing or has "
            "no clear rank; grant `lengths`"
        )
    around = len(facts.vocabulary.starts_with)  # the same at the same place in every sequence, so they count once
    length = math.ceil((basis.rank + (sequences - 1) * around) / sequences)
    return BatchShape((min(length, facts.vocabulary.max_length),) * sequences, "rank")


def _touched_positions(seen: Observation) -> int:
    """Return the number of positions that got any update, 0 where no position table is shared.

    A position table is an embedding with at least one row for each position and no row for each token.
    """
    words = seen.model.get_input_embeddings()  # type: ignore[operator]
    names = {id(parameter): name for name, parameter in seen.model.named_parameters()}
    for module in seen.model.modules():
        if not isinstance(module, nn.Embedding) or module is words:
            continue
        name = names.get(id(module.weight), "")
        if name in seen.update and module.num_embeddings >= seen.facts.vocabulary.max_length:
            return int((seen.update[name] != 0).any(dim=1).sum())
    return 0


def public_tokens(vocabulary: Vocabulary, length: int) -> Mapping[int, int]:
    """Return place -> token id for the tokens that the tokenizer puts around a text of `length` tokens in all."""
    start = {place: token for place, token in enumerate(vocabulary.starts_with[:length])}
    room = length - len(start)
    end = vocabulary.ends_with[max(0, len(vocabulary.ends_with) - room) :] if room else ()
    return start | {length - len(end) + place: token for place, token in enumerate(end)}


def equal_lengths(lengths: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Yield (rows, length) for every length that occurs."""
    for length in sorted(set(lengths)):
        yield [row for row, each in enumerate(lengths) if each == length], length
