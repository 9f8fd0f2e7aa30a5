"""Reader for the update of low-rank adapters (LoRA) alone.

The layer computes W x + s B A x, with W frozen. So the updates are dA = s sum_i (B^T dy_i) x_i^T and dB = s sum_i dy_i
(A x_i)^T. There are four cases:

- The model is a decoder, and adapters of two layers and more are shared: a pursuit of prefixes gives the sentences of
  any batch (`adapter_sentences`). If it finds nothing, the other cases follow.
- dA has more rows, over all adapters, than there are tokens: its row space is the span of the inputs, and pairs are
  tested as in other models (`sequence_assembly`, `readers.dropout`).
- dA has fewer rows: they are still combinations of inputs, and `matching_pursuit` finds these inputs.
- B is zero, as before the first step, so dA is zero, too. The row space of dB is the span of the images A x_i, in R
  dimensions. If there are fewer tokens than R, images are tested: |Q A x| / |A x| with Q the complement of that span,
  over all adapters at once. Otherwise the images fill the R dimensions, and there is no test.

In an encoder, one sentence comes back whole. Several are looked for by simulation (`adapter_encoder`); if none is found, words without order
are left.

The second case is in DAGER (Petrov et al. 2024, Sec. 5); the others are own derivations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.resimulation import Proof, prove
from leakaudit.algorithms.span.adapter_encoder import encoder_sentences
from leakaudit.algorithms.span.adapter_sentences import AdapterSentences, proved
from leakaudit.algorithms.span.candidates import Candidates, blocks, join, quadratic_form
from leakaudit.algorithms.span.matching_pursuit import Words, find_words
from leakaudit.algorithms.span.problem import STANDS_OUT, SpanProblem, only_adapters
from leakaudit.algorithms.span.reachability import bag_of_words_reach, prefixes_of_words
from leakaudit.algorithms.span.readers import dropout
from leakaudit.algorithms.span.sequence_assembly import FARTHEST_INSIDE, read_pairs
from leakaudit.algorithms.span.subspace import FLOAT32_FLOOR, Basis, span_of, stacked_update
from leakaudit.models.structure import Anatomy, InputStage
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction

SCANNED = (64, 160)
"""Numbers of positions that texts are assumed to have, in the first and the second try.
Our choice: each position leaves one dimension less, so fewer positions make a sharper test."""


def why_unreadable(update: Mapping[str, Tensor], anatomy: Anatomy, weights: Mapping[str, Tensor]) -> str:
    """Return why adapters' updates give no inputs, or an empty string if they do."""
    if len(stacked_update(update, anatomy)):
        return ""
    present = [a for a in anatomy.adapters if a.up.weight in update and bool(update[a.up.weight].any())]
    if not present:
        names = ", ".join(a.down.weight for a in anatomy.adapters)
        return f"the update of {names} and of the maps behind them is all zero"
    if not _images(update, anatomy, weights):
        ranks = ", ".join(str(adapter.rank) for adapter in present)
        sent = any(adapter.down.weight in update for adapter in present)
        why = "the adapters are at their start (B is zero, so A has no update)" if sent else "A is frozen"
        more = "later updates, in which A has moved, and gradient matching say" if sent else "gradient matching says"
        return (
            f"{why} and the update of B fills their rank ({ranks}): the batch has at least as many tokens, so every input lies in the span "
            f"of their images and this test can tell nothing. That is no protection: {more} more"
        )
    return ""


LIKELY, UNLIKELY = 0.95, 0.3
"""Own score of a sentence whose weights agree while the rest of the batch is not known, and in one whose weights do not. Our choice."""


@dataclass(frozen=True)
class _Image:
    """The span of the images of the inputs under one adapter's A, from dB."""

    down: Tensor
    """(R, D) float64: A, at Frobenius norm 1."""
    outside: Tensor
    """(R - rank, D) float64: A followed by the complement of the images' span; zero on every true input."""
    basis: Basis
    """The span of the images, in R dimensions."""


def fits(problem: SpanProblem) -> bool:
    """Say whether adapters, and no whole layers that read the inputs, are shared."""
    return problem.seen.facts.view != "delta" and only_adapters(problem.seen.update, problem.anatomy)


