"""Linear layers whose matrix is stored in few bits, and their stand-ins.

A layer of bitsandbytes, GPTQ, AWQ or HQQ stores packed integers, but it computes x W^T + b with a matrix W that can be read from its
outputs: the outputs for the unit vectors, without the bias, are the columns of W. So no library of quantised layers has to be known. Layers
that do more than that, such as 8-bit layers that round their inputs, are recognised by their outputs, too (`QuantisedLayer.is_linear`).

Layers whose class no installed distribution defines are code of the user's, which does not run a second time: they are refused.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.errors import ModelError

TYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""Name in a recipe -> type in which a layer multiplies, the coarsest first."""

LINEAR_UP_TO: Mapping[torch.dtype, float] = {
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
    torch.float32: 2.0**-16,
}
"""Type -> relative deviation from a linear layer that is rounding: one unit in the last place; 128 of float32, for long sums."""

LARGE, SMALL = 4.0, 2.0**-6
"""Entries of the inputs that show whether a layer rounds its inputs to 8 bits: beside 4, the small one is less than half of a level. Our
choice; 4 is below 6, from which on bitsandbytes computes entries apart. Both are exact in all types of `TYPES`."""

ROWS = 1024
"""Unit vectors that a layer gets at once. Our choice: at most 64 MB in a layer of 8192 inputs and outputs."""


