"""Finds a transformer's parts by structure: one traced forward pass and a few probes, no list of model names.

Span attacks need three things of a model:

- the *attention input* of the first block, and the linear layers that read it (separate or fused, any layout);
- how that input comes from a token and its position (`InputStage`);
- which output feature of those layers is query, key or value of which head (`Head`).

Letters: B sequences, T tokens, D hidden size, V vocabulary, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from leakaudit.errors import AnatomyError

PROBE_LENGTH = 4
"""Tokens of the traced forward pass; four, so that a causal model shows rows before and after the probed one."""

CHUNK_BYTES = 256 * 2**20
"""Memory one chunk of candidate inputs may take. Our choice: far below what a training machine has left."""


@dataclass(frozen=True)
class Projection:
    """A linear layer of a block; mostly one that reads its attention input."""

    module: str
    weight: str
    """Parameter name."""
    input_first: bool
    """The weight is stored (in, out), as in GPT-2's Conv1D, not (out, in)."""
    out_features: int

    def by_output(self, weight: Tensor) -> Tensor:
        """Return a weight or its update as (out, in)."""
        return weight.T if self.input_first else weight


@dataclass(frozen=True)
class Adapter:
    """A low-rank map beside a projection, as in LoRA: the layer computes W x + s B A x."""

    down: Projection
    """A: reads the attention input, makes R features."""
    up: Projection
    """B: reads the R features, makes the layer's output."""
    beside: int
    """Index of the projection W among the anatomy's projections."""

    @property
    def rank(self) -> int:
        """Number R of features between the two."""
        return self.down.out_features


@dataclass(frozen=True)
class Head:
    """Where one attention head's features stand among the concatenated outputs of the block's projections."""

    query: Tensor
    """(d_h,) indices."""
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class _Call:
    """One module call of the traced forward pass."""

    name: str
    module: nn.Module
    given: Tensor
    made: Tensor


class _Reached(Exception):
    """Stops a forward pass where the attention input is known."""

    def __init__(self, value: Tensor) -> None:
        super().__init__("reached")
        self.value = value


@dataclass(frozen=True)
class Anatomy:
    """The parts of a transformer that attacks build on."""

    word_embedding: str
    """Parameter name of the (V, ...) token table."""
    projections: tuple[Projection, ...]
    """Linear layers of the first block that read its attention input, in call order."""
    output: str
    """Module name of the linear layer that reads the attention's output."""
    hidden: int
    """Width D of the attention input."""
    causal: bool
    heads: tuple[Head, ...]
    """Empty where the probes could not tell the heads apart."""
    tables: tuple[str, ...]
    """Parameter names of all other embedding tables in use (positions, token types)."""
    dropout_before: tuple[str, ...] = ()
    """Dropout modules that an attention input passes before a normalisation or a linear layer (GPT-2, T5, ELECTRA)."""
    dropout_after: tuple[str, ...] = ()
    """Dropout modules that it passes after all of these, so that masked coordinates are exactly zero (BERT)."""
    adapters: tuple[Adapter, ...] = ()
    """Low-rank maps beside the projections."""


def find_anatomy(model: nn.Module) -> Anatomy:
    """Find the parts of `model`; it is left as it was.

    Raises:
        AnatomyError: a part is missing; says what was looked for and what was found.
    """
    word = _word_embedding(model)
    table = model.get_parameter(word)
    calls = _trace(model, _probe_ids(model))
    block_name, block_calls = _first_block(model, calls)
    group, chains = _without_adapters(_attention_group(block_name, block_calls), block_calls)
    beside = {id(call.module) for chain in chains for call in (chain.down, chain.up, chain.wrapper)}
    block_calls = [call for call in block_calls if id(call.module) not in beside]
    projections = tuple(_projection(model, call) for call in group)
    output, causal, heads = _probe_heads(model, group, calls, block_calls)
    tables = tuple(
        name
        for module_name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for name in [f"{module_name}.weight"]
        if module.weight is not table and any(call.module is module for call in calls)
    )
    before, after = _input_dropout(calls, group[0])
    return Anatomy(
        dropout_before=before,
        dropout_after=after,
        word_embedding=word,
        projections=projections,
        output=output,
        hidden=int(group[0].given.shape[-1]),
        causal=causal,
        heads=heads,
        tables=tables,
        adapters=tuple(
            Adapter(_projection(model, chain.down), _projection(model, chain.up), group.index(chain.base))
            for chain in chains
        ),
    )


