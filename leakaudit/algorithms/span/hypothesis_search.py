"""Search by simulation for the sentence that explains most of the update.

A hypothesis (tokens, label) is simulated as a client would run it: g is the gradient of its loss. It is compared with
the observed update G over weight matrices. If G = c g + noise of standard deviation sigma, the likelihood at the best
factor c grows with

    z = <g, G> / (|g| sigma).

For the true sentence z is about |c g| / sigma. With ten million coordinates this is thousands of standard deviations,
even if the noise is as large as the signal. One wrong word lowers z by some percent, which is tens of deviations. So a
local search works, which changes a few words at a time.

No weight gradient is computed. A linear layer's gradient is sum_t d_t x_t^T over positions t, so

    <g, G> = sum_t d_t^T G x_t,      |g|^2 = sum_{s,t} (d_s . d_t)(x_s . x_t),

with x_t, d_t from one forward and one backward pass over all hypotheses at once. Own derivation; the second identity is
the "ghost norm" of Goodfellow, "Efficient Per-Example Gradient Computations", 2015.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.algorithms.matching.layers import Record, matrix_of
from leakaudit.algorithms.padding import padded_batch
from leakaudit.algorithms.precision import in_single_precision
from leakaudit.client.facts import IGNORED_LABEL
from leakaudit.client.observation import Observation
from leakaudit.models.structure.trace import hooked, is_linear, trace_tokens
from leakaudit.models.versions import call_with
from leakaudit.plugins.budget import Budget

CHUNK_TOKENS = 1024
"""Tokens, padding included, that are simulated at once.
Our choice: activations of a base-size model stay below half a gigabyte."""

MOST_CLASSES = 16
"""Most classes that are compared by simulation.
Our choice: with more, simulating each of them takes too long."""


@dataclass(frozen=True)
class Hypothesis:
    """One sentence and, for classifiers, its class."""

    token_ids: tuple[int, ...]
    label: int = 0
    """Class; not used for language models, whose labels are the tokens."""


@dataclass(frozen=True)
class Layer:
    """A linear layer whose update is shared."""

    module: nn.Module
    weight: str
    """Parameter name."""
    input_first: bool
    """Whether the weight is stored as (in, out)."""


def can_simulate(seen: Observation) -> bool:
    """Return whether hypotheses about this step can be simulated: the loss is known."""
    return seen.whole and seen.facts.task in ("classification", "causal-lm")


def labels_of(seen: Observation) -> range:
    """Return the classes to try; a single one if the task has no classes."""
    facts = seen.facts
    return range(min(facts.num_labels or 1, MOST_CLASSES)) if facts.task == "classification" else range(1)


@torch.no_grad()
def linear_layers(seen: Observation) -> tuple[Layer, ...]:
    """Return the linear layers whose update is shared, in forward order.

    A layer is linear if its output is W x, up to its bias; other modules with a matrix as weight are left out.
    """
    names = {id(parameter): name for name, parameter in seen.model.named_parameters()}
    found: dict[nn.Module, Layer] = {}
    for call in trace_tokens(seen.model):
        name = names.get(id(getattr(call.module, "weight", None)), "")
        if name in seen.update and call.bare and is_linear(call) and call.module not in found:
            matrix = matrix_of(name, call.module, Record([call.given], [call.made]))
            if matrix is not None:
                found[call.module] = Layer(call.module, name, matrix.input_first)
    return tuple(found.values())


class Simulation:
    """Simulation of hypotheses, and the comparison of each with the observed update."""

    def __init__(self, seen: Observation) -> None:
        """Look up the linear layers; a model in another precision is simulated in float32."""
        seen = in_single_precision(seen)
        self._seen = seen
        self._parameters = {n: p.detach().requires_grad_() for n, p in seen.model.named_parameters()}
        self.layers = linear_layers(seen)
        self._updates = {
            layer.weight: seen.update[layer.weight].T if layer.input_first else seen.update[layer.weight]
            for layer in self.layers
        }
        self.signs = all(_one_magnitude(g) for g in self._updates.values())
        self.batches = getattr(getattr(seen.model, "config", None), "pad_token_id", None) is not None

    def explains(self, hypotheses: Sequence[Hypothesis], layers: Sequence[Layer] | None = None) -> Tensor:
        """Return (N,) float64: <g, G> / |g| of each hypothesis, in the update's units.

        It is negative for the opposite direction. A sign update has lost the sizes of its matrices, so there the result
        is the sum of <g, G> / |g| over single matrices.

        Args:
            hypotheses: N of them.
            layers: linear layers to compare; all by default.
        """
        chosen = tuple(self.layers if layers is None else layers)
        order = sorted(range(len(hypotheses)), key=lambda i: len(hypotheses[i].token_ids))
        result = torch.zeros(len(hypotheses), dtype=torch.float64)
        for part in self._chunks(order, hypotheses):
            inner, power = self._products([hypotheses[i] for i in part], chosen)
            if self.signs:
                score = (inner / power.clamp_min(1e-300).sqrt()).sum(1)
            else:
                score = inner.sum(1) / power.sum(1).clamp_min(1e-300).sqrt()
            result[part] = score.cpu()
        return result

    def _chunks(self, order: list[int], hypotheses: Sequence[Hypothesis]) -> list[list[int]]:
        """Split indices, sorted by length, so that a padded chunk stays within the limit."""
        chunks: list[list[int]] = []
        for index in order:
            size = len(hypotheses[index].token_ids)
            if chunks and self.batches and (len(chunks[-1]) + 1) * size <= CHUNK_TOKENS:
                chunks[-1].append(index)
            else:
                chunks.append([index])
        return chunks

    def _products(self, hypotheses: Sequence[Hypothesis], layers: tuple[Layer, ...]) -> tuple[Tensor, Tensor]:
        """Return <g, G> and |g|^2 by hypothesis and layer, (N, L) float64 each."""
        inner, power = [], []
        for layer, (x, d) in zip(layers, self.activations(hypotheses, layers), strict=True):
            inner.append((x @ self._updates[layer.weight].T * d).sum((1, 2)))
            power.append(((x @ x.transpose(1, 2)) * (d @ d.transpose(1, 2))).sum((1, 2)))
        return torch.stack(inner, 1).double(), torch.stack(power, 1).double()

    def activations(self, hypotheses: Sequence[Hypothesis], layers: Sequence[Layer]) -> list[tuple[Tensor, Tensor]]:
        """Return what each layer reads (N, T, in) and its output gradient (N, T, out).

        Args:
            hypotheses: N of them, padded to T tokens.
            layers: linear layers.
        """
        model, facts = self._seen.model, self._seen.facts
        ids, mask = padded_batch(self._seen, [h.token_ids for h in hypotheses])
        if facts.task == "classification":
            labels = torch.tensor([h.label for h in hypotheses], device=ids.device)
        else:
            labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
        given: dict[int, list[Tensor]] = {id(layer.module): [] for layer in layers}
        made: dict[int, list[Tensor]] = {id(layer.module): [] for layer in layers}

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
            given[id(module)].append(next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)).detach())
            made[id(module)].append(out)

        with (
            hooked(layer.module.register_forward_hook(keep, with_kwargs=True) for layer in layers),
            torch.enable_grad(),
        ):
            inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
            loss = call_with(model, self._parameters, inputs).loss
            flat = [tensor for layer in layers for tensor in made[id(layer.module)]]
            gradients = iter(torch.autograd.grad(loss * len(ids), flat))
        result = []
        for layer in layers:
            x = torch.cat([_by_token(t) for t in given[id(layer.module)]], dim=1)
            d = torch.cat([_by_token(next(gradients)) for _ in made[id(layer.module)]], dim=1)
            result.append((x, d))
        return result


def _by_token(tensor: Tensor) -> Tensor:
    """Return (N, T, features) of a tensor that may lack the token axis.

    Poolers and heads lack it.
    """
    return tensor if tensor.dim() == 3 else tensor[:, None]


def _one_magnitude(update: Tensor) -> bool:
    """Return whether all non-zero entries have the same size, as in a sign update."""
    size = update.abs()
    high = float(size.max())
    return high > 0 and float(size[size > 0].min()) >= (1 - 1e-6) * high


Proposals = Callable[[Hypothesis, int], Sequence[Sequence[int]]]
"""(hypothesis, width) -> tokens to try at each position, up to `width` from each score; none at a fixed position."""


@dataclass
class SearchResult:
    """The best hypothesis of a search so far."""

    best: Hypothesis
    """The best hypothesis."""
    score: float
    """<g, G> / |g| of the best."""
    runner_up: float = float("-inf")
    """Highest score of any other hypothesis that was simulated."""
    simulated: int = 0
    """Hypotheses simulated."""

    def offer(self, hypotheses: Sequence[Hypothesis], scores: Tensor) -> bool:
        """Take the best of some hypotheses if it beats the best so far.

        Returns:
            Whether it did.
        """
        self.simulated += len(hypotheses)
        before = self.best
        for hypothesis, score in zip(hypotheses, scores.tolist(), strict=True):
            if hypothesis == self.best:
                continue
            if score > self.score:
                self.best, self.score, self.runner_up = hypothesis, score, self.score
            else:
                self.runner_up = max(self.runner_up, score)
        return self.best != before


@dataclass(frozen=True)
class Neighbours:
    """The changes that a local search tries."""

    moves: Callable[[Hypothesis], Sequence[Hypothesis]]
    """Large changes: other lengths, other classes, many words at once."""
    propose: Proposals
    """Tokens to try at each position."""
    widths: Sequence[int]
    """Tokens per position in the first sweep, the second, and so on."""


def local_search(
    simulation: Simulation,
    start: Hypothesis,
    neighbours: Neighbours,
    *,
    done: Callable[[Hypothesis], bool],
    most: int,
    budget: Budget,
    layers: Sequence[Layer] | None = None,
) -> SearchResult:
    """Improve one hypothesis until no neighbour is better.

    Large changes come first, as long as they help. Then one sweep simulates all single substitutions, and after that
    the best substitutions together: the best two, the best three, and so on. If a sweep improves nothing, the next sweep
    uses the next width.

    Args:
        simulation: of the observed update.
        start: the first hypothesis.
        neighbours: the changes to try.
        done: returns whether a hypothesis explains everything; called whenever no large change helps.
        most: number of simulated hypotheses at which no new round begins.
        budget: checked before every round.
        layers: linear layers to compare; all by default.
    """
    state = SearchResult(start, float(simulation.explains([start], layers)[0]), simulated=1)
    level = 0
    while not budget.exhausted() and state.simulated < most:
        base = state.best
        others = list(dict.fromkeys(h for h in neighbours.moves(base) if h != base))
        if state.offer(others, simulation.explains(others, layers)):
            continue
        if level == len(neighbours.widths) or done(base) or budget.exhausted():
            break
        improved = _sweep(simulation, state, neighbours.propose(base, neighbours.widths[level]), layers)
        level = 0 if improved else level + 1
    return state


def _sweep(
    simulation: Simulation, state: SearchResult, proposals: Sequence[Sequence[int]], layers: Sequence[Layer] | None
) -> bool:
    """Try single substitutions, then the best ones together.

    Returns:
        Whether any of them improved the best.
    """
    base, before = state.best, state.score
    singles = [
        (position, token)
        for position, tokens in enumerate(proposals)
        for token in tokens
        if token != base.token_ids[position]
    ]
    tried = [changed(base, {position: token}) for position, token in singles]
    scores = simulation.explains(tried, layers)
    state.offer(tried, scores)
    best: dict[int, tuple[float, int]] = {}
    for (position, token), score in zip(singles, scores.tolist(), strict=True):
        if score > best.get(position, (before, -1))[0]:
            best[position] = (score, token)
    if len(best) > 1:
        ranked = sorted(best, key=lambda position: -best[position][0])
        joint = [changed(base, {p: best[p][1] for p in ranked[:n]}) for n in range(2, len(ranked) + 1)]
        state.offer(joint, simulation.explains(joint, layers))
    return state.best != base


def changed(hypothesis: Hypothesis, changes: Mapping[int, int]) -> Hypothesis:
    """Return a hypothesis with other tokens at some positions."""
    ids = tuple(changes.get(position, token) for position, token in enumerate(hypothesis.token_ids))
    return Hypothesis(ids, hypothesis.label)
