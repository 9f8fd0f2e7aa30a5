"""Traced forward passes: which module is called with which tensor.

Every part of a model is found with this tracer, never by the name of a model.

Letters: N sequences, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from leakaudit.errors import AnatomyError
from leakaudit.models.structure.embeddings import vocabulary_size
from leakaudit.models.versions import call_with

PROBE_LENGTH = 4
"""Tokens of the traced forward pass. With four, there are rows before and after the changed row, which shows whether a model is causal."""

CHUNK_BYTES = 256 * 2**20
"""Memory that one chunk of candidate inputs may take. Our choice: far less than the free memory of a training machine."""


@dataclass(frozen=True)
class Call:
    """One module call of a traced forward pass."""

    name: str
    """Module name."""
    module: nn.Module
    given: Tensor
    """First tensor among its arguments."""
    made: Tensor
    """Tensor that it returned, or the first item of the tuple."""
    bare: bool
    """Whether the module returned the tensor itself, not a tuple."""


def trace(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Call]:
    """Return every module call of one forward pass in eval mode.

    Calls that take or return no tensor are left out.

    Args:
        model: the model, which stays unchanged.
        inputs: keyword arguments of its forward.
    """
    calls: list[Call] = []
    names = {module: name for name, module in model.named_modules()}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        given = _first_tensor(args, kwargs)
        out = made[0] if isinstance(made, tuple) and made else made
        if given is not None and isinstance(out, Tensor):
            calls.append(Call(names[module], module, given, out, bare=out is made))

    with hooked(m.register_forward_hook(record, with_kwargs=True) for m in model.modules()), evaluating(model):
        model(**inputs)
    return calls


def trace_tokens(model: nn.Module) -> list[Call]:
    """Trace a text model on `probe_ids`.

    Raises:
        AnatomyError: the model has no token table, or the forward pass failed.
    """
    ids = probe_ids(model)
    try:
        return trace(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise AnatomyError(
            f"{type(model).__name__}: a forward pass with input_ids and attention_mask failed ({type(error).__name__})"
        ) from None


def probe_ids(model: nn.Module) -> Tensor:
    """Return (1, T) token ids from the middle of the vocabulary.

    Usual layouts have no special tokens there.

    Raises:
        AnatomyError: the model has no token table.
    """
    size = vocabulary_size(model)
    device = next(model.parameters()).device
    return (torch.arange(PROBE_LENGTH, device=device) * 7 + size // 2)[None, :] % size


def run_until(
    model: nn.Module, ids: Tensor, module: nn.Module, *, weights: Mapping[str, Tensor] | None = None, **more: Any
) -> Tensor:
    """Return the first tensor that `module` gets in a forward pass in eval mode.

    Args:
        model: the model, which stays unchanged.
        ids: (N, T) token ids without padding.
        module: module at which the pass stops.
        weights: parameter name -> tensor that replaces the model's own.
        more: further keyword arguments of the model's forward, or other values of `input_ids` and `attention_mask`.

    Raises:
        AnatomyError: the forward pass never reached `module`.
    """

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _ReachedError(next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)))

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with evaluating(model):
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}
            call_with(model, weights or {}, inputs)
    except _ReachedError as reached:
        return reached.value
    finally:
        handle.remove()
    raise AnatomyError(f"{type(model).__name__}: the forward pass never reached {type(module).__name__}")


def probed_inputs(model: nn.Module, ids: Tensor, modules: Sequence[nn.Module], **more: Any) -> tuple[Tensor, ...]:
    """Return the first tensors that several modules get in one forward pass.

    The pass is in eval mode and stops at the last module.

    Args:
        model: the model, which stays unchanged.
        ids: (N, T) token ids without padding.
        modules: in the order of the forward pass, at least one.
        more: further keyword arguments of the model's forward.
    """
    found: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[module] = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)).detach()

    with hooked(module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules[:-1]):
        last = run_until(model, ids, modules[-1], **more)
    return (*(found[module] for module in modules[:-1]), last)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks when the block ends."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield


@contextmanager
def inputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Record the inputs of a module while the block runs."""
    taken: list[Tensor] = []
    with module.register_forward_pre_hook(lambda _, given: taken.append(given[0])):
        yield taken


class Watched(NamedTuple):
    """What modules read and returned in their last call, by module name."""

    given: dict[str, Tensor]
    """First argument."""
    made: dict[str, Tensor]
    """Output, with a gradient."""


@contextmanager
def watched(model: nn.Module, names: Iterable[str]) -> Iterator[Watched]:
    """Record inputs and outputs of modules while the block runs.

    An output that no gradient reaches, because all parameters up to it are frozen, becomes a leaf with one.
    """
    found = Watched({}, {})

    def keep(name: str, _module: nn.Module, args: tuple[Tensor, ...], made: Tensor) -> Tensor:
        found.given[name] = args[0]
        found.made[name] = made if made.requires_grad else made.detach().requires_grad_()
        return found.made[name]

    with hooked(model.get_submodule(name).register_forward_hook(partial(keep, name)) for name in names):
        yield found


class _ReachedError(Exception):
    """Stops a forward pass at the wanted module."""

    def __init__(self, value: Tensor) -> None:
        super().__init__("reached")
        self.value = value


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode without gradients, then restore the flags."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module has no children."""
    return next(module.children(), None) is None


def is_linear(call: Call) -> bool:
    """Return whether a call looks like a linear layer.

    It has a 2-d weight that fits the widths of input and output.
    """
    weight = getattr(call.module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not call.given.is_floating_point():
        return False
    return sorted(weight.shape) == sorted((call.given.shape[-1], call.made.shape[-1]))


def is_normalisation(call: Call) -> bool:
    """Return whether a call looks like a normalisation.

    It is a leaf with a 1-d gain that keeps its input's shape.
    """
    gain = getattr(call.module, "weight", None)
    return is_leaf(call.module) and isinstance(gain, Tensor) and gain.dim() == 1 and call.given.shape == call.made.shape


def same_tensor(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors are the same, or equal in two dtypes.

    Adapters in float32 beside weights in bfloat16 read a cast of the same input.
    """
    if one is two or (one.data_ptr() == two.data_ptr() and one.shape == two.shape):
        return True
    cast = one.dtype != two.dtype and one.shape == two.shape
    return cast and bool(torch.equal(one.double(), two.double()))


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
