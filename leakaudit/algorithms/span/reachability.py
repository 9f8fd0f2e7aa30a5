"""What the readings of `span` could have recovered: which pairs they kept, and whether a whole sequence passes their test.

A reading returns this evidence with its guess (`Reconstruction.reach`); the battery asks it about the true sequences afterwards.
One constructor for each kind of reading:

- `clean_reach`: candidates are the pairs in the span. A sequence passes if all its attention inputs lie in the first block's
  span and all its inputs to the second block, which depend on the whole sequence, in the second one's.
- `prefix_reach`: candidates are the tokens that were tried; a sequence passes if all its prefixes are right.
- `masked_reach`: candidates are the pairs that were fitted; a sequence passes if each of its pairs was found behind a mask.
- `ranked_reach`: candidates are the pairs that were ranked; there is no test.
- `bag_reach`: candidates are tokens, wherever they stand; there is no test.

The test by the second block is exact for sequences of any length, unlike the one by attention heads that assembles them: inputs
there lie in the span of that block's update iff the sequence is in the batch. (DAGER, Petrov et al., NeurIPS 2024, Sec. 4.2 and
4.3, decides between candidate sentences by the second layer.)
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
"""Distance from the second block's span beyond which an input is not in it. Measured on a train split (six-layer encoder,
D = 384, B = 4 to 24, 165 to 279 tokens, float32): at most 1e-6 for true sequences; of 1,087 sequences with one word replaced by
one that stands at its place in another sentence of the batch, or with the end cut off, the nearest is at 2e-2."""


class Pairs(Protocol):
    """(Token, position) pairs, as the stages of the attack hand them on."""

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
    """A `Reach` by (token, position) pairs. It keeps nothing of what it is asked."""

    pairs: frozenset[tuple[int, int]]
    """Candidates; all at position 0 where inputs carry no position."""
    test: Callable[[tuple[int, ...]], bool | None]
    """Of a whole sequence; None where the reading has no test."""
    position_free: bool = False
    silent_last: bool = False
    """The last token of a sequence gets no gradient: in a language model it predicts nothing."""
    last: frozenset[int] = frozenset()
    """Where that is so, tokens that are candidates for the last place by other evidence."""

    def tokens(self, ids: tuple[int, ...]) -> tuple[bool, ...]:
        """Say of each token whether its pair was a candidate."""
        found = [(token, 0 if self.position_free else place) in self.pairs for place, token in enumerate(ids)]
        if self.silent_last and ids:
            found[-1] = ids[-1] in self.last
        return tuple(found)

    def passes(self, ids: tuple[int, ...]) -> bool | None:
        """Say whether the sequence passes the reading's test; the last token must be a candidate where no test reaches it."""
        if not self.silent_last or not ids:
            return self.test(ids)
        verdict = self.test(ids[:-1])
        return verdict if verdict is None else verdict and ids[-1] in self.last


def span_reach(problem: SpanProblem, inside: Pairs, farthest: float, last: frozenset[int] = frozenset()) -> PairReach:
    """Return what a reading of a clean update, dropout off, could have recovered.

    Args:
        problem: what was seen.
        inside: the pairs that the reading took to be in the span.
        farthest: distance beyond which it takes no pair.
        last: candidates for the last place of a language model's sequence.
    """
    # Where only the span of images is known, or local steps blur that of the inputs, the reading has measures of its own.
    if problem.basis.rank == 0 or problem.seen.facts.view == "delta":
        return dropout_reach(problem, inside, inside, all_tried=True, last=last)
    return _reach(problem, inside, SpanTest(problem, farthest), last)


def bag_of_words_reach(tokens: Iterable[int]) -> PairReach:
    """Return what a reading that names tokens and not their places could have recovered; there is no test."""
    return PairReach(frozenset((token, 0) for token in tokens), lambda ids: None, position_free=True)


