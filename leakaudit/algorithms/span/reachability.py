"""`PairReach`: the sequences that a reader of `span` could have recovered.

A reader returns it with its guess (`Reconstruction.reach`). The audit then asks it two questions about each true
sequence: was each token a candidate, and would the sequence have passed the reader's test? There is one function for
each kind of reader:

- `span_reach`: candidates are the pairs in the span. A sequence passes if all its attention inputs lie in the first
  block's span, and all its inputs to the second block, which depend on the whole sequence, in the second block's span.
- `prefix_reach`: candidates are the tokens that were tried. A sequence passes if all its prefixes pass.
- `dropout_reach`: candidates are the pairs that were fitted. A sequence passes if each of its pairs was found behind a
  mask.
- `ranked_reach`: candidates are the pairs that were ranked; there is no test.
- `bag_of_words_reach`: candidates are tokens at any position; there is no test.

The test by the second block is exact for sequences of any length, unlike that of `attention_evidence`: inputs lie in
the span of that block's update if and only if the sequence is in the batch. (DAGER, Petrov et al., NeurIPS 2024, Sec.
4.2 and 4.3, decides between candidate sentences by the second layer.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from leakaudit.algorithms.span.candidates import distances
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.subspace import FULL_RANK_MARGIN, Basis, span_of, stacked_update
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Anatomy, Projection, run_until

FARTHEST_SECOND = 2e-3
"""Largest distance from the second block's span at which an input is in it.
Chosen on training sentences; see docs/decisions/span_constants.md."""


class Pairs(Protocol):
    """(Token, position) pairs."""

    @property
    def tokens(self) -> Tensor:
        """(N,) token ids."""
        ...

    @property
    def positions(self) -> Tensor:
        """(N,) positions."""
        ...


@dataclass(frozen=True)
class PairReach:
    """A `Reach` by (token, position) pairs; it does not store what it is asked."""

    pairs: frozenset[tuple[int, int]]
    """Candidates; all at position 0 if inputs carry no position."""
    test: Callable[[tuple[int, ...]], bool | None]
    """Test of a whole sequence; it returns None if the reader has no test."""
    position_free: bool = False
    """Whether inputs carry no position."""
    silent_last: bool = False
    """Whether the last token of a sequence gets no gradient, as in a language model, where it predicts nothing."""
    last: frozenset[int] = frozenset()
    """Tokens that are candidates for such a last token by other evidence."""

    def tokens(self, ids: tuple[int, ...]) -> tuple[bool, ...]:
        """Return for each token of a sequence whether its pair was a candidate."""
        found = [(token, 0 if self.position_free else place) in self.pairs for place, token in enumerate(ids)]
        if self.silent_last and ids:
            found[-1] = ids[-1] in self.last
        return tuple(found)

    def passes(self, ids: tuple[int, ...]) -> bool | None:
        """Return whether the sequence passes the reader's test, None without a test.

        If the last token gets no gradient, it has to be a candidate instead.
        """
        if not self.silent_last or not ids:
            return self.test(ids)
        verdict = self.test(ids[:-1])
        return verdict if verdict is None else verdict and ids[-1] in self.last


def span_reach(problem: SpanProblem, inside: Pairs, farthest: float) -> PairReach:
    """Return what a reader that tests pairs against the span could have recovered.

    Args:
        problem: the observation with its parts.
        inside: the pairs that the reader took to be in the span.
        farthest: largest distance of such a pair.
    """
    # With adapters at their start or after local steps there is no exact span, and the reader has a test of its own.
    if problem.basis.rank == 0 or problem.seen.facts.view == "delta":
        return dropout_reach(problem, inside, inside, all_tried=True)
    return _reach(problem, inside, SpanTest(problem, farthest))


def bag_of_words_reach(tokens: Iterable[int]) -> PairReach:
    """Return what a reader that names tokens without positions could have recovered."""
    return PairReach(frozenset((token, 0) for token in tokens), lambda _: None, position_free=True)


def prefixes_of_words(words: Iterable[int], vocabulary: int) -> PairReach:
    """Return what a reader that makes prefixes of known words could have recovered.

    The last token of a sequence is no input of a language model's loss, so it may be any token.

    Args:
        words: the words that it tried.
        vocabulary: number of tokens, all of which are tried as the last token of a sequence.
    """
    return replace(bag_of_words_reach(words), silent_last=True, last=frozenset(range(vocabulary)))


def prefix_reach(
    problem: SpanProblem, allowed: Mapping[int, Tensor], test: Callable[[Tensor], bool], last: Iterable[int] = ()
) -> PairReach:
    """Return what a reader that grows sequences word by word could have recovered.

    Args:
        problem: the observation with its parts.
        allowed: position -> (M,) token ids that were tried there; position 0 stands for all if inputs carry no
            position.
        test: returns whether all prefixes of one sequence (T,) pass.
        last: candidates for the last place of a language model's sequence.
    """
    device = problem.basis.vectors.device
    limit = problem.stage.max_length

    def passes(ids: tuple[int, ...]) -> bool:
        return 0 < len(ids) <= limit and test(torch.tensor(ids, device=device))

    return PairReach(
        pairs=frozenset((token, place) for place, tokens in allowed.items() for token in tokens.tolist()),
        test=passes,
        position_free=problem.stage.position_free,
        silent_last=problem.seen.facts.task == "causal-lm",
        last=frozenset(last),
    )


def dropout_reach(problem: SpanProblem, fitted: Pairs, found: Pairs, *, all_tried: bool) -> PairReach:
    """Return what a reader could have recovered behind dropout masks.

    Args:
        problem: the observation with its parts.
        fitted: the pairs that the regressions were tried on.
        found: those that were found behind a mask.
        all_tried: whether every regression had time; if not, a missing pair gives no verdict.
    """
    known = _pairs(problem, found)
    free = problem.stage.position_free

    def each_found(ids: tuple[int, ...]) -> bool | None:
        if all((token, 0 if free else place) in known for place, token in enumerate(ids)):
            return True
        return False if all_tried else None

    return _reach(problem, fitted, each_found)


def ranked_reach(problem: SpanProblem, ranked: Pairs) -> PairReach | None:
    """Return what a reader that only ranks pairs could have recovered.

    None if it kept the whole vocabulary at a position: then every token is a candidate there, whatever the update is.

    Args:
        problem: the observation with its parts.
        ranked: the pairs that it kept.
    """
    pairs = _pairs(problem, ranked)
    kept = Counter(place for _, place in pairs)
    if max(kept.values(), default=0) >= problem.stage.vocabulary:
        return None
    return _reach(problem, ranked, lambda _: None)


def _reach(problem: SpanProblem, pairs: Pairs, test: Callable[[tuple[int, ...]], bool | None]) -> PairReach:
    return PairReach(
        pairs=_pairs(problem, pairs),
        test=test,
        position_free=problem.stage.position_free,
        silent_last=problem.seen.facts.task == "causal-lm",
    )


def _pairs(problem: SpanProblem, pairs: Pairs) -> frozenset[tuple[int, int]]:
    places = torch.zeros_like(pairs.positions) if problem.stage.position_free else pairs.positions
    return frozenset(zip(pairs.tokens.tolist(), places.tolist(), strict=True))


class SpanTest:
    """Test of whether a sequence lies in the spans of the first and second block.

    The second block counts only if its inputs can be computed and its update is shared.
    """

    def __init__(self, problem: SpanProblem, farthest: float) -> None:
        """Prepare the test; the second block is looked up at the first call.

        Args:
            problem: the observation with its parts, dropout off.
            farthest: largest distance from the first block's span at which a pair is in it.
        """
        self._problem = problem
        self._farthest = farthest

    def __call__(self, ids: tuple[int, ...]) -> bool:
        """Return whether every input of the sequence lies in the spans.

        Sequences longer than the scanned positions fail.
        """
        stage, basis = self._problem.stage, self._problem.basis
        if not ids or (len(ids) > stage.max_length and not stage.position_free):
            return False
        tokens = torch.tensor(ids, device=basis.vectors.device)
        inputs = stage.inputs(tokens, torch.arange(len(ids), device=tokens.device))
        if not _within(inputs, basis, self._farthest):
            return False
        second = self._second
        if second is None:
            return True
        try:
            return _within(second.inputs(tokens), second.basis, FARTHEST_SECOND)
        except AnatomyError:
            return True  # the second block is not run for this sequence, so it is no evidence against it

    @cached_property
    def _second(self) -> _SecondBlock | None:
        """The second block; None if it is not shared, full, or behind dropout."""
        seen = self._problem.seen
        if seen.facts.training_mode and any(seen.facts.dropout.values()):
            return None
        projections = second_block(seen.model, self._problem.anatomy)
        anatomy = replace(self._problem.anatomy, projections=projections, adapters=())
        update = stacked_update(seen.update, anatomy)
        if not bool(update.any()):
            return None
        basis = span_of(update)
        if basis.noisy or basis.rank > basis.vectors.shape[1] - FULL_RANK_MARGIN:
            return None
        return _SecondBlock(seen.model, seen.model.get_submodule(projections[0].module), basis)


def second_block(model: nn.Module, anatomy: Anatomy) -> tuple[Projection, ...]:
    """Return the second block's counterparts of the first block's projections.

    Blocks stand in one list of modules and have equal parts. So a counterpart has the same name except for its index in
    that list. The result is empty if there are none.
    """
    parameters = {name for name, _ in model.named_parameters()}
    stacks = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    for stack in stacks:
        first, second = f"{stack}.0.", f"{stack}.1."
        if all(p.module.startswith(first) and p.weight.startswith(first) for p in anatomy.projections):
            found = tuple(
                replace(p, module=second + p.module.removeprefix(first), weight=second + p.weight.removeprefix(first))
                for p in anatomy.projections
            )
            return found if all(p.weight in parameters for p in found) else ()
    return ()


@dataclass(frozen=True)
class _SecondBlock:
    """The second block's span, and the computation of its inputs."""

    model: nn.Module
    reader: nn.Module
    basis: Basis

    def inputs(self, tokens: Tensor) -> Tensor:
        """Return (T, D) float64: what the block's attention reads of one sequence (T,)."""
        return run_until(self.model, tokens[None], self.reader)[0].double()


def _within(inputs: Tensor, basis: Basis, farthest: float) -> bool:
    return bool((distances(inputs, basis.vectors) < farthest).all())
