"""Reader for decoders without dropout: prefixes grow word by word.

The first block's attention inputs give the words. In rotary models these inputs carry no positions, so they do not give
the order. In other models false pairs (ghosts) may lie in the span as well (`attribution`). The input of a layer behind
the first attention depends on the whole prefix up to its token, and lies in the span of that layer's update if and only
if the prefix is in the batch. So a right prefix is extended by every candidate word, and the extensions inside this
second span are kept. All sequences of a batch grow at once; equal prefixes are stored once.

Source: DAGER (Petrov et al., NeurIPS 2024, Sec. 4.2) checks a decoder's second attention input in this way. The choice
of the layer, distances in units of rounding, the forest of prefixes and the ends of sequences (`last_tokens`) are ours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.algorithms.resimulation import prove
from leakaudit.algorithms.span.candidates import Candidates, Scan, blocks, join
from leakaudit.algorithms.span.last_tokens import Ending, endings
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.reachability import prefix_reach
from leakaudit.algorithms.span.residuals import ROUNDING_UNITS, ResidualScale
from leakaudit.algorithms.span.subspace import stacked_update
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Projection, prefix_readers, run_until
from leakaudit.models.structure.trace import CHUNK_BYTES
from leakaudit.models.versions import empty_cache
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction

NEARLY_INSIDE = 0.03
"""Largest distance from the first span at which a token is tried.
It is large, because the second span decides. Chosen on training sentences; see docs/decisions/span_constants.md."""

MOST_PREFIXES = 2
"""Number of prefixes per direction of the span above which growing stops.
Our choice: there are as many true prefixes as directions, and in addition runs of one repeated token."""

REPEATS = 4
"""Longest run of one token at the start of a sequence, if inputs carry no position.
Our choice. Attention over equal values gives the same value, so such a run differs from a single token only in its
continuation."""


@dataclass(frozen=True)
class Forest:
    """Prefixes as nodes of trees; a child is one token longer than its parent."""

    tokens: tuple[int, ...]
    """(N,) last token of each prefix."""
    parents: tuple[int, ...]
    """(N,) the prefix without its last token, -1 for prefixes of one token; parents stand before their children."""

    def __len__(self) -> int:
        """Return the number of prefixes."""
        return len(self.tokens)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the token ids of a prefix."""
        found = []
        while node >= 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(found))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """(N,) the prefixes that are one token longer."""
        found: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                found[parent].append(node)
        return tuple(map(tuple, found))

    def leaves(self) -> list[int]:
        """Return the prefixes that no other one continues."""
        return [node for node, children in enumerate(self.children) if not children]


