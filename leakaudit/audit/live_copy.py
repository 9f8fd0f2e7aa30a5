"""Copies of the model in training, with a proof that they are separate.

Attacks in the training process compute on the copy.

A deep copy of a module is not always separate. A deep copy does not copy functions, and a function that replaces `forward` may hold the
live model. Such a copy would read the live weights and write into the live gradients.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leakaudit.client.truth import MicroBatch
from leakaudit.errors import LiveModelReachedError, ModelError, type_and_place
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.tensors import outputs_of, version_of

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes in which a module keeps its hooks.

Our hooks hold the recorder, and other hooks may hold any object. A copy needs no hook except those of `MAKE_WEIGHTS`.
"""

MAKE_WEIGHTS = (WeightNorm, SpectralNorm, BasePruningMethod)
"""Hooks of torch that compute a weight from its parts before each forward.

A copy without these hooks would compute with old weights.
"""


def copier(live: nn.Module) -> Callable[[ModelRecipe, Mapping[str, Tensor]], nn.Module]:
    """Return a function that builds a model from weights by copying the live one.

    The copy is on the CPU, in eval mode, and has no gradients and no hooks except those of `MAKE_WEIGHTS`. If an instance has its own
    `forward`, the copy has the `forward` of its class.
    """

    def build(_recipe: ModelRecipe, weights: Mapping[str, Tensor]) -> nn.Module:
        try:
            model = copy.deepcopy(live, _not_copied(live))
            for module in model.modules():
                _restore_forward(module)
            outcome = model.load_state_dict(dict(weights), strict=False)
        except Exception as error:  # a module may hold anything: locks, files, a whole trainer
            raise ModelError(f"a {type(live).__name__} cannot be copied: {type(error).__name__}") from None
        if outcome.unexpected_keys:
            raise ModelError(
                f"{len(outcome.unexpected_keys)} weights do not fit a copy of {type(live).__name__}, "
                f"first {outcome.unexpected_keys[0]!r}"
            )
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("eager")  # type: ignore[operator]
        for parameter in model.parameters():
            parameter.grad = None
        return model.to("cpu").eval()

    return build


def _not_copied(live: nn.Module) -> dict[int, Any]:
    """Return replacements of objects in a deep copy, by `id` of the object.

    The deep copy must not or cannot copy these objects.
    """
    known: dict[int, Any] = {}
    for module in live.modules():
        for name in HOOKS:
            if hasattr(module, name):
                hooks: Mapping[int, Any] = getattr(module, name)
                kept = [(key, hook) for key, hook in hooks.items() if isinstance(hook, MAKE_WEIGHTS)]
                known[id(hooks)] = OrderedDict(kept)
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # a hook of `MAKE_WEIGHTS` computed it
                known[id(value)] = value.detach().clone()
    return known | {id(p.grad): None for p in live.parameters() if p.grad is not None}


def _restore_forward(module: nn.Module) -> None:
    """Restore the `forward` of a copied module's class.

    If the module's own `forward` is another method of its class, it is kept.
    """
    own = vars(module).get("forward")
    if own is None:
        return
    chosen = isinstance(own, MethodType) and own.__self__ is module
    if not chosen or getattr(type(module), own.__func__.__name__, None) is not own.__func__:
        del module.forward


# ----------------------------------------------------------------------------------------------------------- the proof


@contextmanager
def unchanged(live: nn.Module) -> Iterator[None]:
    """Check that nothing writes into the live model's parameters and buffers.

    Raises:
        LiveModelReachedError: a parameter or buffer was written.
    """
    tensors = [*live.parameters(), *live.buffers()]
    before = [version_of(tensor) for tensor in tensors]
    yield
    if [version_of(tensor) for tensor in tensors] != before:
        raise LiveModelReachedError(
            f"attacks in the training process changed the {type(live).__name__} that is trained: do not trust this run, and report it"
        )


def prove_separate(model: nn.Module, live: nn.Module, batch: MicroBatch, *, training: bool) -> None:
    """Prove that computing on a copy does not touch the live model.

    No tensor of the live model may be read or written.

    The copy computes forward and backward of one micro-batch, in eval mode and in the client's mode. Every operation of torch is
    checked before it runs. The first operation that takes a live parameter, buffer or gradient ends the trial before it changes anything.

    Args:
        model: the copy, on any device; its buffers and its mode are restored.
        live: the model that is trained.
        batch: a micro-batch that fits the copy.
        training: whether the client's model was in training mode.

    Raises:
        LiveModelReachedError: the copy is not separate, none of its outputs depends on its own parameters, or the trial itself failed
            and proves nothing.
    """
    name = type(live).__name__
    watched = _Watched(_storages(live))
    own = {id(p) for p in model.parameters()}
    if _storages(model) & watched.live:
        raise LiveModelReachedError(_refusal(name, "it shares memory with the live model"))
    used = False
    for mode in sorted({False, training}):
        try:
            with _kept(model), watched:
                used |= _compute(model.train(mode), batch)
        except LiveModelReachedError:
            pass
        except Exception as error:
            if not watched.reached:
                raise LiveModelReachedError(
                    _refusal(name, f"a trial on the copy failed ({type_and_place(error)}), so nothing is proven")
                ) from None
        if watched.reached:
            raise LiveModelReachedError(_refusal(name, f"its {watched.reached} takes a tensor of the live model"))
    if own and not used:
        raise LiveModelReachedError(_refusal(name, "nothing that it computes depends on its own parameters"))


def _refusal(name: str, why: str) -> str:
    return (
        f"a copy of this {name} is not separate from the model that is trained: {why}. Attacks in the training process "
        "(`schedule: inline`) would disturb training. Name how another process can make the model with "
        "`leakaudit.models.factories.rebuilt_by(model, 'package.module:function')`, and use `schedule: beside`"
    )


def _compute(model: nn.Module, batch: MicroBatch) -> bool:
    """Run forward and backward once; return whether a parameter got a gradient."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs = {key: value.to(device) for key, value in batch.inputs.items()}
    outputs = model(**inputs, **batch.options)
    found_in: list[Any] = [value for _, value in outputs_of(outputs)] or [getattr(outputs, "loss", None)]
    reached = [value.float().sum() for value in found_in if isinstance(value, Tensor) and value.requires_grad]
    wanted = [p for p in model.parameters() if p.requires_grad]
    if not reached or not wanted:
        return False
    found = torch.autograd.grad(torch.stack(reached).sum(), wanted, allow_unused=True)
    return any(gradient is not None for gradient in found)


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Restore a copy's modes and buffers after the block.

    A forward pass in training mode changes running statistics.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.enable_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


class _Watched(TorchDispatchMode):
    """Dispatch mode that stops at the first operation on a live model's tensor."""

    def __init__(self, live: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = live
        self.reached = ""
        """Name of that operation; empty if there was none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_memory(value) in self.live for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)):
            self.reached = str(func)
            raise LiveModelReachedError(self.reached)
        return func(*args, **(kwargs or {}))


def _storages(model: nn.Module) -> frozenset[int]:
    """Return the memory addresses of a model's parameters, buffers and gradients."""
    tensors: list[Tensor | None] = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    return frozenset(_memory(tensor) for tensor in tensors if tensor is not None) - {0}


def _memory(tensor: Tensor) -> int:
    """Return the memory address of a tensor; 0 if it has none of its own."""
    with contextlib.suppress(Exception):
        local = getattr(tensor, "_local_tensor", tensor)
        return int(local.untyped_storage().data_ptr())
    return 0
