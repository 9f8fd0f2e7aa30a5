"""Rank reduction: a test of sequences by the update of a feed-forward layer.

Let f_i be the input of a linear layer behind the first attention at token i; it depends on the token's context. The
layer's update is sum_i dy_i f_i^T.
No two tokens have the same context, so the f_i are linearly independent: the rank of the update is the number of tokens
in the batch, and every f_i lies in its row space. The second layer of the feed-forward part is wide (1536 inputs in a
small encoder, of which a batch of 200 tokens fills 200 directions). So there are about a thousand equations for each
token of a hypothesis. The share of f_i outside the span is very different for a wrong token, for a right token with
wrong neighbours, and for a right sequence; `completion` searches by this share.

A sequence S with inputs F_S (L, W) and output gradients Y_S (L, O) can be subtracted from the update G (O, W) so that
the rank falls by L if and only if F_S G^+ Y_S^T = 1 (Wedderburn's rank reduction). Y_S is a combination of one
simulated gradient for each class. So a linear system of L^2 equations with a few unknowns says whether the sequence is
in the batch, and with what weight, whatever other sequences are in it. This needs dropout off and fewer tokens in the
batch than the layer has outputs. (Own derivation.)
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leakaudit.algorithms.least_squares import solve_least_squares
from leakaudit.algorithms.padding import padded_batch
from leakaudit.algorithms.span.subspace import FULL_RANK_MARGIN, span_of
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Projection, find_down_projection, run_until

SAME = 1e-4
"""Largest relative difference at which words that are hidden from each other count as read separately.
Our choice: rounding is far below; a position scheme that does not fit is far above."""

COLUMNS = 48
"""Words that are tried side by side in one row.
Measured; see docs/decisions/span_constants.md."""

AT_ONCE = 4096
"""Options that are run at once.
Our choice: with 3072 features each, they take 100 MB, and the sequences beside them as much."""


class _Form(NamedTuple):
    """How a model is told which tokens see each other."""

    offset: int
    """First position id."""
    added: bool
    """Whether the mask (N, 1, T, T) is added to scores. Otherwise it is (N, T, T), of ones where a token is seen, as encoders of transformers
    4 take it."""


class FeedForwardSpan:
    """The span of a feed-forward layer's inputs, and the test of hypotheses by it."""

    def __init__(self, seen: Observation, layer: Projection, form: _Form) -> None:
        """Find the span.

        Args:
            seen: the observation.
            layer: the layer.
            form: of the inputs that hide words from each other.

        Raises:
            AnatomyError: the update has no clear rank: there are more tokens than the layer has outputs, or the update
                is noisy.
        """
        self.layer = layer
        self._seen, self._module, self._form = seen, seen.model.get_submodule(layer.module), form
        self._rest = layer.by_output(seen.update[layer.weight]).double()  # (O, W)
        turned = span_of(self._rest.T.contiguous())
        if turned.noisy:
            raise AnatomyError(f"the update of {layer.module} has no clear rank")
        self.tokens = turned.rank
        """How many tokens are left in the batch."""
        self._factor(turned.vectors.T)

    def _factor(self, left: Tensor) -> None:
        """Write the remaining update as the product of left, core and right.

        Args:
            left: (O, R) float64, an orthonormal basis of its columns.
        """
        self._left = left
        seen = left.T @ self._rest  # (R, W)
        self._right = torch.linalg.qr(seen.T).Q.T  # (R, W)
        self._core = seen @ self._right.T  # (R, R)
        self._rough = self._right.float()

    def of_members(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return (L,) float32 for each sequence: each token's share outside the span."""
        ids, mask = padded_batch(self._seen, sequences)
        given = run_until(self._seen.model, ids, self._module, attention_mask=mask)
        return [self._outside(row[: len(ids)]) for row, ids in zip(given, sequences, strict=True)]

    def of_options(self, known: Mapping[int, int], tokens: Tensor, places: Tensor) -> Tensor:
        """Return (n, k) float32: shares outside the span of tokens beside known ones.

        Args:
            known: place -> token id; known tokens at an option's own places do not count.
            tokens: (n, k) int64: n options of k tokens each.
            places: (n, k) int64: place of each token.
        """
        parts = [
            self._outside(_apart(self._seen, self._module, self._form, known, some, where).flatten(0, 1))
            for some, where in zip(tokens.split(AT_ONCE), places.split(AT_ONCE), strict=True)
        ]
        return torch.cat(parts).reshape(tokens.shape)

    def _outside(self, given: Tensor) -> Tensor:
        given = given.float()
        whole = given.square().sum(1)
        inside = (given @ self._rough.T).square().sum(1)
        share: Tensor = ((whole - inside).clamp_min(0.0) / whole.clamp_min(1e-30)).sqrt()
        return share

    def fit(self, inputs: Tensor, gradients: Tensor) -> tuple[float, Tensor]:
        """Return how far a sequence is from lowering the rank by its length.

        Args:
            inputs: (L, W) float64: what the layer reads at the tokens.
            gradients: (C', L, O) float64: gradients of the layer's outputs for each of C' logits.

        Returns:
            The relative error, from 0 up, and the weights (C',) of the gradients.
        """
        inverse = torch.linalg.solve(self._core, self._left.T)  # (R, O): G^+ = right^T inverse
        reduced = torch.einsum("lr,ro,cmo->clm", inputs @ self._right.T, inverse, gradients)  # (C', L, L)
        one = torch.eye(len(inputs), dtype=reduced.dtype, device=reduced.device)
        weights = solve_least_squares(reduced.flatten(1).T, one.flatten()[:, None])[:, 0]
        missed = torch.einsum("c,clm->lm", weights, reduced) - one
        return float(missed.norm()) / len(inputs) ** 0.5, weights

    def take(self, inputs: Tensor, gradients: Tensor) -> None:
        """Subtract a sequence.

        Args:
            inputs: (L, W) float64: what the layer reads at its tokens.
            gradients: (L, O) float64: gradients of the layer's outputs.
        """
        self._rest = self._rest - gradients.T @ inputs
        self.tokens = max(0, self.tokens - len(inputs))
        axes = torch.linalg.eigh(self._rest @ self._rest.T).eigenvectors.flip(1)  # (O, O), the strongest first
        self._factor(axes[:, : self.tokens])


def feed_forward_span_of(seen: Observation) -> FeedForwardSpan | None:
    """Return the span behind the first attention, or None if it gives no information.

    It gives none if the layer's update is not shared, noisy, or fills all directions, or if words cannot be tried side by
    side.
    """
    try:
        layer = find_down_projection(seen.model)
    except AnatomyError:
        return None
    update = seen.update.get(layer.weight)
    if update is None or not bool(update.any()):
        return None
    form = _form(seen, layer)
    if form is None:
        return None
    try:
        context = FeedForwardSpan(seen, layer, form)
    except AnatomyError:
        return None
    return context if context.tokens <= min(update.shape) - FULL_RANK_MARGIN else None


def _form(seen: Observation, layer: Projection) -> _Form | None:
    """Return the form of the inputs, or None if hidden words are read differently.

    The layer must read words that are hidden from each other as in a sequence of their own. A few tokens test this.
    """
    takes = inspect.signature(seen.model.forward).parameters
    if "position_ids" not in takes:
        return None
    rows = seen.facts.vocabulary.size
    device = next(seen.model.parameters()).device
    ids = (torch.arange(4, device=device) * 7 + rows // 2) % rows
    known = dict(enumerate(ids.tolist()))
    module = seen.model.get_submodule(layer.module)
    plain = run_until(seen.model, ids[None], module)[0]
    offsets = (0, seen.facts.vocabulary.special.get("pad", 0) + 1)
    for form in (_Form(offset, added) for added in (True, False) for offset in offsets):
        try:
            apart = _apart(seen, module, form, known, ids.reshape(2, 2), torch.arange(4, device=device).reshape(2, 2))
        except (AnatomyError, TypeError, ValueError, RuntimeError, IndexError):
            continue
        difference = apart.flatten(0, 1) - plain if apart.shape[-1] == plain.shape[-1] else plain
        if float(difference.norm()) <= SAME * float(plain.norm()):
            return form
    return None


def _apart(
    seen: Observation, module: torch.nn.Module, form: _Form, known: Mapping[int, int], tokens: Tensor, places: Tensor
) -> Tensor:
    """Return (n, k, W): what a layer reads at the k tokens of each of n options.

    Options follow the known tokens in one row, with the position ids of their places. Each option attends to itself and
    to the known tokens, except those whose places it takes; no token attends to an option.
    """
    device = tokens.device
    length, (count, width) = len(known), tokens.shape
    columns = max(1, min(COLUMNS, tokens.numel(), seen.facts.vocabulary.max_length - length) // width)
    rows = -(-count // columns)
    spare = rows * columns - count
    filled = [torch.cat([x, x[:1].expand(spare, -1)]).reshape(rows, -1) for x in (tokens, places)]
    here, ids = (torch.tensor(list(x), device=device) for x in (known.keys(), known.values()))
    row_ids = torch.cat([ids.expand(rows, -1), filled[0]], dim=1)
    positions = torch.cat([here.expand(rows, -1), filled[1]], dim=1) + form.offset
    total = length + columns * width
    option = torch.arange(columns, device=device).repeat_interleave(width)
    hidden = torch.zeros(rows, 1, total, total, dtype=torch.bool, device=device)
    hidden[:, :, :length, length:] = True
    hidden[:, :, length:, length:] = option[:, None] != option
    taken = (filled[1].reshape(rows, columns, width, 1) == here).any(2)  # (rows, columns, length)
    hidden[:, 0, length:, :length] = taken.repeat_interleave(width, dim=1)
    dtype = next(seen.model.parameters()).dtype
    if form.added:
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, torch.finfo(dtype).min)
    else:
        mask = (~hidden[:, 0]).to(dtype)
    given = run_until(seen.model, row_ids, module, attention_mask=mask, position_ids=positions)
    return given[:, length:].reshape(rows * columns, width, -1)[:count]