@dataclass(frozen=True, eq=False)
class QuantisedLayer:
    """One layer of a live model that stores its matrix in few bits."""

    layer: nn.Module
    """The live layer; it is never called itself."""
    shape: tuple[int, int]
    """Shape of the matrix in the layer that stands for it."""
    transposed: bool
    """Whether that layer computes x W instead of x W^T, as `Conv1D` of transformers does."""
    packed: frozenset[str]
    """Names of the parameters and buffers from which the layer makes its matrix."""
    given: torch.dtype
    """Type of the inputs that the layer gets here."""
    dtype: torch.dtype
    """Type in which the layer multiplies."""
    is_linear: bool
    """Whether its outputs are linear in its inputs, up to rounding."""

    @property
    def bytes(self) -> int:
        """Size of the matrix in bytes."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def matrix(self) -> Tensor:
        """Return the matrix, of `shape` and `dtype`, on the layer's device.

        A copy of the layer computes it. The live layer, its hooks and the random state are left alone.
        """
        width, height = self.shape if self.transposed else self.shape[::-1]
        twin, device = _twin(self.layer), _device_of(self.layer)
        found = torch.empty(width, height, dtype=self.dtype, device=device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for start in range(0, width, ROWS):
                rows = torch.zeros(min(ROWS, width - start), width, dtype=self.given, device=device)
                rows[:, start : start + ROWS].fill_diagonal_(1.0)
                found[start : start + ROWS] = _outputs(twin, rows)
        return found if self.transposed else found.T.contiguous()


def quantised_layers(model: nn.Module, made: nn.Module) -> dict[str, QuantisedLayer]:
    """Return the linear layers of a live model that store packed numbers.

    The result is plain name -> layer.

    Args:
        model: the live model, without wrappers.
        made: the same model as its recipe makes it, with ordinary layers.

    Raises:
        ModelError: such a layer is trained, or does not answer as a linear layer does.
    """
    from leakaudit.models.wrappers import plain_name

    here = {plain_name(f"{name}.")[:-1]: module for name, module in model.named_modules()}
    found: dict[str, QuantisedLayer] = {}
    types = [p.dtype for p in model.parameters() if p.dtype in TYPES.values()]
    for name, ordinary in made.named_modules():
        layer, weight = here.get(name), getattr(ordinary, "weight", None)
        if layer is None or not _multiplies(ordinary) or _is_ordinary(layer, weight):
            continue
        try:
            found[name] = _described(name, layer, ordinary, types)
        except ModelError:
            if not _is_resized(layer):
                raise
    return found


def stand_in(model: nn.Module, types: Mapping[str, str]) -> None:
    """Let ordinary layers multiply in the types of the quantised ones, in place.

    Args:
        model: a rebuilt model.
        types: name of a layer -> name in `TYPES`.

    Raises:
        ModelError: the model has no such layer, or the type is unknown.
    """
    layers = dict(model.named_modules())
    for name, dtype in types.items():
        layer: Any = layers.get(name)
        if layer is None or not _multiplies(layer) or dtype not in TYPES:
            raise ModelError(
                f"the recipe lets {name!r} multiply in {dtype!r}, and the model that it makes has no such layer"
            )
        layer.__class__ = InOwnType if isinstance(layer, nn.Linear) else _conv_in_own_type()


def stands_in(layer: nn.Module) -> bool:
    """Return whether a layer, or one in it, stands for a quantised layer."""
    return any(getattr(one, "in_own_type", False) for one in (layer, *layer.children()))


def stand_in_types(model: nn.Module) -> set[torch.dtype]:
    """Return the types in which the stand-ins of a rebuilt model multiply."""
    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "in_own_type", False)]
    return {layer.weight.dtype for layer in layers}


class InOwnType(nn.Linear):
    """A linear layer that multiplies in the type of its matrix, whatever it gets."""

    in_own_type = True

    def forward(self, input: Tensor) -> Tensor:  # the name that torch's layer has
        """Return the outputs, in the type of the inputs."""
        kind = self.weight.dtype
        bias = None if self.bias is None else self.bias.to(kind)
        return nn.functional.linear(input.to(kind), self.weight, bias).to(input.dtype)


def _conv_in_own_type() -> type[nn.Module]:
    """Return the same for `Conv1D` of transformers, which is imported only here."""
    from transformers.pytorch_utils import Conv1D

    class ConvInOwnType(Conv1D):
        in_own_type = True

        def forward(self, x: Tensor) -> Tensor:
            kind = self.weight.dtype
            return nn.functional.linear(x.to(kind), self.weight.T, self.bias.to(kind)).to(x.dtype)

    return ConvInOwnType


def _multiplies(layer: nn.Module) -> bool:
    """Return whether a made layer multiplies by a matrix and adds a bias."""
    return isinstance(layer, nn.Linear) or any(
        f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D" for kind in type(layer).__mro__
    )


def _is_ordinary(layer: nn.Module, weight: Any) -> bool:
    """Return whether a live layer holds its matrix as the made one does.

    Packed numbers may be stored in any type (`bnb_4bit_quant_storage`), but not in the shape of the matrix.
    """
    mine = layer._parameters.get("weight")
    if mine is None:  # parametrised, or another kind of layer, whose packed numbers are integers
        return all(tensor.dtype.is_floating_point for tensor in layer.buffers(recurse=False))
    return mine.requires_grad or (mine.dtype.is_floating_point and mine.shape == weight.shape)


def _is_resized(layer: nn.Module) -> bool:
    """Return whether a layer holds an ordinary matrix of another shape."""
    mine = layer._parameters.get("weight")
    return mine is not None and mine.dtype.is_floating_point


def _described(name: str, layer: nn.Module, made: nn.Module, types: list[torch.dtype]) -> QuantisedLayer:
    """Return what a quantised layer is, from its outputs for two inputs.

    Raises:
        ModelError: it does not answer as a linear layer does.
    """
    weight: Any = made.weight
    transposed = not isinstance(made, nn.Linear)
    shape = (int(weight.shape[0]), int(weight.shape[1]))
    tensors = [*layer.named_parameters(recurse=True), *layer.named_buffers(recurse=True)]
    if any(p.requires_grad for own, p in layer.named_parameters() if own != "bias"):  # a bias stands beside the matrix
        raise ModelError(f"{name!r} stores packed numbers and is trained; train adapters on it instead")
    packed = frozenset(f"{name}.{own}" for own, _ in tensors if own != "bias")
    if not all(is_installed(kind) for kind in type(layer).__mro__):
        raise ModelError(
            f"{name!r} ({type(layer).__name__}) stores packed numbers and is of your own code, which does not run a second time in the training "
            "process; install the package that defines the layer, or train the adapters on the model in bfloat16"
        )
    width = shape[0] if transposed else shape[1]
    for given in dict.fromkeys([*types[:1], torch.float32, torch.bfloat16, torch.float16]):
        try:
            dtype, linear = _answers(layer, width, shape[transposed], given)
        except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, NotImplementedError):
            continue  # its kernels take other types
        return QuantisedLayer(layer, shape, transposed, packed, given, dtype, linear)
    raise ModelError(
        f"{name!r} ({type(layer).__name__}) stores packed numbers, and its matrix cannot be read: it does not multiply vectors of {width} "
        "numbers. Train the adapters on the model in bfloat16 to audit the run"
    )


def is_installed(kind: type) -> bool:
    """Return whether an installed distribution or Python defines a class."""
    package = kind.__module__.partition(".")[0]
    return package in sys.stdlib_module_names or package in installed_packages()


@cache
def installed_packages() -> frozenset[str]:
    """Return the names of the packages that distributions have installed."""
    return frozenset(metadata.packages_distributions())


def _answers(layer: nn.Module, width: int, height: int, given: torch.dtype) -> tuple[torch.dtype, bool]:
    """Return the type in which a layer multiplies, and whether it is linear.

    Raises:
        ValueError: its outputs are of another shape, not finite, or not zero for zeros.
    """
    device = _device_of(layer)
    draw = torch.Generator().manual_seed(0)
    small = torch.where(torch.rand(8, width, generator=draw) < 0.5, -SMALL, SMALL)
    large = torch.zeros(8, width)
    places = torch.randint(width, (8,), generator=draw)
    large[torch.arange(8), places] = LARGE
    small[torch.arange(8), places] = 0.0
    inputs = torch.cat([torch.zeros_like(small), small, large, small + large]).to(device, given)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        outputs = _outputs(_twin(layer), inputs)
    if outputs.shape != (len(inputs), height) or not bool(outputs.isfinite().all()):
        raise ValueError
    zero, one, two, both = outputs.to("cpu", torch.float64).split(8)
    if bool(zero.any()):
        raise ValueError
    dtype = next(kind for kind in TYPES.values() if torch.equal(outputs.to(kind).to(outputs.dtype), outputs))
    deviation, size = (both - one - two).norm(), one.norm() + two.norm()
    return dtype, bool(deviation <= LINEAR_UP_TO[dtype] * size)


def _outputs(twin: nn.Module, inputs: Tensor) -> Tensor:
    found = type(twin).forward(twin, inputs)
    if not isinstance(found, Tensor):
        raise TypeError
    return found.detach()


def _twin(layer: nn.Module) -> Any:
    """Return a copy of a layer without its bias, its hooks and a replaced `forward`."""
    bare = copy.copy(layer)
    for name, value in vars(layer).items():
        if name.endswith("_hooks") and isinstance(value, dict):
            bare.__dict__[name] = OrderedDict()
    for name in ("forward", "_hf_hook", "_old_forward"):  # what accelerate puts on the object
        bare.__dict__.pop(name, None)
    bare.__dict__["_parameters"] = {**layer._parameters}
    bare.__dict__["_buffers"] = {**layer._buffers}
    twin = copy.deepcopy(bare)
    for tensors in (twin._parameters, twin._buffers, vars(twin)):
        if "bias" in tensors:
            tensors["bias"] = None
    return twin.train()  # as the client computes; some layers take other kernels otherwise


def _device_of(layer: nn.Module) -> torch.device:
    return next(tensor.device for tensor in (*layer.parameters(), *layer.buffers()))
