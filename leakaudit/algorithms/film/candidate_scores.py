"""Perplexity, gradient norm and direction of many sentences in one pass.

The gradient of a linear layer's weight is G = X^T E, where X (T, in) are the inputs of a sentence's tokens and E (T, out) the gradients by the
layer's outputs. So |G|^2 = <X X^T, E E^T>, and the matrix is not formed. An embedding table is a linear layer with one-hot inputs: X X^T says
which tokens are equal. A table that is also the output head has the sum of two such gradients, whose inner product is taken, too. The gradients
of biases and gains are formed. (The factored norm is that of Goodfellow, arXiv 1510.01799, for T tokens.)

Letters: N sentences, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakaudit.algorithms.matching.layers import (
    Layer,
    Record,
    Vector,
    before_gain,
    is_gain,
    matrix_of,
    recording,
    tokens_joined,
)
from leakaudit.models.versions import call_with

LOGITS = 1 << 25
"""Most logits of one pass. Our choice, as in `token_scorer`: 128 MB in float32."""


@dataclass(frozen=True)
class Scores:
    """What a model says about N sentences."""

    nats: Tensor
    """(N,) mean negative log-likelihood of the predicted tokens; their exponential is the perplexity."""
    norms: Tensor
    """(N,) norm of the gradient of `nats` by the parameters that count; zero if it was not asked for."""
    cosines: Tensor
    """(N,) cosine of that gradient with the update, over the linear layers below the head; zero without an update."""


@dataclass(frozen=True)
class _Part(Layer):
    """A module that runs, with the parameters of it that count."""

    table: str = ""
    """Name of the embedding table that it is; empty for other modules."""

    @property
    def names(self) -> frozenset[str]:
        """The names of its parameters."""
        return super().names | ({self.table} if self.table else set())

    def only(self, names: Collection[str]) -> Self:
        """Return the part with these parameters only."""
        return replace(super().only(names), table=self.table if self.table in names else "")


class CandidateScores:
    """Scores sentences by a causal language model."""

    def __init__(
        self,
        model: nn.Module,
        start: Sequence[int],
        only: Sequence[str] | None = None,
        update: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Find the parameters whose gradients can be separated by sentence.

        Args:
            model: a causal language model in eval mode; it is left unchanged.
            start: tokens before every sentence, which are not scored.
            only: names of the parameters that count; None for all.
            update: parameter name -> update whose direction sentences are compared with; None for no comparison.
        """
        self._update = dict(update or {})
        self._model = model
        self._start = tuple(start)
        self._weights = {name: each.detach() for name, each in model.named_parameters()}
        names = {id(each): name for name, each in model.named_parameters()}
        wanted = set(self._weights) if only is None else set(only)
        self._parts = [kept for part in self._find(names) if (kept := part.only(wanted)).names]

    @property
    def counted(self) -> frozenset[str]:
        """Names of the parameters whose gradients count."""
        return frozenset().union(*(part.names for part in self._parts))

    def __call__(self, sentences: Sequence[Sequence[int]], *, norms: bool = True) -> Scores:
        """Score sentences of any lengths, each of at least one token.

        Args:
            sentences: N lists of token ids.
            norms: False leaves the gradient norms zero, and takes no backward pass.
        """
        long = max(1, max(map(len, sentences)) + len(self._start))
        size = max(1, LOGITS // (long * self._vocabulary()))
        parts = [self._some(sentences[at : at + size], norms) for at in range(0, len(sentences), size)]
        joined = zip(*((part.nats, part.norms, part.cosines) for part in parts), strict=True)
        return Scores(*(torch.cat(each) for each in joined))

    def _vocabulary(self) -> int:
        table: Any = self._model.get_input_embeddings()  # type: ignore[operator]
        return int(table.weight.shape[0])

    def _some(self, sentences: Sequence[Sequence[int]], norms: bool) -> Scores:
        ids, mask = self._padded(sentences)
        if not norms or not self._parts:
            with torch.no_grad():
                nats = self._nats(ids, mask)
            return Scores(nats, torch.zeros_like(nats), torch.zeros_like(nats))
        with torch.enable_grad(), recording([part.module for part in self._parts], len(ids), lambda: len(ids)) as found:
            nats = self._nats(ids, mask)
        made = [tensor for record in found for tensor in record.made]
        errors = iter(torch.autograd.grad(nats.sum(), made))
        by_part = [tokens_joined([next(errors) for _ in record.made], len(ids)) for record in found]
        sizes = self._squares(ids, found, by_part).clamp_min(0.0).sqrt()
        return Scores(nats.detach(), sizes, self._cosines(len(ids), found, by_part))

    def _padded(self, sentences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return ids and mask (N, T), padded on the right.

        A causal model does not look there.
        """
        rows = [[*self._start, *sentence] for sentence in sentences]
        long = max(2, *map(len, rows))
        device = next(iter(self._weights.values())).device
        ids = torch.tensor([row + [0] * (long - len(row)) for row in rows], device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        return ids, torch.arange(long, device=device) < lengths[:, None]

    def _nats(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return (N,) mean nats of the tokens behind the first one or behind `start`."""
        call = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}
        logits: Tensor = call_with(self._model, self._weights, call).logits
        each = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        scored = mask[:, 1:].clone()
        scored[:, : max(0, len(self._start) - 1)] = False
        return (each.view_as(scored) * scored).sum(dim=1) / scored.sum(dim=1).clamp_min(1)

    @torch.no_grad()
    def _find(self, names: Mapping[int, str]) -> list[_Part]:
        """Return the modules that run, whose gradients are known in factors."""
        owners = [
            module for module in self._model.modules() if isinstance(getattr(module, "weight", None), nn.Parameter)
        ]
        with recording(owners, 1, lambda: 1) as records:
            ids = torch.arange(4, device=next(self._model.parameters()).device)[None] % self._vocabulary()
            self._model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return [_part(*each, names) for each in zip(owners, records, strict=True) if each[1].made]

    def _squares(self, ids: Tensor, records: Sequence[Record], errors: Sequence[Tensor]) -> Tensor:
        """Return (N,) the squared norms of the gradients, summed over all parameters."""
        total = torch.zeros(len(ids), device=ids.device)
        tables: dict[str, tuple[Tensor, Tensor]] = {}
        for part, record, error in zip(self._parts, records, errors, strict=True):
            if part.table:
                looked_up = torch.cat([each.expand(len(ids), -1) for each in record.given], dim=1)
                tables[part.table] = (looked_up, error)
                total = total + ((looked_up[:, :, None] == looked_up[:, None, :]) * (error @ error.mT)).sum((1, 2))
            for vector in part.vectors:
                each = error * before_gain(part.module, tokens_joined(record.made, len(ids))) if vector.gain else error
                total = total + each.sum(dim=1).square().sum(dim=1)
        for part, record, error in zip(self._parts, records, errors, strict=True):
            if part.matrix is not None:
                given = tokens_joined(record.given, len(ids))
                total = total + ((given @ given.mT) * (error @ error.mT)).sum((1, 2))
                if part.matrix.name in tables:
                    total = total + 2 * _shared(*tables[part.matrix.name], given, error)
        return total.detach()

    def _cosines(self, count: int, records: Sequence[Record], errors: Sequence[Tensor]) -> Tensor:
        """Return (N,) the cosine of each gradient with the update.

        It is taken over the linear layers below the head.
        """
        inner = torch.zeros(count, device=errors[0].device)
        own, seen = inner.clone(), inner.clone()
        for part, record, error in zip(self._parts, records, errors, strict=True):
            if part.matrix is None or part.matrix.name not in self._update or error.shape[2] == self._vocabulary():
                continue
            given, update = tokens_joined(record.given, count), self._update[part.matrix.name]
            aimed = error @ (update.T if part.matrix.input_first else update)  # (N, T, in)
            inner += (aimed * given).sum((1, 2))
            own += ((given @ given.mT) * (error @ error.mT)).sum((1, 2))
            seen += update.square().sum()
        return (inner / (own * seen).clamp_min(torch.finfo(inner.dtype).tiny).sqrt()).detach()


def _shared(looked_up: Tensor, error: Tensor, given: Tensor, head_error: Tensor) -> Tensor:
    """Return (N,) the inner product of a table's gradients as input and as head.

    Args:
        looked_up: (N, T) ids.
        error: (N, T, D) gradients by the table's rows.
        given: (N, T, D) inputs of the head.
        head_error: (N, T, V) gradients by the logits.
    """
    at_ids = head_error.gather(2, looked_up[:, None, :].expand(-1, head_error.shape[1], -1))  # (N, T head, T input)
    return (at_ids * (given @ error.mT)).sum((1, 2))


def _part(module: nn.Module, record: Record, names: Mapping[int, str]) -> _Part:
    weight: Any = module.weight
    name = names.get(id(weight), "")
    bias = names.get(id(getattr(module, "bias", None)), "")
    vectors = [Vector(bias, gain=False)] if bias else []
    if isinstance(module, nn.Embedding):
        return _Part(module, None, (), table=name)
    if is_gain(module, record):
        vectors.append(Vector(name, gain=True))
    return _Part(module, matrix=matrix_of(name, module, record), vectors=tuple(vectors))


def middle_gain(model: nn.Module) -> str | None:
    """Return the name of the gain of the normalisation in the middle of a model.

    Of GPT-2 with twelve blocks it is `h.5.ln_2.weight`, the layer that FILM's published code takes. None if there is none.
    """
    gains = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and isinstance(getattr(module, "weight", None), nn.Parameter)
    ]
    return gains[max(0, len(gains) // 2 - 1)] if gains else None
