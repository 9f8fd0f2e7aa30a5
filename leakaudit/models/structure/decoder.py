"""The parts of a decoder: readers of a prefix, and the last layers.

Letters: N sequences, T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.models.structure.embeddings import vocabulary_size
from leakaudit.models.structure.layers import Projection, attention_readers, first_block, projection_of
from leakaudit.models.structure.trace import (
    Call,
    evaluating,
    is_linear,
    probe_ids,
    run_until,
    same_tensor,
    trace_tokens,
)


@dataclass(frozen=True)
class Tail:
    """The head, and the last linear layer before it, which treats each token alone."""

    layer: Projection
    """In most models, it is the down projection of the last block's feed-forward part."""
    head: str
    """Module name of the linear layer that returns the logits."""


def prefix_readers(model: nn.Module) -> tuple[tuple[Projection, ...], ...]:
    """Return groups of linear layers whose input depends only on a token's prefix.

    The search covers the layers from the first block's attention to the second block's attention input: the attention's
    output projection, the feed-forward part (unless it runs in parallel to the attention), and the next query, key and value. The
    model stays unchanged.

    Raises:
        AnatomyError: there is no such layer, so the model is not a decoder.
    """
    ids = probe_ids(model)
    calls = trace_tokens(model)
    first, block = first_block(model, calls)
    attention = attention_readers(first, block)
    second = f"{first.removesuffix('0')}1."
    inside = [call for call in calls if call.name.startswith(second)]
    last = attention_readers(second, inside)[-1] if any(map(is_linear, inside)) else block[-1]
    between = calls[calls.index(attention[-1]) + 1 : calls.index(last) + 1]
    groups: list[list[Call]] = []
    for call in between:
        if not is_linear(call) or call.given.dim() != 3:
            continue
        known = next((group for group in groups if same_tensor(group[0].given, call.given)), None)
        if known is None:
            groups.append([call])
        elif all(call.module is not other.module for other in known):
            known.append(call)
    kept = [group for group in groups if _reads_prefix(model, ids, group[0])]
    if not kept:
        raise AnatomyError(
            f"{type(model).__name__}: looked for a linear layer behind {first}'s attention whose input depends on the tokens "
            f"before and not on those after, found {', '.join(group[0].name for group in groups) or 'no linear layer'}"
        )
    return tuple(tuple(projection_of(model, call) for call in group) for group in kept)


def _reads_prefix(model: nn.Module, ids: Tensor, reader: Call) -> bool:
    """Return whether a changed token changes the input only there and later."""
    changed = ids.clone()
    changed[0, 1] = (ids[0, 1] + 1) % vocabulary_size(model)
    moved = (run_until(model, changed, reader.module) - reader.given).abs().amax(dim=(0, 2))
    far = moved > 1e-6 * float(reader.given.abs().max())
    return far.tolist() == [False, True, True, True]


def attention_outputs(model: nn.Module) -> tuple[Projection, ...]:
    """Return the layer of each block that reads what its attention returns.

    It is the first linear layer behind those that read the attention's input. A block without such a layer is left out. The model stays
    unchanged.

    Raises:
        AnatomyError: the model has no list of blocks.
    """
    calls = trace_tokens(model)
    first, _ = first_block(model, calls)
    stem = first.removesuffix("0")
    found = []
    for number in dict.fromkeys(call.name[len(stem) :].split(".")[0] for call in calls if call.name.startswith(stem)):
        inside = [call for call in calls if call.name.startswith(f"{stem}{number}.")]
        if any(map(is_linear, inside)):
            behind = inside[inside.index(attention_readers(f"{stem}{number}", inside)[-1]) + 1 :]
            output = next((call for call in behind if is_linear(call) and call.given.dim() == 3), None)
            found += [] if output is None else [projection_of(model, output)]
    return tuple(found)


def find_tail(model: nn.Module) -> Tail:
    """Find the last linear layer before the head; no attention may follow it.

    The model stays unchanged.

    Raises:
        AnatomyError: the logits are not the plain output of one linear layer on every token, or attention follows the layer.
    """
    ids = probe_ids(model)
    linear = _without_shells(
        [
            call
            for call in trace_tokens(model)
            if is_linear(call) and call.made.dim() == 3 and call.made.shape[1] == ids.shape[1]
        ]
    )
    if len(linear) < 2:
        raise AnatomyError(
            f"{type(model).__name__}: looked for a layer and a head that work on every token, found {len(linear)}"
        )
    layer, head = linear[-2], linear[-1]
    _check_plain_logits(model, ids, head)
    _check_no_attention_between(model, ids, layer, head)
    return Tail(projection_of(model, layer), head.name)


def _without_shells(calls: list[Call]) -> list[Call]:
    """Leave out modules that only pass on what a layer inside returned.

    peft puts one around a head that it trains as a whole.
    """
    return [
        call
        for call in calls
        if not any(inner.name.startswith(f"{call.name}.") and inner.made is call.made for inner in calls)
    ]


def _check_plain_logits(model: nn.Module, ids: Tensor, head: Call) -> None:
    with evaluating(model):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    plain = head.made if logits.dim() == 3 else head.made[:, -1]
    if logits.shape != plain.shape or not torch.allclose(logits, plain, atol=1e-5 * float(plain.abs().max())):
        raise AnatomyError(f"{type(model).__name__}: its logits are not the plain output of {head.name}")


def _check_no_attention_between(model: nn.Module, ids: Tensor, layer: Call, head: Call) -> None:
    """Refuse the layer if its output at row 1 affects other rows of the head."""

    def nudge(_module: nn.Module, _args: Any, made: Tensor) -> Tensor:
        changed = made.clone()
        changed[:, 1] += made.std() * torch.linspace(-1.0, 1.0, made.shape[-1], device=made.device, dtype=made.dtype)
        return changed

    with layer.module.register_forward_hook(nudge):
        moved = run_until(model, ids, head.module)
    rows = (moved - head.given).abs().amax(dim=(0, 2)) > 1e-6 * float(head.given.abs().max())
    if rows.tolist() != [False, True, False, False]:
        raise AnatomyError(f"{type(model).__name__}: attention follows {layer.name}, the last layer before the head")
