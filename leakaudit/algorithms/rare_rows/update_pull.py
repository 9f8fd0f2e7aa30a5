"""Which next tokens the update of the attention's output layers pulls at.

A batch's gradient is the sum of the gradients of its next tokens. So a step against it raises the log-probability of exactly those tokens after exactly those
prefixes, and of others by chance only. Chance is smallest where inputs and gradients of a layer are white, so the update is multiplied by the inverses of their second
moments, as natural gradients are with Kronecker factors (K-FAC: Martens and Grosse 2015, arXiv 1503.05671). Drawn sentences tell the moments. Two forward passes, with the
weights shifted a little along this direction and against it, give the derivatives of all log-probabilities after a prefix.

The word tables have no part in this, so it holds for tied, untied and frozen ones. Own derivation; docs/decisions/rare_rows_decoders.md has the figures.

Letters: n prefixes, T tokens, D hidden size, M tokens that may follow, N targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from leakaudit.algorithms.padding import padded_batch
from leakaudit.algorithms.rare_rows.decoder_prefixes import PrefixStates
from leakaudit.algorithms.rare_rows.sentence_rows import summed_loss
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure.decoder import attention_outputs
from leakaudit.models.structure.layers import Projection
from leakaudit.models.structure.trace import watched

RIDGE = 1e-2
"""Part of the mean eigenvalue that is added to every direction. Chosen on training texts: 1e-1 and 1e-3 name fewer next tokens."""

SHIFT = 1e-3
"""Length of the weights' shift in units of the weights' length. Our choice: rounding changes the derivatives by less than one in 1,000."""

COMPARED = 64
"""Drawn sentences on which the usual derivatives are measured. Our choice: about a thousand prefixes."""

CHUNK = 32
"""Sentences of one forward and backward pass. Our choice: their logits take 0.1 GB for 20 tokens and 40,000 words."""


class UpdatePull:
    """Derivatives of next tokens along what is left of the update."""

    def __init__(self, seen: Observation, drawn: Tensor) -> None:
        """Measure the second moments of the layers.

        Args:
            seen: a causal language model's update.
            drawn: (n, T) token ids of drawn sentences.
        """
        self._seen, self._drawn = seen, drawn
        self._layers = _shared_layers(seen)
        moments = self._second_moments() if self._layers else []
        self._white = [(_inverse(given), _inverse(slopes)) for given, slopes in moments]
        self._sides: tuple[PrefixStates, PrefixStates] | None = None
        self._usual = torch.zeros(2, 0)

    def learn(self, targets: float, taken: Sequence[Sequence[int]]) -> None:
        """Follow what is left of the update without these sentences.

        Args:
            targets: N.
            taken: token ids of each sentence.
        """
        self._sides = None
        if not self._layers:
            return
        own: dict[str, Tensor] = {name: value.detach().float() for name, value in self._seen.model.named_parameters()}
        step = self._direction(targets, taken)
        length = sum(float(one.square().sum()) for one in step.values()) ** 0.5
        if not length > 0:
            return
        size = SHIFT * sum(float(own[name].square().sum()) for name in step) ** 0.5 / length
        against, along = ({name: own[name] + sign * size * one for name, one in step.items()} for sign in (-1, 1))
        self._sides = PrefixStates(self._seen.model, against), PrefixStates(self._seen.model, along)
        found = self._moved(lambda side: side.all_of(self._drawn[:COMPARED])) @ self._head.T  # (n, V)
        self._usual = torch.stack([found.mean(dim=0), found.std(dim=0).clamp_min(1e-30)])

    @property
    def known(self) -> bool:
        """Return whether there is an update to follow."""
        return self._sides is not None

    def start(self, paths: Tensor, tokens: Tensor) -> Tensor:
        """Keep prefixes (n, T), and return how much each token is pulled at.

        Returns:
            (n, M) in standard deviations, over the tokens, of what is usual for each.
        """
        return self._pulled(self._moved(lambda side: side.start(paths)), tokens)

    def extend(self, rows: Tensor, added: Tensor, tokens: Tensor) -> Tensor:
        """Replace the prefixes by continued ones, and return the same for them.

        Args:
            rows: (n,) numbers of the prefixes to continue.
            added: (n,) one token for each.
            tokens: (M,) tokens that may follow.
        """
        return self._pulled(self._moved(lambda side: side.extend(rows, added)), tokens)

    @property
    def _head(self) -> Tensor:
        weight: Tensor = self._seen.model.get_output_embeddings().weight  # type: ignore[operator]  # of every transformers model
        return weight.detach().float()

    def _pulled(self, moved: Tensor, tokens: Tensor) -> Tensor:
        usual = self._usual[:, tokens]
        found = (moved @ self._head[tokens].T - usual[0]) / usual[1]
        return (found - found.mean(dim=1, keepdim=True)) / found.std(dim=1, keepdim=True).clamp_min(1e-30)

    def _moved(self, states: Callable[[PrefixStates], Tensor]) -> Tensor:
        """Return (n, D) how far states move along the update, up to one factor."""
        assert self._sides is not None
        against, along = map(states, self._sides)
        return against - along

    def _direction(self, targets: float, taken: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        left = {layer.weight: targets * self._seen.update[layer.weight].float() for layer in self._layers}
        for start in range(0, len(taken), CHUNK):
            ids, mask = padded_batch(self._seen, taken[start : start + CHUNK])
            for layer, (given, slopes) in zip(
                self._layers, _traced(self._seen.model, self._layers, ids, mask), strict=True
            ):
                left[layer.weight] -= given.T @ slopes if layer.input_first else slopes.T @ given
        step = {}
        for layer, (given, slopes) in zip(self._layers, self._white, strict=True):
            gradient = left[layer.weight]
            step[layer.weight] = given @ gradient @ slopes if layer.input_first else slopes @ gradient @ given
        return step

    def _second_moments(self) -> list[tuple[Tensor, Tensor]]:
        """Return second moments of each layer's inputs, and of its gradients."""
        sums: list[tuple[Tensor, Tensor]] = []
        for part in self._drawn.split(CHUNK):
            traced = _traced(self._seen.model, self._layers, part, torch.ones_like(part))
            squares = [(given.T @ given, slopes.T @ slopes) for given, slopes in traced]
            sums = [(a + c, b + d) for (a, b), (c, d) in zip(sums, squares, strict=True)] if sums else squares
        return [(given / self._drawn.numel(), slopes / self._drawn.numel()) for given, slopes in sums]


def _shared_layers(seen: Observation) -> list[Projection]:
    """Return the attention's output layers whose update is shared."""
    try:
        return [layer for layer in attention_outputs(seen.model) if layer.weight in seen.update]
    except AnatomyError:  # the rows alone propose tokens then
        return []


def _traced(model: nn.Module, layers: Sequence[Projection], ids: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each layer's inputs (n T, ...), and the gradients at its outputs."""
    with watched(model, (one.module for one in layers)) as seen, torch.enable_grad():
        loss = summed_loss(model, ids, mask)
        slopes = torch.autograd.grad(loss, [seen.made[one.module] for one in layers])
    kept = mask.bool()
    return [
        (seen.given[one.module].detach()[kept].float(), slope[kept].float())
        for one, slope in zip(layers, slopes, strict=True)
    ]


def _inverse(moment: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(moment.double())
    values = values.clamp_min(0.0) + RIDGE * values.mean().clamp_min(1e-30)
    inverse: Tensor = ((vectors / values) @ vectors.T).float()
    return inverse