def read(problem: SpanProblem) -> Reconstruction | None:
    """Return the sequences or words that adapters' updates give.

    Return None to leave the problem to the next reader.
    """
    rows = stacked_update(problem.seen.update, problem.anatomy)
    if len(rows) == 0:
        return _read_images(problem) or Reconstruction(sequences=())
    parts = AdapterSentences.of(problem)
    if parts is not None and (found := _read_prefixes(problem, parts, rows)) is not None:
        return found
    if problem.stage.position_free:  # inputs have no order
        return None if problem.dropout else _read_words(problem, rows)
    if problem.basis.rank < len(rows):
        return (
            dropout.read(problem)
            if problem.dropout
            else _sentence_or_words(problem, problem.scan(), problem.basis.rank)
        )
    return None if problem.dropout else _read_words(problem, rows)


def _sentence_or_words(problem: SpanProblem, pairs: Candidates, rank: int) -> Reconstruction | None:
    """Return the one sentence that the pairs form, or else what `_several` finds.

    `read_pairs` cannot separate several sequences: it needs the updates of query and key, and adapters' updates hold only a
    low-rank image of them.
    """
    found = read_pairs(problem, pairs, rank)
    if found is None or [sequence.own_score for sequence in found.sequences or ()] == [1.0]:
        return found
    named = sorted(set(pairs.tokens[pairs.distance < FARTHEST_INSIDE].tolist()))
    return _several(problem, torch.tensor(named, device=problem.stage.device), {"words": float(len(named))})


def _several(problem: SpanProblem, words: Tensor, diagnostics: dict[str, float]) -> Reconstruction:
    """Return an encoder's sentences, or the words in no order if none is found.

    Args:
        problem: of a batch of several sentences.
        words: (M,) its words.
        diagnostics: to add to.
    """
    named = tuple(words.tolist())
    reach = bag_of_words_reach(named)
    positions = min(SCANNED[0], problem.stage.max_length)
    search = encoder_sentences(problem, words, positions) if len(words) else None
    if search is None or not search.found:
        return Reconstruction(tokens=named, diagnostics=diagnostics, reach=reach)
    right = [GuessedSequence(sentence, own_score=LIKELY) for sentence in search.found]
    drafts = [GuessedSequence(sentence, own_score=UNLIKELY) for sentence in search.drafts]
    proof = prove(problem.seen, right, problem.budget) if search.complete else Proof(tuple(right + drafts))
    return Reconstruction(
        sequences=proof.sequences,
        tokens=None if proof.complete else named,
        label_counts=proof.label_counts,
        stop="budget" if problem.budget.exhausted() else "done",
        diagnostics=diagnostics | {"sentences_that_agree": float(len(right))} | proof.diagnostics,
        reach=reach,
    )


# ---------------------------------------------------------------------- decoders
def _read_prefixes(problem: SpanProblem, parts: AdapterSentences, rows: Tensor) -> Reconstruction | None:
    """Return the sentences of a decoder's batch, or None if none was found."""
    words = _words(problem, rows)
    ends = None if words is None else parts.found(problem, words.tokens, problem.budget)
    if words is None or ends is None:
        return None
    proof = proved(problem, ends)
    named = words.tokens.tolist()
    return Reconstruction(
        sequences=proof.sequences,
        tokens=None if proof.complete else tuple(named),
        label_counts=proof.label_counts,
        diagnostics={"words": float(len(named)), "rows": float(len(rows)), "cosine": ends.cosine} | proof.diagnostics,
        reach=prefixes_of_words(named, problem.stage.vocabulary)
        if problem.seen.facts.task == "causal-lm"
        else bag_of_words_reach(named),
    )


def _words(problem: SpanProblem, rows: Tensor) -> Words | None:
    """Return the words of the batch, or None if no words explain the rows."""
    words = None
    for positions in SCANNED:
        words = words or find_words(problem.stage, rows, min(positions, problem.stage.max_length), problem.budget)
    return words


