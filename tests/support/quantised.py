"""Layers that store their matrix in few bits, as well-known libraries do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class QuantState:
    """What turns packed numbers into a matrix, as in bitsandbytes."""

    scale: Tensor
    shape: tuple[int, int]


class FourBits(nn.Linear):
    """Two numbers a byte; the weight (N / 2, 1) is uint8, as in bitsandbytes."""

    def __init__(self, of: nn.Linear, compute: torch.dtype = torch.float32) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.compute = of.in_features, of.out_features, compute
        matrix = of.weight.detach().float()
        scale = matrix.abs().max() / 7
        levels = ((matrix / scale).round() + 8).to(torch.uint8).flatten()
        packed = (levels[::2] * 16 + levels[1::2]).unsqueeze(1)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.quant_state = QuantState(scale, (of.out_features, of.in_features))
        self.bias = None if of.bias is None else nn.Parameter(of.bias.detach().clone(), requires_grad=False)

    def dequantise(self) -> Tensor:
        """Return the matrix (out, in) in float32."""
        bytes_ = self.weight.flatten()
        levels = torch.stack([bytes_ // 16, bytes_ % 16], dim=1).flatten().float() - 8
        return (levels * self.quant_state.scale).view(self.quant_state.shape)

    W_q = property(lambda self: self.weight)
    """peft asks layers with this name for `dequantize()`, as it asks those of HQQ."""

    def dequantize(self) -> Tensor:
        """Return the same matrix under the name that peft calls."""
        return self.dequantise()

    def forward(self, x: Tensor) -> Tensor:
        given = x.to(self.compute)
        bias = None if self.bias is None else self.bias.to(self.compute)
        return nn.functional.linear(given, self.dequantise().to(self.compute), bias).to(x.dtype)


class EightBits(nn.Linear):
    """One number a byte with a scale for each row, as the int8 layers of bitsandbytes."""

    def __init__(self, of: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = of.in_features, of.out_features
        matrix = of.weight.detach().float()
        self.scales = matrix.abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((matrix / self.scales).round().to(torch.int8), requires_grad=False)
        self.bias = None if of.bias is None else nn.Parameter(of.bias.detach().clone(), requires_grad=False)

    W_q = property(lambda self: self.weight)
    """peft asks layers with this name for `dequantize()`, as it asks those of HQQ."""

    def dequantize(self) -> Tensor:
        """Return the matrix (out, in) in float32."""
        return self.weight.float() * self.scales

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantize().to(x.dtype), self.bias)


class InBuffers(nn.Module):
    """One number a byte in a buffer, without a weight, as the layers of GPTQ and AWQ."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        matrix = of.weight.detach().float()
        scales = matrix.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scales", scales)
        self.register_buffer("qweight", (matrix / scales).round().to(torch.int8).T.contiguous())
        self.bias = None if of.bias is None else nn.Parameter(of.bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        matrix: Any = self.qweight.T.float() * self.scales  # type: ignore[operator]
        return nn.functional.linear(x, matrix.to(x.dtype), self.bias)


class RoundsInputs(FourBits):
    """Rounds its inputs to 8 bits for each token, as 8-bit kernels on a GPU do."""

    def forward(self, x: Tensor) -> Tensor:
        step = x.detach().abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / 127
        rounded = (x.detach() / step).round() * step
        return super().forward(x + (rounded - x).detach())


class OwnKernel(FourBits):
    """Rounds every partial sum of eight products, as fused kernels do."""

    def forward(self, x: Tensor) -> Tensor:
        given, matrix = x.to(self.compute), self.dequantise().to(self.compute)
        pieces = zip(given.split(8, dim=-1), matrix.split(8, dim=1), strict=True)
        total = sum(nn.functional.linear(inputs, columns) for inputs, columns in pieces)
        assert isinstance(total, Tensor)
        return (total if self.bias is None else total + self.bias.to(self.compute)).to(x.dtype)


def quantised(model: Any, make: Callable[[nn.Linear], nn.Module], kept: tuple[str, ...] = ("lm_head",)) -> Any:
    """Replace the linear layers of a model, in place, and freeze everything."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name not in kept:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, make(layer))
    return model.requires_grad_(False)