def _probe_ids(model: nn.Module) -> Tensor:
    """Return (1, T) token ids that are no special tokens of the usual layouts: from the middle of the vocabulary."""
    rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    device = next(model.parameters()).device
    return (torch.arange(PROBE_LENGTH, device=device) * 7 + rows // 2)[None, :] % rows


def _word_embedding(model: nn.Module) -> str:
    find: Any = getattr(model, "get_input_embeddings", None)
    table = find() if callable(find) else None
    if not isinstance(table, nn.Embedding):
        raise AnatomyError(
            f"{type(model).__name__}: looked for the token table (`get_input_embeddings()` returning an nn.Embedding), "
            f"found {type(table).__name__}"
        )
    return next(name for name, parameter in model.named_parameters() if parameter is table.weight)


@contextmanager
def _quiet_eval(model: nn.Module) -> Iterator[None]:
    """Run the block without gradients and in eval mode, and put the training flags back."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training


def _trace(model: nn.Module, ids: Tensor) -> list[_Call]:
    """Run one forward pass and list every module call with its first input and output tensor."""
    calls: list[_Call] = []
    names = {module: name for name, module in model.named_modules()}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        given = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        out = made[0] if isinstance(made, tuple) and made else made
        if given is not None and isinstance(out, Tensor):
            calls.append(_Call(names[module], module, given, out))

    handles = [m.register_forward_hook(record, with_kwargs=True) for m in model.modules()]
    try:
        with _quiet_eval(model):
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise AnatomyError(
            f"{type(model).__name__}: a forward pass with input_ids and attention_mask failed ({type(error).__name__})"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _first_block(model: nn.Module, calls: list[_Call]) -> tuple[str, list[_Call]]:
    """Return the name of the first block and the calls inside it: the first child of the heaviest list of modules."""
    called = {id(call.module) for call in calls}
    stacks = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and id(module[0]) in called
    ]
    if not stacks:
        kinds = sorted({type(module).__name__ for _, module in model.named_children()})
        raise AnatomyError(
            f"{type(model).__name__}: looked for a list of blocks (nn.ModuleList run in the forward pass), "
            f"found only {', '.join(kinds)}"
        )
    _, name, _ = max(stacks, key=lambda stack: stack[0])
    prefix = f"{name}.0."
    inside = [call for call in calls if call.name.startswith(prefix)]
    if not inside:
        raise AnatomyError(f"{type(model).__name__}: the first block {name}.0 has no inner modules")
    return f"{name}.0", inside


def _input_dropout(calls: list[_Call], reader: _Call) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the dropout modules on the way to `reader`: those before, and those after the last module that mixes features."""
    before: list[str] = []
    after: list[str] = []
    for call in calls[: next(index for index, call in enumerate(calls) if call is reader)]:
        if isinstance(call.module, nn.modules.dropout._DropoutNd):
            after.append(call.name)
        elif _is_norm(call) or _is_linear(call):  # ELECTRA and ALBERT project the embedding after its dropout
            before, after = before + after, []
    return tuple(before), tuple(after)


def _is_norm(call: _Call) -> bool:
    """Recognise a normalisation by its shape: a leaf with a 1-d gain that keeps the shape of its input."""
    gain = getattr(call.module, "weight", None)
    leaf = not list(call.module.children())
    return leaf and isinstance(gain, Tensor) and gain.dim() == 1 and call.given.shape == call.made.shape


def _is_linear(call: _Call) -> bool:
    weight = getattr(call.module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not call.given.is_floating_point():
        return False
    return sorted(weight.shape) == sorted((call.given.shape[-1], call.made.shape[-1]))


def _attention_group(block: str, calls: list[_Call]) -> list[_Call]:
    """Return the linear layers that read the same tensor as the first linear layer of the block."""
    linear = [call for call in calls if _is_linear(call)]
    if not linear:
        kinds = sorted({type(call.module).__name__ for call in calls})
        raise AnatomyError(f"{block}: looked for linear layers (a 2-d `weight`), found only {', '.join(kinds)}")
    first = linear[0].given
    group, seen = [], set()
    for call in linear:
        if _same(call.given, first) and call.module not in seen:
            group.append(call)
            seen.add(call.module)
    return group


@dataclass(frozen=True)
class _Chain:
    """Calls of one adapter."""

    wrapper: _Call
    """The module that adds up both ways."""
    base: _Call
    down: _Call
    up: _Call


def _without_adapters(group: list[_Call], calls: list[_Call]) -> tuple[list[_Call], list[_Chain]]:
    """Tell the layers that read the attention input from the adapters beside them.

    An adapter is a chain of two linear layers through fewer features than either side has, inside a module that reads the
    same input, makes as many features as the chain, and holds another linear layer that does so as well.
    """
    chains = []
    for wrapper in group:
        inside = [call for call in group if call.name.startswith(f"{wrapper.name}.")]
        chains += [
            _Chain(wrapper, base, down, up)
            for down in inside
            for up in calls
            if _is_linear(up) and _same(up.given, down.made) and up.name.startswith(f"{wrapper.name}.")
            for base in inside
            if base is not down and base.made.shape == up.made.shape == wrapper.made.shape
            if down.made.shape[-1] < min(down.given.shape[-1], up.made.shape[-1])
        ]
    beside = {id(call) for chain in chains for call in (chain.down, chain.wrapper)}
    return [call for call in group if id(call) not in beside], chains


def _projection(model: nn.Module, call: _Call) -> Projection:
    weight: Tensor = call.module.weight  # type: ignore[assignment]
    bias = getattr(call.module, "bias", None)
    plain = call.made - bias if isinstance(bias, Tensor) else call.made
    fits = {
        first: float((call.given @ (weight if first else weight.T) - plain).detach().abs().max())
        for first in (False, True)
        if weight.shape[0 if first else 1] == call.given.shape[-1]
    }
    input_first = min(fits, key=lambda first: fits[first])
    name = next((name for name, parameter in model.named_parameters() if parameter is weight), "")
    if not name:
        raise AnatomyError(f"{call.name}: its weight is no parameter of the model (quantised or computed on the fly)")
    return Projection(call.name, name, input_first, int(call.made.shape[-1]))


@dataclass(frozen=True)
class Tail:
    """The last linear layer that works on every token by itself, and the head that reads what comes of it."""

    layer: Projection
    """In most models the way out of the last block's feed-forward part."""
    head: str
    """Module name of the linear layer that makes the logits."""


def prefix_readers(model: nn.Module) -> tuple[tuple[Projection, ...], ...]:
    """Return the groups of linear layers whose common input at a token depends on what stands before it, and on nothing after.

    Looked for from the first block's attention up to the second block's attention input: the way out of the attention, the
    feed-forward part (not where it runs beside the attention), the next query, key and value. The model is left as it was.

    Raises:
        AnatomyError: there is none: the model is no decoder.
    """
    ids = _probe_ids(model)
    calls = _trace(model, ids)
    first, block = _first_block(model, calls)
    attention = _attention_group(first, block)
    second = f"{first.removesuffix('0')}1."
    inside = [call for call in calls if call.name.startswith(second)]
    last = _attention_group(second, inside)[-1] if any(map(_is_linear, inside)) else block[-1]
    between = calls[calls.index(attention[-1]) + 1 : calls.index(last) + 1]
    groups: list[list[_Call]] = []
    for call in between:
        if not _is_linear(call) or call.given.dim() != 3:
            continue
        known = next((group for group in groups if _same(group[0].given, call.given)), None)
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
    return tuple(tuple(_projection(model, call) for call in group) for group in kept)


def _reads_prefix(model: nn.Module, ids: Tensor, reader: _Call) -> bool:
    rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    changed = ids.clone()
    changed[0, 1] = (ids[0, 1] + 1) % rows
    moved = (_run_until(model, changed, reader.module) - reader.given).abs().amax(dim=(0, 2))
    far = moved > 1e-6 * float(reader.given.abs().max())
    return far.tolist() == [False, True, True, True]


def find_feed_forward(model: nn.Module) -> Projection:
    """Return the widest linear layer of the first block that works on every token behind the attention; the model is left as it was.

    That is the way out of the feed-forward part, whose inputs are several times as wide as the hidden size.

    Raises:
        AnatomyError: there is none.
    """
    calls = _trace(model, _probe_ids(model))
    first, block = _first_block(model, calls)
    behind = block[block.index(_attention_group(first, block)[-1]) + 1 :]
    linear = [call for call in behind if _is_linear(call) and call.given.dim() == 3]
    if not linear:
        raise AnatomyError(f"{type(model).__name__}: looked for a linear layer behind {first}'s attention, found none")
    return _projection(model, max(linear, key=lambda call: call.given.shape[-1]))


def find_tail(model: nn.Module) -> Tail:
    """Find the last linear layer before the head that no attention follows; the model is left as it was.

    Raises:
        AnatomyError: the logits are not the plain output of one linear layer on every token, or attention follows the layer.
    """
    ids = _probe_ids(model)
    calls = _trace(model, ids)
    linear = [
        call for call in calls if _is_linear(call) and call.made.dim() == 3 and call.made.shape[1] == ids.shape[1]
    ]
    if len(linear) < 2:
        raise AnatomyError(
            f"{type(model).__name__}: looked for a layer and a head that work on every token, found {len(linear)}"
        )
    layer, head = linear[-2], linear[-1]
    with _quiet_eval(model):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    plain = head.made if logits.dim() == 3 else head.made[:, -1]
    if logits.shape != plain.shape or not torch.allclose(logits, plain, atol=1e-5 * float(plain.abs().max())):
        raise AnatomyError(f"{type(model).__name__}: its logits are not the plain output of {head.name}")

    def nudge(module: nn.Module, args: Any, made: Tensor) -> Tensor:
        changed = made.clone()
        changed[:, 1] += made.std() * torch.linspace(-1.0, 1.0, made.shape[-1], device=made.device, dtype=made.dtype)
        return changed

    handle = layer.module.register_forward_hook(nudge)
    try:
        moved = _run_until(model, ids, head.module)
    finally:
        handle.remove()
    rows = (moved - head.given).abs().amax(dim=(0, 2)) > 1e-6 * float(head.given.abs().max())
    if rows.tolist() != [False, True, False, False]:
        raise AnatomyError(f"{type(model).__name__}: attention follows {layer.name}, the last layer before the head")
    return Tail(_projection(model, layer), head.name)


def _probe_heads(
    model: nn.Module, group: list[_Call], calls: list[_Call], block_calls: list[_Call]
) -> tuple[str, bool, tuple[Head, ...]]:
    """Tell query, key and value features apart, and which head they belong to, by nudging one output feature at a time.

    A nudge at row 1 of four rows: a query feature changes row 1 of the attention output only, within its head; a value
    feature changes one coordinate per head that reads it, in every row that may look at row 1; a key feature changes whole
    heads in those rows.
    """
    start = next(index for index, call in enumerate(block_calls) if call is group[-1])
    after = [call for call in block_calls[start + 1 :] if _is_linear(call)]
    readers = [call for call in after if all(call.module is not g.module for g in group)]
    for reader in readers[:3]:
        changed = _responses(model, group, calls, reader)
        if changed is not None and bool(changed.any()):
            return reader.name, *_heads_from(changed)
    return (readers[0].name if readers else ""), False, ()


def _responses(model: nn.Module, group: list[_Call], calls: list[_Call], reader: _Call) -> Tensor | None:
    """Return (features, T, D') booleans: which entries of the reader's input move when one feature is nudged at row 1.

    Runs in float64, so that what moves and what does not differ by many orders of magnitude even in untrained models.
    """
    widths = [int(call.made.shape[-1]) for call in group]
    total = sum(widths)
    weights = {name: parameter.detach().double() for name, parameter in _reached_parameters(model, calls, reader)}
    # Logits should move by about one: less drowns in weak heads, more saturates the softmax of strong ones.
    nudge = 3.0 / max(float(torch.cat([call.made.flatten() for call in group]).std()), 1e-3)
    chunk = max(1, min(total, CHUNK_BYTES // (PROBE_LENGTH * total * 8 * 8)))
    found = []
    base = _run_until(model, _probe_ids(model), reader.module, weights)
    if base.dim() != 3:
        return None
    for start in range(0, total, chunk):
        features = torch.arange(start, min(start + chunk, total))
        handles, offset = [], 0
        for call, width in zip(group, widths, strict=True):
            handles.append(call.module.register_forward_hook(_nudger(features - offset, width, nudge)))
            offset += width
        try:
            moved = _run_until(model, _probe_ids(model).expand(len(features), -1), reader.module, weights)
        finally:
            for handle in handles:
                handle.remove()
        found.append((moved - base).abs() > 1e-9 * float(base.detach().abs().max()))
    return torch.cat(found).cpu()


def _reached_parameters(model: nn.Module, calls: list[_Call], reader: _Call) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all parameters but those of modules that run only at `reader` or after it."""
    turn = next(index for index, call in enumerate(calls) if call is reader)
    before = {id(p) for call in calls[:turn] for p in call.module.parameters(recurse=False)}
    after = {id(p) for call in calls[turn:] for p in call.module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if id(parameter) in before or id(parameter) not in after:
            yield name, parameter


def _nudger(features: Tensor, width: int, nudge: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    rows = ((features >= 0) & (features < width)).nonzero().flatten()

    def add(module: nn.Module, args: Any, made: Tensor) -> Tensor:
        changed = made.clone()
        changed[rows.to(made.device), 1, features[rows].to(made.device)] += nudge
        return changed

    return add


def _heads_from(changed: Tensor) -> tuple[bool, tuple[Head, ...]]:
    """Sort features into heads from what they move.

    Args:
        changed: (features, T, D') booleans as `_responses` gives them.

    Returns:
        Whether the model is causal, and its heads; no heads where the answers contradict one another.
    """
    own = changed[:, 1].sum(dim=1)  # (F,) coordinates moved in the nudged row
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


def run_until(model: nn.Module, ids: Tensor, module: nn.Module, **more: Any) -> Tensor:
    """Run a forward pass on token ids (N, T) up to `module` in eval mode, and return the tensor that `module` is given.

    Args:
        model: left as it was.
        ids: token ids without padding.
        module: where the pass stops.
        more: further keyword arguments of the model's forward, or other values of `input_ids` and `attention_mask`.

    Raises:
        AnatomyError: the forward pass never reached `module`.
    """
    return _run_until(model, ids, module, more=more)


def _run_until(
    model: nn.Module,
    ids: Tensor,
    module: nn.Module,
    weights: Mapping[str, Tensor] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Tensor:
    """Run a forward pass up to `module`, with other `weights` if given, and return the tensor that `module` is given."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)))

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with _quiet_eval(model):
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **(more or {})}
            torch.func.functional_call(model, dict(weights or {}), kwargs=inputs)
    except _Reached as reached:
        return reached.value
    finally:
        handle.remove()
    raise AnatomyError(f"{type(model).__name__}: the forward pass never reached {type(module).__name__}")


@dataclass(frozen=True)
class Norm:
    """The normalisation right before the attention input: x = gain * (u - mean) / sqrt(var + eps) + shift."""

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
    """How the attention input of the first block comes from a token and its position, dropout off.

    Most models add a token vector and a position vector and normalise the sum, so that
    x(t, p) = Norm(w_t + d_p); that is checked on random pairs, not assumed. Where it does not hold, inputs are computed by
    running the model itself up to the block.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, max_length: int) -> None:
        """Measure the stage on `model`, which is left as it was.

        Args:
            model: the public model.
            anatomy: its parts.
            max_length: positions that a sequence may have.

        Raises:
            AnatomyError: the input of a token depends on its neighbours, so no candidate can be computed alone.
        """
        # Weak, because the stage is kept per model: a strong one would keep every model that was ever attacked.
        self._held = ref(model)
        self._reader = model.get_submodule(anatomy.projections[0].module)
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
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
        """Return the attention inputs (N, T, D) of token ids (N, T), as the client's own arithmetic makes them."""
        return _run_until(self._model, ids.to(self.device), self._reader)

    def _sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Return random ids (count, length) without the padding token: some models (RoBERTa) do not count it as a position."""
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
        """Return the module whose output is the attention input (dropout in between is transparent in eval mode)."""
        calls = _trace(self._model, _probe_ids(self._model))
        wanted = next(call.given for call in calls if call.module is self._reader)
        for call in calls:
            if call.module is self._reader:
                return None
            leaf = not list(call.module.children())
            if leaf and not isinstance(call.module, nn.modules.dropout._DropoutNd) and _same(call.made, wanted):
                return call.module if call.given.shape == call.made.shape else None
        return None

    def _before_norm(self, ids: Tensor) -> Tensor:
        """Return what enters the normalisation (or, without one, the attention input) for token ids (N, T)."""
        reader = self.norm_module if self.norm_module is not None else self._reader
        return _run_until(self._model, ids.to(self.device), reader)

    def _fit_norm(self, generator: torch.Generator) -> Norm | None:
        """Recognise LayerNorm or RMSNorm by what it does: fit gain and shift, and accept only an exact fit."""
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
        """Take gain and shift from the module's own parameters where they agree with the fit: they are exact."""
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
        """Return (N, D): what enters the normalisation for each token at position 0."""
        size = max(1, CHUNK_BYTES // (self.hidden * 4 * 4))
        return torch.cat([self._before_norm(chunk[:, None])[:, 0] for chunk in ids.split(size)])

    def _positions(self, count: int) -> Tensor:
        """Return (count, D) float64: what each position adds to the token vector at position 0."""
        token = self.vocabulary // 2
        u = self._before_norm(torch.full((1, count), token))[0].double()
        return u - u[:1]

    @cached_property
    def token_vectors(self) -> Tensor:
        """(V, D) float32: what enters the normalisation for each token at position 0."""
        return self._tokens_before_norm(torch.arange(self.vocabulary))

    @cached_property
    def position_vectors(self) -> Tensor:
        """(P, D) float64: what each position adds."""
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


def _same(one: Tensor, two: Tensor) -> bool:
    """Return whether two modules were given one tensor, or one of them the other in another type.

    Adapters in float32 beside weights in bfloat16 read a cast of the same input.
    """
    if one is two or (one.data_ptr() == two.data_ptr() and one.shape == two.shape):
        return True
    cast = one.dtype != two.dtype and one.shape == two.shape
    return cast and bool(torch.equal(one.double(), two.double()))


_ANATOMIES: WeakKeyDictionary[nn.Module, Anatomy] = WeakKeyDictionary()
_STAGES: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], InputStage]] = WeakKeyDictionary()


def anatomy_of(model: nn.Module) -> Anatomy:
    """Return `find_anatomy(model)`, computed once per model object: parts do not move when weights change."""
    if model not in _ANATOMIES:
        _ANATOMIES[model] = find_anatomy(model)
    return _ANATOMIES[model]


def input_stage_of(model: nn.Module, max_length: int) -> InputStage:
    """Return the input stage of a model, computed anew whenever its weights were written to."""
    versions = (max_length, *(p._version for p in model.parameters()), next(model.parameters()).data_ptr())
    if model not in _STAGES or _STAGES[model][0] != versions:
        _STAGES[model] = (versions, InputStage(model, anatomy_of(model), max_length))
    return _STAGES[model][1]


def dropout_rates(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, float]:
    """Return module name -> rate for every dropout module whose rate is above 0."""
    kinds = nn.modules.dropout._DropoutNd
    return {name: float(m.p) for name, m in modules if isinstance(m, kinds) and m.p > 0}