class PrefixRunner:
    """Computation of a layer's inputs at the ends of prefixes.

    The layer stands behind the first attention.
    """

    def __init__(self, model: nn.Module, reader: str) -> None:
        """Test whether the model's cache gives the same inputs as running whole prefixes.

        Args:
            model: left as it was.
            reader: module name of the layer.
        """
        self._model = model
        self._reader = model.get_submodule(reader)
        self.cached = self._cache_works()

    def extend(self, prefixes: Tensor, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the layer's inputs for every prefix extended by every token, in chunks.

        Args:
            prefixes: (L, T) int64 token ids, T from 0 up.
            tokens: (M,) int64 token ids.

        Yields:
            (n,) row of the prefix, (n,) index of the token, and (n, D) inputs.
        """
        count, length = prefixes.shape
        cache = self._filled(prefixes) if self.cached and length else None
        width = int(getattr(self._model.config, "hidden_size", 1024))
        size = max(1, CHUNK_BYTES // (width * 4 * 16 * (length + 1)))  # keys, values and their copies in attention
        pairs = torch.cartesian_prod(torch.arange(count), torch.arange(len(tokens))).view(-1, 2)
        for chunk in pairs.split(size):
            rows, columns = chunk[:, 0].to(prefixes.device), chunk[:, 1].to(prefixes.device)
            last = tokens[columns][:, None]
            if cache is None:
                given = run_until(self._model, torch.cat([prefixes[rows], last], dim=1), self._reader)
            else:
                copied = copy.deepcopy(cache)
                copied.batch_select_indices(rows)
                mask = torch.ones(len(rows), length + 1, dtype=torch.long, device=rows.device)
                given = run_until(
                    self._model, last, self._reader, attention_mask=mask, past_key_values=copied, use_cache=True
                )
            yield rows, columns, given[:, -1]

    def _filled(self, prefixes: Tensor) -> Any:
        """Return the cache of the first block over prefixes; later blocks are not run."""
        cache = empty_cache(self._model)
        run_until(self._model, prefixes, self._reader, past_key_values=cache, use_cache=True)
        return cache

    def _cache_works(self) -> bool:
        device = next(self._model.parameters()).device
        rows = int(self._model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        ids = (torch.arange(8, device=device).view(2, 4) * 5 + rows // 3) % rows
        whole = run_until(self._model, ids, self._reader)[:, -1]
        self.cached = True
        try:
            found = {(int(r), int(c)): x for rows, columns, given in self.extend(ids[:, :3], ids[:, 3])
                     for r, c, x in zip(rows, columns, given, strict=True)}  # fmt: skip
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError, AnatomyError):
            return False
        tolerance = 1e-5 * float(whole.abs().max())
        return all(torch.allclose(found[i, i], whole[i], atol=tolerance) for i in range(2))


def fits(problem: SpanProblem) -> bool:
    """Say whether attention is causal and inputs lie in the span without masks."""
    return problem.has_exact_span and not problem.dropout and problem.anatomy.causal


def read(problem: SpanProblem) -> Reconstruction | None:
    """Return the sequences that the forest of prefixes forms, or None.

    None if there is no prefix, if dropout acts anywhere, or if no layer behind the first attention shares an update
    that leaves directions empty.
    """
    known = problem.seen.facts
    masked = known.training_mode and any(rate > 0 for rate in known.dropout.values())
    best = None if masked else _best_scale(problem)
    if best is None:
        return None
    reader, scale = best
    pool = _pool(problem)
    runner = PrefixRunner(problem.seen.model, reader)
    forest = grow(runner, scale, pool, problem)
    diagnostics = {"prefixes": float(len(forest)), "prefix_rank": float(scale.basis.rank)}
    if len(forest) == 0:
        return None
    found = _sequences(problem, forest, diagnostics)
    last = {s.token_ids[-1] for s in found.sequences or ()} if found.diagnostics["ends"] else set()
    return replace(found, reach=prefix_reach(problem, pool.by_position, prefix_test(problem, reader, scale), last))


def prefix_test(problem: SpanProblem, reader: str, scale: ResidualScale) -> Callable[[Tensor], bool]:
    """Return a test of whether all prefixes of a sequence (T,) are in the batch."""
    module = problem.seen.model.get_submodule(reader)
    return lambda ids: bool((scale(run_until(problem.seen.model, ids[None], module)[0]) < ROUNDING_UNITS).all())


def _best_scale(problem: SpanProblem) -> tuple[str, ResidualScale] | None:
    """Return the module that separates prefixes best, with the scale of its update."""
    try:
        groups = prefix_readers(problem.seen.model)
    except AnatomyError:
        return None
    scales: list[tuple[int, float, str, ResidualScale]] = []
    for group in groups:
        if _width(problem, group) > problem.anatomy.hidden:
            continue  # the second feed-forward layer: its eigenvectors cost 64 times as much and add nothing
        stacked = stacked_update(
            problem.seen.update, replace(problem.anatomy, projections=group, adapters=(), hidden=_width(problem, group))
        )
        if len(stacked) == 0:
            continue
        scale = ResidualScale.of(stacked)
        # If there are as many directions as outputs, the layer may have too few outputs to show all inputs.
        if not scale.basis.noisy and scale.basis.rank < len(stacked):
            scales.append((scale.basis.rank, scale.certainty, group[0].module, scale))
    if not scales:
        return None
    # Noise hides weak directions, so a layer that shows fewer directions than another one hides inputs.
    most = max(rank for rank, _, _, _ in scales)
    _, _, module, scale = max((r for r in scales if r[0] >= most - 1), key=lambda r: r[1])
    return module, scale


def _width(problem: SpanProblem, group: Sequence[Projection]) -> int:
    return int(group[0].by_output(problem.weights[group[0].weight]).shape[1])


@dataclass(frozen=True)
class Pool:
    """The tokens that the first span allows."""

    everywhere: Tensor | None
    """(M,) int64 token ids if inputs carry no position, else None."""
    at: Mapping[int, Tensor]
    """Position -> (M,) int64 token ids, nearest first."""

    def __call__(self, position: int) -> Tensor | None:
        """Return the tokens that may stand at a position, or None if there are none."""
        return self.everywhere if self.everywhere is not None else self.at.get(position)

    @property
    def by_position(self) -> Mapping[int, Tensor]:
        """Position -> (M,) token ids; position 0 stands for all without positions."""
        return self.at if self.everywhere is None else {0: self.everywhere}


def _pool(problem: SpanProblem) -> Pool:
    # All tokens of the batch may lie in the span at one position, so that many must be kept.
    keep = max(problem.keep, problem.basis.rank + 32)
    scan = Scan(problem.stage, problem.basis.vectors, problem.tokens, keep, tuple(problem.special))
    parts: list[Candidates] = []
    for start, stop in [(0, 1)] if problem.stage.position_free else blocks(problem.stage.max_length):
        parts.append(scan.block(start, stop))
        at_last = parts[-1].distance[parts[-1].positions == stop - 1]
        if float(at_last.min()) >= NEARLY_INSIDE or problem.budget.exhausted():  # all sequences are shorter
            break
    pairs = join(parts)
    # A zero vector (the padding row of a token table without positions) lies in every span.
    near = pairs.take(((pairs.distance < NEARLY_INSIDE) & pairs.inputs.any(dim=1)).nonzero().flatten())
    if problem.stage.position_free:
        return Pool(near.tokens, {})
    return Pool(None, {int(p): near.tokens[near.positions == p] for p in near.positions.unique()})


def grow(runner: PrefixRunner, scale: ResidualScale, pool: Pool, problem: SpanProblem) -> Forest:
    """Grow all prefixes of the batch from single tokens, inside the span.

    Args:
        runner: computes the inputs of the layer that the scale belongs to.
        scale: measures their distances.
        pool: the tokens to try.
        problem: gives the longest length and the budget.
    """
    tokens: list[int] = []
    parents: list[int] = []
    live, device = [-1], scale.basis.vectors.device
    paths = torch.zeros(1, 0, dtype=torch.long, device=device)
    limit = min(problem.stage.max_length, scale.basis.rank + REPEATS)
    for position in range(limit):
        candidates = pool(position)
        if candidates is None or not live or problem.budget.exhausted():
            break
        if len(tokens) > MOST_PREFIXES * scale.basis.rank:  # more than can be true: the test decides nothing
            break
        hits: list[tuple[float, int, int]] = []
        for rows, columns, given in runner.extend(paths, candidates):
            distance = scale(given)
            for index in (distance < ROUNDING_UNITS).nonzero().flatten().tolist():
                hits.append((float(distance[index]), int(rows[index]), int(columns[index])))
            if problem.budget.exhausted():
                break
        if pool.everywhere is not None:
            hits = [hit for hit in hits if not _endless(paths[hit[1]], int(candidates[hit[2]]))]
        born = []
        # There are no more true prefixes than directions.
        for _, row, column in sorted(sorted(hits)[: scale.basis.rank], key=lambda hit: hit[1:]):
            born.append(len(tokens))
            tokens.append(int(candidates[column]))
            parents.append(live[row])
        forest = Forest(tuple(tokens), tuple(parents))
        live = born
        paths = torch.tensor([forest.path(node) for node in born], dtype=torch.long, device=device)
    forest = Forest(tuple(tokens), tuple(parents))
    return forest if pool.everywhere is None else _without_idle_repeats(forest)


def _endless(path: Tensor, token: int) -> bool:
    """Return whether a prefix of one repeated token would be longer than `REPEATS`."""
    return len(path) >= REPEATS and bool((path == token).all())


def _without_idle_repeats(forest: Forest) -> Forest:
    """Drop prefixes of one repeated token that no other token continues.

    The layer's inputs are the same for them as for the single token.
    """
    drop: set[int] = set()
    for node in reversed(range(len(forest))):
        path = forest.path(node)
        if len(path) > 1 and len(set(path)) == 1 and all(child in drop for child in forest.children[node]):
            drop.add(node)
    kept = [node for node in range(len(forest)) if node not in drop]
    place = {node: index for index, node in enumerate(kept)} | {-1: -1}
    return Forest(tuple(forest.tokens[node] for node in kept), tuple(place[forest.parents[node]] for node in kept))


def _sequences(problem: SpanProblem, forest: Forest, diagnostics: dict[str, float]) -> Reconstruction:
    """Turn a forest into sequences with their ends, and prove them."""
    paths = [forest.path(node) for node in forest.leaves()]
    ends: Sequence[Ending] | None = endings(problem.seen, forest.tokens, forest.parents, problem.budget)
    if not ends:
        guess = [GuessedSequence(path, own_score=0.5) for path in paths]
        diagnostics["ends"] = 0.0
    else:
        guess = [
            GuessedSequence(
                forest.path(end.node) + (() if end.last_token is None else (end.last_token,)), own_score=end.own_score
            )
            for end in ends
            for _ in range(end.count)
        ]
        diagnostics["ends"] = float(len(guess))
    proved = prove(problem.seen, guess, problem.budget)
    return Reconstruction(
        sequences=proved.sequences, label_counts=proved.label_counts, diagnostics=diagnostics | proved.diagnostics
    )
