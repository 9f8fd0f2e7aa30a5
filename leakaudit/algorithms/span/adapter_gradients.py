"""Gradients of adapters for each sequence, compared with an observed one.

One forward and one backward pass give the gradients of all sequences: a linear layer's gradient is the sum over tokens of (gradient of its
output) times (its input), so it can be summed for each sequence apart.

Letters: N sequences, T tokens, R rank, P entries of all adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from leakaudit.algorithms.padding import padded_batch
from leakaudit.client.observation import Observation
from leakaudit.models.structure import Adapter, Projection
from leakaudit.models.structure.trace import watched


class AdapterAgreement:
    """Comparison of sequences with an observed gradient of adapters.

    Every matrix is divided by the sizes of its rows and columns, so that large rows do not decide alone. Then the comparison is a cosine.
    It does not depend on the factor of the loss or of clipping.
    """

    def __init__(self, seen: Observation, adapters: Sequence[Adapter]) -> None:
        """Prepare the comparison.

        Args:
            seen: an observation whose update is a gradient or an estimate of one; the task is a language model.
            adapters: all adapters of the model.
        """
        self._seen = seen
        self._adapters = [a for a in adapters if a.up.weight in seen.update and a.down.weight in seen.update]
        self._weights = {
            p.weight: _even(p.by_output(seen.update[p.weight])) for a in self._adapters for p in (a.down, a.up)
        }
        self.observed = torch.cat(
            [(p.by_output(seen.update[p.weight]) * self._weights[p.weight]).flatten() for p in self._parts]
        )  # (P,)
        self._length = self.observed.norm()

    @property
    def _parts(self) -> list[Projection]:
        return [p for a in self._adapters for p in (a.down, a.up)]

    def gradients(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return (N, P): each sequence's gradient of its summed loss, in even units."""
        ids, mask = padded_batch(self._seen, sequences)
        inputs, gradients = self._run(ids, mask)
        found = []
        for adapter, dy in zip(self._adapters, gradients, strict=True):
            up = adapter.up.by_output(self._seen.model.get_parameter(adapter.up.weight)).detach()
            for part, one, two in (
                (adapter.down, dy @ up, inputs[adapter.down.module]),
                (adapter.up, dy, inputs[adapter.up.module]),
            ):
                whole = torch.einsum("nto,nti->noi", one, two)
                found.append((whole * self._weights[part.weight]).flatten(1))
        return torch.cat(found, dim=1)

    def __call__(self, gradients: Tensor, others: Tensor | None = None) -> Tensor:
        """Return (N,) cosines of the observed gradient with gradients (N, P).

        Args:
            gradients: of the sequences.
            others: (P,) sum of the gradients of other sequences of the batch, which is added to each.
        """
        whole = gradients if others is None else gradients + others
        cosines: Tensor = whole @ self.observed / (whole.norm(dim=1) * self._length).clamp_min(1e-30)
        return cosines

    def _run(self, ids: Tensor, mask: Tensor) -> tuple[dict[str, Tensor], Sequence[Tensor]]:
        """Return the inputs of all maps, and the gradients at the up maps' outputs."""
        model = self._seen.model
        maps = [part.module for part in self._parts]
        with watched(model, maps) as seen, torch.enable_grad():
            scores = model(input_ids=ids, attention_mask=mask).logits.log_softmax(dim=-1)
            loss = -(scores[:, :-1].gather(2, ids[:, 1:, None])[..., 0] * mask[:, 1:]).sum()
            made = [seen.made[adapter.up.module] for adapter in self._adapters]
            return {name: given.detach() for name, given in seen.given.items()}, torch.autograd.grad(loss, made)

    def directions(self, left: Tensor) -> Mapping[str, Tensor]:
        """Return the direction of the weights in which the wanted loss rises.

        Args:
            left: (P,) the observed gradient less what is explained, divided like it.

        Returns:
            Parameter name -> (of its shape) direction.
        """
        found, start = {}, 0
        for part in self._parts:
            weight = self._weights[part.weight]
            piece = left[start : start + weight.numel()].view_as(weight) * weight
            start += weight.numel()
            found[part.weight] = part.by_output(piece)
        return found


def _even(gradient: Tensor) -> Tensor:
    """Return factors that make all rows and columns of a matrix about equally large."""
    squared = gradient.square()
    rows, columns = squared.mean(dim=1, keepdim=True), squared.mean(dim=0, keepdim=True)
    floor = 1e-6 * squared.mean().clamp_min(1e-30)
    factors = (rows.clamp_min(floor) * columns.clamp_min(floor)).rsqrt()
    return factors / (gradient * factors).square().mean().sqrt().clamp_min(1e-30)
