"""Computation of the first block's attention input from tokens and positions.

Letters: N sequences or tokens, T tokens of a sequence, D hidden size, V vocabulary, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.models.structure.anatomy import Anatomy, anatomy_of
from leakaudit.models.structure.dropout import is_dropout
from leakaudit.models.structure.embeddings import vocabulary_size
from leakaudit.models.structure.trace import CHUNK_BYTES, is_leaf, run_until, same_tensor, trace_tokens


@dataclass(frozen=True)
class Norm:
    """The normalisation right before the attention input.

    x = gain * (u - mean) / sqrt(var + eps) + shift; RMSNorm does not subtract the mean.
    """

    centred: bool
    """True for LayerNorm, false for RMSNorm."""
    eps: float
    gain: Tensor
    """(D,) float64."""
    shift: Tensor
    """(D,) float64."""

    def apply(self, u: Tensor) -> Tensor:
        """Normalise u (..., D) in float64."""
        if self.centred:
            u = u - u.mean(dim=-1, keepdim=True)
        return u * (u.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt() * self.gain + self.shift


class InputStage:
    """Computation of the first block's attention input from tokens, without dropout.

    Most models add a token vector and a position vector and normalise the sum, so that x(t, p) = Norm(w_t + d_p). This is checked on random
    pairs. If it is not true, the model itself computes the inputs up to the block.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, max_length: int) -> None:
        """Find the properties of the stage by running `model`, which stays unchanged.

        Args:
            model: the public model.
            anatomy: the parts of the model.
            max_length: number P of positions.

        Raises:
            AnatomyError: the input of a token depends on its neighbours, so a candidate token cannot be computed alone.
        """
        # The reference is weak because a cache holds the stage of each model: a strong one would keep all attacked models in memory.
        self._held = ref(model)
        self._reader = model.get_submodule(anatomy.projections[0].module)
        self.vocabulary = vocabulary_size(model)
        self.hidden = anatomy.hidden
        self.max_length = max_length
        self.device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(0)
        self._check_tokens_are_independent(generator)
        sample = self._sample(2, 6, generator)
        rows = self._run(sample)
        self.position_free = bool(torch.allclose(self._run(sample.flip(1)).flip(1), rows, atol=1e-6))
        self.norm_module = self._find_norm()
        self.norm = self._fit_norm(generator)
        self.additive = self.norm is not None and self._is_additive(generator)

    def _run(self, ids: Tensor) -> Tensor:
        """Return the attention inputs (N, T, D) of token ids (N, T), in the model's dtype."""
        return run_until(self._model, ids.to(self.device), self._reader)

    def _sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Return random ids (count, length) without the padding token.

        Some models (RoBERTa) give padding no position.
        """
        pad: Any = getattr(getattr(self._model, "config", None), "pad_token_id", None)
        ids = torch.randint(self.vocabulary, (count, length), generator=generator)
        return ids if pad is None else torch.where(ids == pad, (ids + 1) % self.vocabulary, ids)

    def _check_tokens_are_independent(self, generator: torch.Generator) -> None:
        ids = self._sample(2, 5, generator)
        ids[1, 2] = ids[0, 2]
        one, two = self._run(ids)
        if not torch.allclose(one[2], two[2], atol=1e-6):
            raise AnatomyError("the first block's attention input of a token depends on the tokens around it")

    def _find_norm(self) -> nn.Module | None:
        """Return the module whose output is the attention input, or None.

        Dropout after the module changes nothing in eval mode.
        """
        calls = trace_tokens(self._model)
        wanted = next(call.given for call in calls if call.module is self._reader)
        for call in calls:
            if call.module is self._reader:
                return None
            if is_leaf(call.module) and not is_dropout(call.module) and same_tensor(call.made, wanted):
                return call.module if call.given.shape == call.made.shape else None
        return None

    def _before_norm(self, ids: Tensor) -> Tensor:
        """Return the input of the normalisation for token ids (N, T).

        Without a normalisation, this is the attention input.
        """
        reader = self.norm_module if self.norm_module is not None else self._reader
        return run_until(self._model, ids.to(self.device), reader)

    def _fit_norm(self, generator: torch.Generator) -> Norm | None:
        """Recognise LayerNorm or RMSNorm by fitting gain and shift.

        Only an exact fit is accepted.
        """
        if self.norm_module is None:
            return None
        ids = self._sample(8, 8, generator)
        u = self._before_norm(ids).double().flatten(0, 1)
        x = self._run(ids).double().flatten(0, 1)
        eps = next(
            (
                float(v)
                for name in ("eps", "variance_epsilon", "epsilon")
                if (v := getattr(self.norm_module, name, None))
            ),
            1e-6,
        )
        ones, zeros = torch.ones(self.hidden).double().to(u), torch.zeros(self.hidden).double().to(u)
        for centred in (True, False):
            z = Norm(centred, eps, ones, zeros).apply(u)
            spread = z - z.mean(0)
            gain = (spread * (x - x.mean(0))).sum(0) / spread.square().sum(0).clamp_min(1e-30)
            shift = x.mean(0) - gain * z.mean(0)
            if torch.allclose(gain * z + shift, x, atol=1e-4 * float(x.abs().max())):
                return self._refine(Norm(centred, eps, gain, shift))
        return None

    def _refine(self, norm: Norm) -> Norm:
        """Return the norm with the module's own gain and shift if they fit.

        The module's values are exact.
        """
        gain: Any = getattr(self.norm_module, "weight", None)
        shift: Any = getattr(self.norm_module, "bias", None)
        for offset in (0.0, 1.0):  # Gemma stores gain - 1
            if isinstance(gain, Tensor) and torch.allclose(gain.double() + offset, norm.gain, atol=1e-3):
                exact = shift.detach().double() if isinstance(shift, Tensor) else torch.zeros_like(norm.shift)
                return Norm(norm.centred, norm.eps, gain.detach().double() + offset, exact)
        return norm

    def _is_additive(self, generator: torch.Generator) -> bool:
        ids = self._sample(6, 6, generator)
        u = self._before_norm(ids).double()
        predicted = self._tokens_before_norm(ids.flatten()).double().view_as(u) + self._positions(6)[None]
        return bool(torch.allclose(predicted, u, atol=1e-5 * float(u.abs().max())))

    def _tokens_before_norm(self, ids: Tensor) -> Tensor:
        """Return (N, D), the normalisation's input for each token at position 0."""
        size = max(1, CHUNK_BYTES // (self.hidden * 4 * 4))
        return torch.cat([self._before_norm(chunk[:, None])[:, 0] for chunk in ids.split(size)])

    def _positions(self, count: int) -> Tensor:
        """Return (count, D) float64, the vector that each position adds."""
        token = self.vocabulary // 2
        u = self._before_norm(torch.full((1, count), token))[0].double()
        return u - u[:1]

    @cached_property
    def token_vectors(self) -> Tensor:
        """(V, D) float32: the normalisation's input for each token at position 0."""
        return self._tokens_before_norm(torch.arange(self.vocabulary))

    @cached_property
    def position_vectors(self) -> Tensor:
        """(P, D) float64: the vector that each position adds to the token vector."""
        return self._positions(1 if self.position_free else self.max_length)

    def inputs(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the attention inputs (N, D), float64, of tokens (N,) at positions (N,)."""
        if self.additive:
            assert self.norm is not None
            where = torch.zeros_like(positions) if self.position_free else positions
            u = self.token_vectors[tokens].double() + self.position_vectors[where]
            return self.norm.apply(u)
        return self._inputs_by_running(tokens, positions)

    @property
    def _model(self) -> nn.Module:
        model = self._held()
        assert model is not None, "an input stage is used while its model lives"
        return model

    def _inputs_by_running(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if len(tokens) == 0:
            return torch.zeros(0, self.hidden, dtype=torch.float64, device=self.device)
        length = int(positions.max()) + 1
        size = max(1, CHUNK_BYTES // (self.hidden * length * 8))
        rows = []
        for ids, where in zip(tokens.split(size), positions.split(size), strict=True):
            made = self._run(ids[:, None].expand(-1, length))
            rows.append(made[torch.arange(len(ids)), where].double())
        return torch.cat(rows)


_STAGES: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], InputStage]] = WeakKeyDictionary()


def input_stage_of(model: nn.Module, max_length: int) -> InputStage:
    """Return the input stage of a model; it is computed again if weights change."""
    versions = (max_length, *(p._version for p in model.parameters()), next(model.parameters()).data_ptr())
    if model not in _STAGES or _STAGES[model][0] != versions:
        _STAGES[model] = (versions, InputStage(model, anatomy_of(model), max_length))
    return _STAGES[model][1]