def prefix_reach(
    problem: SpanProblem, allowed: Mapping[int, Tensor], test: Callable[[Tensor], bool], last: Iterable[int] = ()
) -> PairReach:
    """Return what a reading that grows sequences word by word could have recovered.

    Args:
        problem: what was seen.
        allowed: position -> (M,) token ids that were tried there; position 0 for all where inputs carry no position.
        test: whether all prefixes of one sequence (T,) are right.
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


def dropout_reach(
    problem: SpanProblem, fitted: Pairs, found: Pairs, *, all_tried: bool, last: frozenset[int] = frozenset()
) -> PairReach:
    """Return what a reading behind dropout masks could have recovered.

    Args:
        problem: what was seen.
        fitted: the pairs that the regressions were tried on.
        found: those that were found behind a mask.
        all_tried: there was time for every fit; what was not tried is not refused.
        last: candidates for the last place of a language model's sequence.
    """
    known = _pairs(problem, found)
    free = problem.stage.position_free

    def each_found(ids: tuple[int, ...]) -> bool | None:
        if all((token, 0 if free else place) in known for place, token in enumerate(ids)):
            return True
        return False if all_tried else None

    return _reach(problem, fitted, each_found, last)


def ranked_reach(problem: SpanProblem, ranked: Pairs, last: frozenset[int] = frozenset()) -> PairReach | None:
    """Return what a reading that only ranks pairs could have recovered.

    None where it ruled out nothing, because it kept as many tokens at a position as there are: then every token is a
    candidate, whatever the update says.

    Args:
        problem: what was seen.
        ranked: the pairs that it kept.
        last: candidates for the last place of a language model's sequence.
    """
    pairs = _pairs(problem, ranked)
    kept = Counter(place for _, place in pairs)
    if max(kept.values(), default=0) >= problem.stage.vocabulary:
        return None
    return _reach(problem, ranked, lambda ids: None, last)


def _reach(
    problem: SpanProblem, pairs: Pairs, test: Callable[[tuple[int, ...]], bool | None], last: frozenset[int]
) -> PairReach:
    return PairReach(
        pairs=_pairs(problem, pairs),
        test=test,
        position_free=problem.stage.position_free,
        silent_last=problem.seen.facts.task == "causal-lm",
        last=last,
    )


def _pairs(problem: SpanProblem, pairs: Pairs) -> frozenset[tuple[int, int]]:
    places = torch.zeros_like(pairs.positions) if problem.stage.position_free else pairs.positions
    return frozenset(zip(pairs.tokens.tolist(), places.tolist(), strict=True))


class SpanTest:
    """Whether a sequence lies in the span of the first block, and in that of the second where it can be computed."""

    def __init__(self, problem: SpanProblem, farthest: float) -> None:
        """Prepare; the second block is looked up at the first question.

        Args:
            problem: what was seen, dropout off.
            farthest: distance from the first block's span beyond which a pair is not in it.
        """
        self._problem = problem
        self._farthest = farthest

    def __call__(self, ids: tuple[int, ...]) -> bool:
        """Return whether every input of the sequence lies in the spans; an attack looks no further than its positions."""
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
            return True  # that block is not run, so it cannot speak against the sequence

    @cached_property
    def _second(self) -> _SecondBlock | None:
        """None where the second block says nothing: it is withheld, full, or behind dropout."""
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
    """Return the second block's counterparts of the first one's projections; empty where there are none.

    Blocks stand in one list of modules and are alike, so a counterpart has the same name but for its place in that list.
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
    """The second block's span, and the way to its inputs."""

    model: nn.Module
    reader: nn.Module
    basis: Basis

    def inputs(self, tokens: Tensor) -> Tensor:
        """Return (T, D) float64: what the block's attention reads of one sequence (T,)."""
        return run_until(self.model, tokens[None], self.reader)[0].double()


def _within(inputs: Tensor, basis: Basis, farthest: float) -> bool:
    return bool((distances(inputs, basis.vectors) < farthest).all())
