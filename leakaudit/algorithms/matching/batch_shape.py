"""The shape of a batch: number of sequences, their lengths, public tokens.

Gradient matching needs the shape before it starts. The shape is granted, or guessed from the update.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from leakaudit.algorithms.labels.output_layer import find_output_layer, neutral_inputs
from leakaudit.algorithms.position_rows import touched_positions
from leakaudit.algorithms.span.subspace import Basis, span_of, stacked_update
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Anatomy, anatomy_of, find_last_feed_forward, input_stage_of, prefix_readers
from leakaudit.models.vocabulary import Vocabulary

CLEAR_GAP = 1e4
"""If the ratio of two neighbouring singular values is above this, the larger belongs to a sequence and the smaller does not.
Measured on MiniLM (training texts): 1e6 and more for up to 8 sequences; with rounding to bf16, at most 9."""

MOST_SEQUENCES = 0.125
"""A rank counts as a number of sequences up to this share of the hidden size. Our choice: heavy pruning and signs leave clear
gaps at half of the hidden size, and gradient matching cannot recover that many sequences anyway."""

EXACT_SHARE = 1e-6
"""An input counts as inside the span if at most this share of its power is outside. Our choice: float32 leaves 1e-10 for true
inputs; for the same token at the next position, a twentieth is outside."""

MOST_CHOICES = 10_000
"""Most combinations of lengths that are tried. Our choice: enough for eight sequences of nine possible lengths."""

AGAIN = 0.02
"""Amount by which each repetition of a length reduces its share. Chosen on training sentences."""


class BatchShape(NamedTuple):
    """The assumed shape of a batch."""

    lengths: tuple[int, ...]
    """(B,) tokens of each sequence, special ones included."""
    evidence: Literal["granted", "longest", "positions", "rank", "ends", "span"]
    """The source of the lengths, in the order of the names: the threat model, the longest length that it grants, the position table, the rank
    of the span, this rank and the last tokens of texts, or the sequences that exact recovery read."""


def guess_shape(seen: Observation) -> BatchShape:
    """Return the number and lengths of the sequences, granted or guessed.

    Granted lengths give both. Otherwise:

    - B is the number of granted labels, else the protocol's batch size times the local steps, else a rank. This is the rank of
      the last feed-forward part's update, which has one row for each sequence. If the rank is not clear, B is 1.
    - If the position table is shared, its non-zero rows are the positions of the longest sequence, and all sequences are
      assumed to be that long. Otherwise the rank of the first block's attention updates is the number of distinct inputs. In a
      causal language model it is the rank of an update behind the first attention, whose inputs are prefixes, and the
      last token of each sequence counts in addition: no loss follows it, so it has no gradient. If
      texts end with a public token, the lengths are those that add up to this number and at which that token lies in the
      span. Otherwise all sequences are assumed to be equally long.
    - If only the longest length is granted, as in GRAB (Sec. 5.4.3), lengths that the ends of texts tell are taken up to that length.
      Otherwise all sequences are assumed to have it.

    Raises:
        AnatomyError: nothing determines the lengths, or they are not granted and the update is noisy.
    """
    facts = seen.facts
    if facts.granted.lengths is not None:
        return BatchShape(facts.granted.lengths, "granted")
    if facts.granted.longest is not None:
        return _up_to(facts.granted.longest, seen)
    return _read_shape(seen)


def _up_to(longest: int, seen: Observation) -> BatchShape:
    """Return the shape of a batch whose longest length is known."""
    try:
        read = _read_shape(seen)
    except AnatomyError:
        return BatchShape((longest,) * _number_of_sequences(seen), "longest")
    told = read.evidence == "ends" and max(read.lengths) <= longest
    return read if told else BatchShape((longest,) * len(read.lengths), "longest")


def _read_shape(seen: Observation) -> BatchShape:
    """Return the shape that the update tells; see `guess_shape`.

    Raises:
        AnatomyError: nothing determines the lengths, or the update is noisy.
    """
    facts = seen.facts
    if seen.noise_sigma:
        raise AnatomyError(
            "under noise neither position rows nor ranks tell how long the texts are; grant `lengths` or `longest`"
        )
    sequences = _number_of_sequences(seen)
    positions = touched_positions(seen)
    unseen = int(facts.task == "causal-lm")  # no loss follows the last token, so its place has no gradient
    if positions:
        longest = min(positions + unseen, facts.vocabulary.max_length)
        return BatchShape((longest,) * sequences, "positions")
    anatomy = anatomy_of(seen.model)
    basis = _span_of_inputs(seen, anatomy)
    if basis is None:
        raise AnatomyError(
            "the lengths are unknown: no position table is shared, and the first block's attention update is missing or has "
            "no clear rank; grant `lengths` or `longest`"
        )
    # Without dropout the same token at the same position is the same input in every sequence, so opening tokens count once.
    masked = facts.training_mode and any(
        name in facts.dropout for name in anatomy.dropout_before + anatomy.dropout_after
    )
    around = 0 if masked else len(facts.vocabulary.starts_with)
    total = basis.rank + (sequences - 1) * around + sequences * unseen
    if sequences > 1 and facts.local_steps == 1:
        lengths = _lengths_from_ends(seen, basis, sequences, total, exact=not masked)
        if lengths is not None:
            return BatchShape(lengths, "ends")
    length = math.ceil(total / sequences)
    return BatchShape((min(length, facts.vocabulary.max_length),) * sequences, "rank")


def _span_of_inputs(seen: Observation, anatomy: Anatomy) -> Basis | None:
    """Return the span whose rank counts the batch's tokens; None if no layer tells it.

    It is that of the first block's attention inputs. A language model's decoder has a better one: without positions these
    inputs are only the distinct tokens, but behind the first attention they are the distinct prefixes.
    """
    stacks = [stacked_update(seen.update, anatomy)]
    if seen.facts.task == "causal-lm":
        stacks += [
            stacked_update(seen.update, replace(anatomy, projections=group, adapters=()))
            for group in prefix_readers(seen.model)
            if group[0].by_output(seen.model.get_parameter(group[0].weight)).shape[1] == anatomy.hidden
        ]
    found = [span_of(stacked) for stacked in stacks if stacked.numel() and bool(stacked.any())]
    return max((basis for basis in found if not basis.noisy), key=lambda basis: basis.rank, default=None)


def _number_of_sequences(seen: Observation) -> int:
    """Return B over all local steps."""
    facts = seen.facts
    if facts.granted.labels is not None:
        return len(facts.granted.labels)
    if facts.batch_size_bound or facts.local_steps > 1:
        return (facts.batch_size_bound or 1) * facts.local_steps
    try:
        dummy = neutral_inputs(seen, torch.Generator().manual_seed(0), examples=2)
        part = find_last_feed_forward(seen.model, find_output_layer(seen, frozen=True).module, dummy)
        names = {id(parameter): name for name, parameter in seen.model.named_parameters()}
        rows = span_of(seen.update[names[id(part.first.weight)]].double())
    except (AnatomyError, KeyError):  # no such part, or its update is not shared under its name
        return 1
    believed = not rows.noisy and rows.gap >= CLEAR_GAP and rows.rank <= MOST_SEQUENCES * rows.vectors.shape[1]
    return max(1, rows.rank) if believed else 1


def _lengths_from_ends(
    seen: Observation, basis: Basis, sequences: int, total: int, *, exact: bool
) -> tuple[int, ...] | None:
    """Return the lengths at which the last public token fits the span best.

    The lengths add up to the number of tokens. Without dropout, the last public token lies in the span at the end of a
    sequence, and at no other position. With dropout, only a part of it lies in the span there, and less at other positions.
    (Own derivation.)

    Args:
        seen: the observation.
        basis: basis of the span of the first block's inputs.
        sequences: B.
        total: number of tokens; a lower bound if two sequences can have the same input.
        exact: whether dropout is off.

    Returns:
        (B,) longest first; None if texts have no last public token, positions do not matter, or no lengths fit.
    """
    vocabulary = seen.facts.vocabulary
    try:
        stage = input_stage_of(seen.model, vocabulary.max_length)
    except AnatomyError:
        return None
    if stage.position_free or not vocabulary.ends_with:
        return None
    shortest = len(vocabulary.starts_with) + len(vocabulary.ends_with) + 1
    longest = min(vocabulary.max_length, total - (sequences - 1) * shortest)
    if longest < shortest:
        return None
    places = torch.arange(shortest - 1, longest, device=basis.vectors.device)
    ends = stage.inputs(torch.full_like(places, vocabulary.ends_with[-1]), places).double()  # (L, D)
    inside = (ends @ basis.vectors.T).square().sum(dim=1) / ends.square().sum(dim=1)  # (L,) share of its power
    lengths = dict(zip(range(shortest, longest + 1), inside.tolist(), strict=True))
    if exact:
        certain = [length for length, share in lengths.items() if 1 - share < EXACT_SHARE]
        return _repeated(certain, sequences, total)
    return _summing(lengths, sequences, total)


def _repeated(certain: Sequence[int], sequences: int, total: int) -> tuple[int, ...] | None:
    """Return B of the certain lengths whose sum is nearest to a total.

    A length may occur more than once; among equal sums, the choice with the fewest repetitions wins.
    """
    choices = itertools.islice(itertools.combinations_with_replacement(certain, sequences), MOST_CHOICES)
    best = min(choices, key=lambda chosen: (abs(sum(chosen) - total), -len(set(chosen))), default=None)
    return None if best is None else tuple(sorted(best, reverse=True))


def _summing(shares: Mapping[int, float], sequences: int, total: int) -> tuple[int, ...] | None:
    """Return B lengths that add up to a total, with the highest sum of shares.

    The longest comes first.
    """
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
    for length, share in shares.items():
        for (count, whole), (value, lengths) in list(best.items()):
            for times in range(1, min(sequences - count, (total - whole) // length) + 1):
                key = count + times, whole + times * length
                gain = value + times * share - (times - 1) * AGAIN
                if gain > best.get(key, (-math.inf, ()))[0]:
                    best[key] = (gain, (*lengths, *(length,) * times))
    chosen = best.get((sequences, total))
    return None if chosen is None else tuple(sorted(chosen[1], reverse=True))


def public_tokens(vocabulary: Vocabulary, length: int) -> Mapping[int, int]:
    """Return position -> token id of the tokens that the tokenizer adds.

    `length` is the length of the whole sequence, these tokens included.
    """
    start = {place: token for place, token in enumerate(vocabulary.starts_with[:length])}
    room = length - len(start)
    end = vocabulary.ends_with[max(0, len(vocabulary.ends_with) - room) :] if room else ()
    return start | {length - len(end) + place: token for place, token in enumerate(end)}


def equal_lengths(lengths: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Yield (rows, length) for every length that occurs."""
    for length in sorted(set(lengths)):
        yield [row for row, each in enumerate(lengths) if each == length], length
