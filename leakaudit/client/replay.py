"""The client's state of a model while a step is replayed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.models.attention import set_attention


def take_gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Remove the gradients from the parameters and return them in float32.

    A gradient is zero for a parameter that the loss did not reach.
    """
    found = {}
    for name, parameter in parameters.items():
        gradient, parameter.grad = parameter.grad, None
        found[name] = (
            torch.zeros_like(parameter, dtype=torch.float32) if gradient is None else gradient.detach().float()
        )
    return found


@contextmanager
def neftune_noise(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """Add NEFTune's noise to the word embeddings within the block.

    The noise comes from the current random state, as in the client's own hook.

    Source: Jain et al. 2023, Algorithm 1: uniform in (-1, 1), times alpha / sqrt(L d), L tokens of d entries.
    """
    if not alpha:
        yield
        return

    def noisy(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        bound = alpha / torch.sqrt(torch.tensor(output.size(1) * output.size(2)))
        return output + torch.zeros_like(output).uniform_(-bound, bound)  # type: ignore[arg-type]

    table: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    with table.register_forward_hook(noisy):
        yield


@contextmanager
def client_products(precision: str, device: torch.device) -> Iterator[None]:
    """Round products of matrices in the block as the client did.

    A device that cannot keeps its own way. The setting is that of the whole process, and it comes back afterwards.

    Args:
        precision: `Facts.dtype` of the client; `tf32` if its products of float32 matrices were rounded to TF32.
        device: where the step is computed. A CPU has no TF32.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if repeats_tf32(precision, device.type) else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def repeats_tf32(precision: str, device: str) -> bool:
    """Return whether a kind of device can repeat products rounded to TF32."""
    return precision == "tf32" and device == "cuda"


@contextmanager
def client_attention(model: nn.Module, attention: str) -> Iterator[None]:
    """Use the attention implementation of the client's model within the block.

    Only `sdpa` is supported, because other implementations need a GPU. Attacks need second derivatives, which only eager attention has
    on every device. Replaying a step needs no second derivatives, but the client's implementation, because rows of padding differ.
    """
    now = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention != "sdpa" or now in (None, attention) or not hasattr(model, "set_attn_implementation"):
        yield
        return
    set_attention(model, attention)
    try:
        yield
    finally:
        set_attention(model, now)


def attention_is_repeated(model: nn.Module, attention: str) -> bool:
    """Return whether `client_attention` uses the client's implementation.

    It does if the implementation is unknown, because such a model has only its own.
    """
    now = getattr(getattr(model, "config", None), "_attn_implementation", None)
    can_change = attention == "sdpa" and hasattr(model, "set_attn_implementation")
    return attention in ("", now) or now is None or can_change


@contextmanager
def trained_parameters(model: nn.Module, training: bool, shared: frozenset[str]) -> Iterator[dict[str, nn.Parameter]]:
    """Put a model into the client's state and yield its shared parameters.

    Only these parameters require gradients. Modes, flags and buffers are restored afterwards.
    """
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    was_training = model.training
    buffers = {name: b.clone() for name, b in model.named_buffers()} if training else {}
    model.train(training)
    model.zero_grad(set_to_none=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in shared)
    try:
        with torch.enable_grad():
            yield {name: p for name, p in model.named_parameters() if name in shared}
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
        for (
            name,
            buffer,
        ) in model.named_buffers():  # batch norm updates them in training mode, and the step may be repeated
            if name in buffers:
                buffer.copy_(buffers[name])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])


@contextmanager
def restored_random_state(rng: Mapping[str, Tensor], device: torch.device) -> Iterator[None]:
    """Set the recorded random state within the block.

    The caller's own state is restored afterwards. A GPU whose state was not kept, as in a simulated step, begins at the checksum of the
    CPU's: its masks are not the recorded ones, but the same every time.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if "cpu" in rng:
            torch.set_rng_state(rng["cpu"].cpu())
        if "cuda" in rng and device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"].cpu(), device)
        elif "cpu" in rng and device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(zlib.crc32(rng["cpu"].cpu().numpy().tobytes()))
        yield
