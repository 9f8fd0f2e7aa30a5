"""Gradients of many candidate batches in one pass, kept as factors.

The gradient of a linear layer's weight is a sum over the tokens of a batch, G = sum_t d_t x_t^T, where x_t is the
layer's input and d_t the gradient of the loss by the layer's output. So a candidate's gradient is kept as its pairs
(x_t, d_t), and the matrix is not formed. Many candidates run in one forward and one backward pass, and each has rows of
its own. An embedding table is treated as a linear layer with one-hot inputs. The gradients of biases and of the gains of
normalisations are small, so they are formed.

Letters: N candidates, B sequences, T tokens, M tokens of a whole candidate at a layer, D hidden size, C classes, P
entries of dropout masks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leakaudit.algorithms.matching.batch_shape import equal_lengths
from leakaudit.algorithms.matching.candidates import Candidate
from leakaudit.algorithms.matching.dropout_masks import dropping, layout_of, masked_by
from leakaudit.algorithms.matching.guessed_labels import Labels
from leakaudit.algorithms.matching.layers import (
    AGREES,
    Layer,
    Matrix,
    Record,
    Vector,
    before_gain,
    is_gain,
    layer_inputs,
    matrix_of,
    recording,
    tokens_joined,
)
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import word_embedding
from leakaudit.models.versions import call_with

CANCELS = 1e-4
"""A vector's gradient counts as rounding if it is below this share of the terms of its sum. Our choice: if the true sum is
zero, float32 leaves 1e-7 of the terms; if a dozen tokens cancel by chance, far more remains."""


class Pairs(NamedTuple):
    """The gradients of N candidates."""

    inputs: list[Tensor]
    """Of each matrix (N, M, in)."""
    output_gradients: list[Tensor]
    """Of each matrix (N, M, out): the gradient of a candidate's loss by the layer's output."""
    vectors: list[Tensor]
    """Of each vector (N, size)."""


class CandidateGradients:
    """Runs candidates through a copy of the public model that shares its weights."""

    def __init__(
        self,
        seen: Observation,
        lengths: Sequence[int],
        labels: Labels,
        exposure: Sequence[str] = ("*",),
        *,
        dropout: bool = False,
    ) -> None:
        """Find the parameters whose gradients can be separated by candidate.

        `seen` is not changed, neither here nor by any method.

        Args:
            seen: model, shared update.
            lengths: (B,) tokens of each sequence.
            labels: the labels of candidates.
            exposure: patterns of the names of parameters to match; others are left out.
            dropout: apply the candidates' own masks wherever the model has dropout in training.

        Raises:
            AnatomyError: there is nothing to match.
        """
        self.lengths = tuple(lengths)
        self._running = 1  # rows of the present pass
        weights = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in seen.model.parameters()}
        self._model = self._drops_in = copy.deepcopy(seen.model, weights).eval()
        self.labels = labels
        """The labels of candidates."""
        self.masks = layout_of(self._model, list(equal_lengths(self.lengths)), self._pass) if dropout else None
        """Layout of the dropout masks; None if the model has no dropout, or if dropout is not modelled."""
        words = word_embedding(seen.model)
        wanted = {
            name for name in seen.update if name != words and any(fnmatchcase(name, pattern) for pattern in exposure)
        }
        probe = self._probe()
        self._layers = self._find(wanted, probe)
        self._layers = self._agreeing(probe) if self._layers else []
        if not self._layers:
            raise AnatomyError(
                f"no shared parameter among {', '.join(exposure)} has a gradient that can be matched: looked for linear layers, "
                "normalisations and small tables"
            )

    @property
    def matrices(self) -> list[Matrix]:
        """Parameters whose gradients are kept as pairs, in the order of `Pairs`."""
        return [layer.matrix for layer in self._layers if layer.matrix is not None]

    @property
    def vectors(self) -> list[Vector]:
        """Parameters whose gradients are formed, in the order of `Pairs`."""
        return [vector for layer in self._layers for vector in layer.vectors]

    def losses(self, dummy: Candidate, tokens: Tensor | None = None) -> Tensor:
        """Return (N,) each candidate's mean cross-entropy.

        Sequences of equal length run together, so that there is no padding. Some classifiers find the last token by padding
        ids, which candidates do not have, because they are embeddings.

        Args:
            dummy: N candidates.
            tokens: (N, B, T) int64 their tokens, which are then a language model's labels; None for embeddings.
        """
        candidates = len(dummy.embeddings)
        total = dummy.embeddings.new_zeros(candidates)
        for rows, length in equal_lengths(self.lengths):
            some = dummy.embeddings[:, rows, :length].flatten(0, 1)  # (N rows, length, D)
            mask = torch.ones(some.shape[:2], device=some.device)
            self._running = len(some)
            with self._dropping(dummy.masks, rows):
                logits = self._model(
                    inputs_embeds=some, attention_mask=mask
                ).logits  # (N rows, C) or (N rows, length, V)
            total = total + self.labels.losses(logits, dummy, rows, tokens)
        return total / self.labels.terms(self.lengths)

    def pairs(self, dummy: Candidate, *, differentiable: bool, tokens: Tensor | None = None) -> Pairs:
        """Return the gradients of all candidates.

        Args:
            dummy: N candidates, with the public tokens at their positions.
            differentiable: keep the graph, so that the result can be differentiated by the candidates.
            tokens: (N, B, T) int64 tokens of candidates that consist of tokens; None for embeddings.
        """
        candidates = len(dummy.embeddings)
        result = Pairs([], [], [])
        with torch.enable_grad():
            for layer, record, output_gradient in self._output_gradients(dummy, differentiable, tokens):
                if layer.matrix is not None:
                    result.inputs.append(tokens_joined(layer_inputs(layer.module, record), candidates))
                    result.output_gradients.append(output_gradient)
                for vector in layer.vectors:
                    each = (
                        output_gradient * before_gain(layer.module, tokens_joined(record.made, candidates))
                        if vector.gain
                        else output_gradient
                    )
                    result.vectors.append(each.sum(dim=1))
        return result if differentiable else Pairs(*([tensor.detach() for tensor in part] for part in result))

    def _output_gradients(
        self, dummy: Candidate, differentiable: bool, tokens: Tensor | None = None
    ) -> Iterator[tuple[Layer, Record, Tensor]]:
        """Run forward and backward, and yield each layer's record and output gradient.

        The output gradient, (N, M, out), is the gradient of the loss by the layer's output.
        """
        candidates = len(dummy.embeddings)
        if not dummy.embeddings.requires_grad:
            dummy = dummy._replace(embeddings=dummy.embeddings.detach().requires_grad_())
        with recording([layer.module for layer in self._layers], candidates, lambda: self._running) as records:
            loss = self.losses(dummy, tokens).sum()
        made = [tensor for record in records for tensor in record.made]
        found = iter(torch.autograd.grad(loss, made, create_graph=differentiable))
        for layer, record in zip(self._layers, records, strict=True):
            yield layer, record, tokens_joined([next(found) for _ in record.made], candidates)

    def _dropping(self, masks: Tensor, rows: Sequence[int]) -> AbstractContextManager[None]:
        """Apply the dropout masks of these sequences, if dropout is modelled."""
        if self.masks is None:
            return nullcontext()
        return dropping(self._drops_in, masked_by(self.masks.of(masks, rows)))

    def _pass(self, length: int) -> None:
        """Run the model over one sequence."""
        table: Tensor = self._model.get_input_embeddings().weight  # type: ignore[operator]
        self._model(
            inputs_embeds=table[:1].expand(1, length, -1), attention_mask=torch.ones(1, length, device=table.device)
        )

    def direct(self, dummy: Candidate, names: Sequence[str], tokens: Tensor | None = None) -> list[Tensor | None]:
        """Return one candidate's gradients by automatic differentiation.

        They are the reference for the gradients from pairs.

        Args:
            dummy: one candidate.
            names: parameters.
            tokens: (1, B, T) int64 tokens of a candidate that consists of tokens; None for embeddings.
        """
        held = dict(self._model.named_parameters())
        live = {name: held[name].detach().requires_grad_() for name in names}
        model = self._model
        with torch.enable_grad():
            self._model = _Calling(model, live)  # type: ignore[assignment]
            try:
                loss = self.losses(dummy, tokens).sum()
            finally:
                self._model = model
            return list(torch.autograd.grad(loss, list(live.values()), allow_unused=True))

    def formed(self, pairs: Pairs, number: int) -> dict[str, Tensor]:
        """Return parameter name -> gradient of one candidate, formed from its pairs."""
        found = {}
        for matrix, given, output_gradient in zip(self.matrices, pairs.inputs, pairs.output_gradients, strict=True):
            gradient = output_gradient[number].T @ given[number]  # (out, in)
            found[matrix.name] = gradient.T if matrix.input_first else gradient
        return found | {v.name: each[number] for v, each in zip(self.vectors, pairs.vectors, strict=True)}

    def _find(self, wanted: set[str], probe: Candidate) -> list[Layer]:
        """List the layers that run, with their wanted parameters.

        A layer is a module that looks like a linear layer, a small table or a normalisation.
        """
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        owners = [m for m in self._model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)]
        with torch.no_grad(), recording(owners, 1, lambda: self._running) as records:
            self.losses(probe)
        layers = []
        for module, record in zip(owners, records, strict=True):
            if not record.made:
                continue
            name = names.get(id(module.weight), "")
            matrix = matrix_of(name, module, record) if name in wanted else None
            vectors = []
            if name in wanted and is_gain(module, record):
                vectors.append(Vector(name, gain=True))
            bias = names.get(id(getattr(module, "bias", None)), "")
            if bias in wanted:
                vectors.append(Vector(bias, gain=False))
            if matrix is not None or vectors:
                layers.append(Layer(module, matrix, tuple(vectors)))
        return layers

    def _agreeing(self, probe: Candidate) -> list[Layer]:
        """Return the layers without the parameters that cannot be compared.

        Two kinds are left out. The pairs do not reproduce the true gradients of some parameters, because a layer does more
        than a linear layer does, or because a weight is used twice. The gradient of others is only rounding, such as that of
        a key's bias, which does not change attention.
        """
        formed = self.formed(self.pairs(probe, differentiable=False), 0)
        true = dict(zip(formed, self.direct(probe, list(formed)), strict=True))
        right = {name for name, gradient in formed.items() if _same(gradient, true[name])}
        with torch.enable_grad():
            for layer, _, output_gradient in self._output_gradients(probe, False):
                weight = float(output_gradient.detach().norm())
                right -= {
                    vector.name
                    for vector in layer.vectors
                    if float(formed[vector.name].detach().norm()) <= CANCELS * weight
                }
        return [kept for layer in self._layers if (kept := layer.only(right)).names]

    def _probe(self) -> Candidate:
        """Return one random candidate, to test the layers with."""
        table: Tensor = self._model.get_input_embeddings().weight  # type: ignore[operator]
        rng = torch.Generator().manual_seed(0)
        shape = (1, len(self.lengths), max(self.lengths))
        embeddings = table.square().mean().sqrt().cpu() * torch.randn(*shape, table.shape[1], generator=rng)
        logits = torch.randn(1, *self.labels.shape, generator=rng)
        masks = torch.zeros(1, 0) if self.masks is None else (1 - self.masks.rates)[None]
        return Candidate(*(part.to(table) for part in (embeddings, logits, masks)))


def _same(gradient: Tensor, true: Tensor | None) -> bool:
    return true is not None and float((gradient - true).detach().norm()) <= AGREES * float(true.norm())


class _Calling:
    """A model with some of its parameters replaced."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        """Name the model and the parameters."""
        self._model, self._parameters = model, dict(parameters)

    def __call__(self, **inputs: Tensor) -> Any:
        """Run the model."""
        return call_with(self._model, self._parameters, inputs)
