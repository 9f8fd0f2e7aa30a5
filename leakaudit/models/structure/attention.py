"""Attention heads: which features are query, key or value of which head.

Probes find them.

Letters: F output features of a block's projections, T tokens, D' width of the attention's output, d_h width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.models.structure.trace import CHUNK_BYTES, PROBE_LENGTH, Call, hooked, is_linear, probe_ids, run_until


@dataclass(frozen=True)
class Head:
    """Indices of one head's features among the concatenated projection outputs."""

    query: Tensor
    """(d_h,) indices."""
    key: Tensor
    """(d_h,) indices."""
    value: Tensor
    """(d_h,) indices."""


@dataclass(frozen=True)
class Attention:
    """Facts about a block's attention that probes found."""

    output: str
    """Module name of the linear layer that reads the attention's output; empty if there is no such layer."""
    causal: bool
    heads: tuple[Head, ...]
    """Empty if the probes could not separate the heads."""


def probe_attention(model: nn.Module, readers: list[Call], calls: list[Call], block_calls: list[Call]) -> Attention:
    """Find query, key and value features and their heads by probing.

    Row 1 of four rows is changed. A query feature changes only row 1 of the attention output, within its head. A value
    feature changes one coordinate for each head that reads it, in every row that attends to row 1. A key feature changes whole
    heads in these rows.

    Args:
        model: the model, which stays unchanged.
        readers: calls of the layers that read the attention input.
        calls: all calls of the traced forward pass.
        block_calls: the calls inside the block.

    Raises:
        AnatomyError: the layers work on (T, B, D) instead of (B, T, D), as those of XLNet do.
    """
    if any(call.made.dim() == 3 and len(call.made) == PROBE_LENGTH for call in readers):
        raise AnatomyError(
            f"{readers[0].name}: looked for examples in the first dimension of its output, found the tokens of one"
        )
    start = next(index for index, call in enumerate(block_calls) if call is readers[-1])
    after = [call for call in block_calls[start + 1 :] if is_linear(call)]
    outputs = [call for call in after if all(call.module is not g.module for g in readers)]
    for output in outputs[:3]:
        changed = _responses(model, readers, calls, output)
        if changed is not None and bool(changed.any()):
            return Attention(output.name, *_heads_from(changed))
    return Attention(outputs[0].name if outputs else "", False, ())


def _responses(model: nn.Module, group: list[Call], calls: list[Call], output: Call) -> Tensor | None:
    """Return (F, T, D') booleans: which entries change with a feature at row 1.

    The entries are those of the output layer's input. The computation is in float64, so that the changes of dependent and independent
    entries differ by many orders of magnitude even in untrained models.
    """
    widths = [int(call.made.shape[-1]) for call in group]
    *offsets, total = accumulate(widths, initial=0)
    weights = {name: parameter.detach().double() for name, parameter in _reached_parameters(model, calls, output)}
    # Logits should change by about one: less cannot be seen in weak heads, more saturates the softmax of strong ones.
    nudge = 3.0 / max(float(torch.cat([call.made.flatten() for call in group]).std()), 1e-3)
    chunk = max(1, min(total, CHUNK_BYTES // (PROBE_LENGTH * total * 8 * 8)))
    found = []
    base = run_until(model, probe_ids(model), output.module, weights=weights)
    if base.dim() != 3:
        return None
    for start in range(0, total, chunk):
        features = torch.arange(start, min(start + chunk, total))
        with hooked(
            call.module.register_forward_hook(_nudger(features - offset, width, nudge))
            for call, width, offset in zip(group, widths, offsets, strict=True)
        ):
            moved = run_until(model, probe_ids(model).expand(len(features), -1), output.module, weights=weights)
        found.append((moved - base).abs() > 1e-9 * float(base.detach().abs().max()))
    return torch.cat(found).cpu()


def _reached_parameters(model: nn.Module, calls: list[Call], output: Call) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all parameters except those of modules that run only from `output` on."""
    turn = next(index for index, call in enumerate(calls) if call is output)
    before = {id(p) for call in calls[:turn] for p in call.module.parameters(recurse=False)}
    after = {id(p) for call in calls[turn:] for p in call.module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if id(parameter) in before or id(parameter) not in after:
            yield name, parameter


def _nudger(features: Tensor, width: int, nudge: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Return a hook that adds `nudge` to one feature of each example, at row 1.

    Examples whose feature belongs to another layer stay unchanged.
    """
    rows = ((features >= 0) & (features < width)).nonzero().flatten()

    def add(_module: nn.Module, _args: Any, made: Tensor) -> Tensor:
        changed = made.clone()
        changed[rows.to(made.device), 1, features[rows].to(made.device)] += nudge
        return changed

    return add


def _heads_from(changed: Tensor) -> tuple[bool, tuple[Head, ...]]:
    """Return the heads, with features sorted by the entries that they change.

    Args:
        changed: (F, T, D') booleans from `_responses`.

    Returns:
        Whether the model is causal, and its heads; no heads if the responses contradict one another.
    """
    own = changed[:, 1].sum(dim=1)  # (F,) coordinates moved in the changed row
    later = changed[:, 2:].any(dim=1)  # (F, D')
    causal = not bool(changed[:, 0].any())
    is_query = (own > 0) & ~later.any(dim=1)
    if not bool(is_query.any()):
        return causal, ()
    size = int(own[is_query].mode().values)  # d_h: a query feature moves its whole head
    reach = later.sum(dim=1)  # (F,) a key moves d_h coordinates per head that reads it, a value one
    is_value = (reach > 0) & (reach < size)
    is_key = reach >= size
    owners: dict[tuple[int, ...], list[int]] = {}
    for feature in is_query.nonzero().flatten().tolist():
        owners.setdefault(tuple(changed[feature, 1].nonzero().flatten().tolist()), []).append(feature)
    heads = []
    for coordinates, query in owners.items():
        where = torch.tensor(coordinates)
        key = (is_key & later[:, where].all(dim=1)).nonzero().flatten()
        value = (is_value & later[:, where].any(dim=1)).nonzero().flatten()
        if len(key) != len(query):
            return causal, ()
        heads.append(Head(torch.tensor(query), key, value))
    return causal, tuple(heads)