# ---------------------------------------------------------------------- fewer rows than tokens
def _read_words(problem: SpanProblem, rows: Tensor) -> Reconstruction | None:
    """Return the sentence if there is one, or else the words in no order."""
    words = _words(problem, rows)
    if words is None:
        return None
    diagnostics = {"words": float(len(words.tokens)), "rows": float(len(rows))}
    order = None if problem.stage.position_free else words.order()
    if order is None:
        return _several(problem, words.tokens, diagnostics)
    proved = prove(problem.seen, [GuessedSequence(tuple(order), own_score=1.0)], problem.budget)
    reach = bag_of_words_reach(words.tokens.tolist())
    diagnostics |= proved.diagnostics
    return Reconstruction(
        sequences=proved.sequences, label_counts=proved.label_counts, diagnostics=diagnostics, reach=reach
    )


# ---------------------------------------------------------------------- images at the start
def _images(update: Mapping[str, Tensor], anatomy: Anatomy, weights: Mapping[str, Tensor]) -> list[_Image]:
    """Return the adapters whose images do not fill their rank."""
    found = []
    for adapter in anatomy.adapters:
        if adapter.up.weight not in update:
            continue
        gradient = adapter.up.by_output(update[adapter.up.weight]).double()  # (out, R)
        if not bool(gradient.any()):
            continue
        singular = torch.linalg.svdvals(gradient)
        if len(singular) < adapter.rank or float(singular[-1]) < FLOAT32_FLOOR * float(singular[0]):
            basis = span_of(gradient / gradient.norm(), margin=1)
            down = adapter.down.by_output(weights[adapter.down.weight]).double()  # (R, D)
            down = down / down.norm()
            complement = torch.linalg.qr(basis.vectors.T, mode="complete")[0][:, basis.rank :].T  # (R - rank, R)
            found.append(_Image(down, complement @ down, basis))
    return found


def _read_images(problem: SpanProblem) -> Reconstruction | None:
    images = _images(problem.seen.update, problem.anatomy, problem.weights)
    if not images or problem.dropout:
        return None
    rank = max(image.basis.rank for image in images)
    scan = _ImageScan(problem, images)
    parts: list[Candidates] = []
    for start, stop in blocks(problem.stage.max_length):
        parts.append(scan.block(start, stop))
        nothing = float(parts[-1].distance.min()) > STANDS_OUT * float(parts[-1].distance.median())
        if nothing or start > rank + 16 or problem.budget.exhausted():
            break
    return _sentence_or_words(problem, join(parts), rank)


class _ImageScan:
    """Distances of the whole vocabulary from the spans of images, by position blocks."""

    def __init__(self, problem: SpanProblem, images: list[_Image]) -> None:
        self._problem = problem
        self._stage: InputStage = problem.stage
        self._whole = torch.cat([image.down for image in images])
        self._outside = torch.cat([image.outside for image in images])

    def _distance(self, inputs: Tensor) -> Tensor:
        """Return (N,) |outside x| / |down x| for inputs (N, D)."""
        share: Tensor = (inputs @ self._outside.T).norm(dim=1) / (inputs @ self._whole.T).norm(dim=1).clamp_min(1e-300)
        return share

    def block(self, start: int, stop: int) -> Candidates:
        """Return the nearest tokens at the positions from `start` to `stop` - 1.

        Returns:
            `keep` pairs per position, with float64 distances.
        """
        positions = torch.arange(start, stop, device=self._outside.device)
        keep = min(self._problem.keep, self._stage.vocabulary)
        if self._stage.additive:
            outside = quadratic_form(self._stage, self._outside, positions)  # (V, P)
            share = outside / quadratic_form(self._stage, self._whole, positions).clamp_min(1e-12)
        else:
            every = torch.arange(self._stage.vocabulary, device=positions.device)
            share = torch.stack(
                [
                    torch.cat([self._distance(self._stage.inputs(c, p.expand(len(c)))) for c in every.split(8192)])
                    for p in positions
                ],
                dim=1,
            )
        nearest = share.topk(keep, dim=0, largest=False).indices  # (keep, P)
        tokens = nearest.T.reshape(-1)
        where = positions.repeat_interleave(keep)
        inputs = self._stage.inputs(tokens, where)
        return Candidates(tokens, where, self._distance(inputs), inputs)
