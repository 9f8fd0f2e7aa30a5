"""Small private trainings, correct ones and ones with a planted mistake."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorWithPadding

from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.snapshot import Snapshot
from tests.support import tiny
from tests.support.tiny_trainer import Rows, audit_config, kept, without_side_process

BOUND = 0.05
"""Clipping bound of the trainings: below most norms of their examples' gradients, so that clipping does something."""

Mistake = Callable[[Any], None]
"""Changes the private optimizer of a training."""


def no_noise_on(*ends: str) -> Callable[[Any, nn.Module], None]:
    """Return a mistake: parameters whose names end so get no noise."""

    def make(optimizer: Any, model: nn.Module) -> None:
        bare = {id(p) for name, p in model.named_parameters() if name.endswith(ends)}
        honest = optimizer.add_noise

        def add_noise() -> None:
            honest()
            for p in optimizer.params:
                if id(p) in bare:
                    p.grad = p.summed_grad.view_as(p).clone()

        optimizer.add_noise = add_noise

    return make


def same_seed(optimizer: Any, model: nn.Module) -> None:
    """Draw the noise of every step from the same seed."""
    honest = optimizer.add_noise

    def add_noise() -> None:
        optimizer.generator = torch.Generator().manual_seed(7)
        honest()

    optimizer.add_noise = add_noise


def bound_after_mean(optimizer: Any, model: nn.Module) -> None:
    """Clip the mean gradient instead of each example's."""

    def clip_and_accumulate() -> None:
        means = [p.grad_sample.mean(0) for p in optimizer.params]
        norm = torch.stack([mean.norm() for mean in means]).norm()
        factor = (optimizer.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for p, mean in zip(optimizer.params, means, strict=True):
            p.summed_grad = factor * mean * optimizer.expected_batch_size
            _processed(p.grad_sample)

    optimizer.clip_and_accumulate = clip_and_accumulate


def bound_of_pairs(optimizer: Any, model: nn.Module) -> None:
    """Clip the mean gradient of every two examples."""

    def clip_and_accumulate() -> None:
        for p in optimizer.params:
            p.summed_grad = torch.zeros_like(p) if p.summed_grad is None else p.summed_grad
        count = len(optimizer.params[0].grad_sample)
        for start in range(0, count, 2):
            means = [p.grad_sample[start : start + 2].mean(0) for p in optimizer.params]
            norm = torch.stack([mean.norm() for mean in means]).norm()
            factor = (optimizer.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            for p, mean in zip(optimizer.params, means, strict=True):
                p.summed_grad += factor * mean * 2
        for p in optimizer.params:
            _processed(p.grad_sample)

    optimizer.clip_and_accumulate = clip_and_accumulate


def _clip_each_parameter(optimizer: Any) -> None:
    for p in optimizer.params:
        norms = p.grad_sample.flatten(1).norm(dim=1)
        factors = (optimizer.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)
        p.summed_grad = torch.einsum("i,i...", factors, p.grad_sample)
        _processed(p.grad_sample)


def bound_by_parameter(optimizer: Any, model: nn.Module) -> None:
    """Clip each parameter to the whole bound."""
    optimizer.clip_and_accumulate = lambda: _clip_each_parameter(optimizer)


def no_bound(optimizer: Any, model: nn.Module) -> None:
    """Clip nothing."""

    def clip_and_accumulate() -> None:
        for p in optimizer.params:
            p.summed_grad = p.grad_sample.sum(0)
            _processed(p.grad_sample)

    optimizer.clip_and_accumulate = clip_and_accumulate


def real_size(optimizer: Any, model: nn.Module) -> None:
    """Divide by the number of examples that were drawn."""

    def scale_grad() -> None:
        for p in optimizer.params:
            p.grad /= max(1, len(p.grad_sample))

    optimizer.scale_grad = scale_grad


def noise_times(factor: float) -> Callable[[Any, nn.Module], None]:
    """Return a mistake: the noise is `factor` times as large."""

    def make(optimizer: Any, model: nn.Module) -> None:
        honest = optimizer.add_noise

        def add_noise() -> None:
            told, optimizer.noise_multiplier = optimizer.noise_multiplier, factor * optimizer.noise_multiplier
            honest()
            optimizer.noise_multiplier = told

        optimizer.add_noise = add_noise

    return make


def half_noise(optimizer: Any, model: nn.Module) -> None:
    """Draw the noise in float16 at a level where most draws round to zero."""

    def add_noise() -> None:
        for p in optimizer.params:
            std = optimizer.noise_multiplier * optimizer.max_grad_norm
            small = (torch.randn_like(p) * std * _HALF_SCALE).half().float() / _HALF_SCALE
            p.grad = (p.summed_grad + small.view_as(p.summed_grad)).view_as(p)
            _processed(p.summed_grad)

    optimizer.add_noise = add_noise


_HALF_SCALE = 3e-7
"""Unit of the gradients in float16: sigma is then below the smallest number of that type."""


def factors_of(rule: Callable[[torch.Tensor, float], torch.Tensor]) -> Callable[[Any, nn.Module], None]:
    """Return a mistake: a rule gives the factor of each example's gradient."""

    def make(optimizer: Any, model: nn.Module) -> None:
        def clip_and_accumulate() -> None:
            norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in optimizer.params]).norm(dim=0)  # (B,)
            factors = rule(norms, optimizer.max_grad_norm)
            for p in optimizer.params:
                p.summed_grad = torch.einsum("i,i...", factors, p.grad_sample)
                _processed(p.grad_sample)

        optimizer.clip_and_accumulate = clip_and_accumulate

    return make


def _one_clipped(norms: torch.Tensor, bound: float) -> torch.Tensor:
    factors = torch.ones_like(norms)
    factors[0] = (bound / norms[0]).clamp(max=1.0)
    return factors


def drawn_by(draw: Callable[[int, int, torch.Size], torch.Tensor]) -> Callable[[Any, nn.Module], None]:
    """Return a mistake: another draw than a normal one, in units of sigma.

    Args:
        draw: gets the number of the step, that of the parameter and its shape.
    """

    def make(optimizer: Any, model: nn.Module) -> None:
        done = 0

        def add_noise() -> None:
            nonlocal done
            for number, p in enumerate(optimizer.params):
                noise = optimizer.noise_multiplier * optimizer.max_grad_norm * draw(done, number, p.shape)
                p.grad = (p.summed_grad + noise.view_as(p.summed_grad)).view_as(p)
                _processed(p.summed_grad)
            done += 1

        optimizer.add_noise = add_noise

    return make


def _laplace(step: int, number: int, shape: torch.Size) -> torch.Tensor:
    drawn: torch.Tensor = torch.distributions.Laplace(0.0, 0.5**0.5).sample(shape)
    return drawn


def _every_second(step: int, number: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape) * (step % 2)


def _correlated(step: int, number: int, shape: torch.Size) -> torch.Tensor:
    """Return noise of which half the variance is the same in all steps."""
    shared = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    mixed: torch.Tensor = (shared + torch.randn(shape)) * 0.5**0.5
    return mixed


def _one_per_row(step: int, number: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape[:1]).view(-1, *[1] * (len(shape) - 1)).expand(shape)


def _one_row(step: int, number: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape[-1:]).expand(shape)


OTHERS: dict[str, Callable[[Any, nn.Module], None]] = {
    "twice the bound": factors_of(lambda norms, bound: (2 * bound / norms).clamp(max=1.0)),
    "bound on shares of the mean": factors_of(lambda norms, bound: (len(norms) * bound / norms).clamp(max=1.0)),
    "only one example clipped": factors_of(_one_clipped),
    "noise in every second step": drawn_by(_every_second),
    "Laplace": drawn_by(_laplace),
    "correlated steps": drawn_by(_correlated),
    "one draw for a row": drawn_by(_one_per_row),
    "one row for a matrix": drawn_by(_one_row),
}
"""Name -> mistake that the benchmark does not have."""


def _processed(tensor: Any) -> None:
    from opacus.optimizers.optimizer import _mark_as_processed

    _mark_as_processed(tensor)


def train(folder: Path, mistake: Callable[[Any, nn.Module], None] | None = None, **options: Any) -> dict[int, Snapshot]:
    """Train as `watched` does, and return the kept steps."""
    return kept(watched(folder, mistake, **options))


def watched(
    folder: Path,
    mistake: Callable[[Any, nn.Module], None] | None = None,
    *,
    noise: float = 1.0,
    bound: float = BOUND,
    size: int = 8,
    steps: int = 4,
    poisson: bool = False,
    clipping: str = "flat",
    mode: str = "hooks",
    physical: int | None = None,
    seed: int = 0,
    rows: int = 32,
    model: nn.Module | None = None,
    config: dict[str, Any] | None = None,
) -> Any:
    """Train with Opacus and return the audit, whose snapshots wait in the spool.

    Args:
        folder: of the audit.
        mistake: changes the private optimizer; None for a correct training.
        noise: noise multiplier.
        bound: clipping bound of the whole gradient.
        size: expected examples of a step.
        steps: optimizer steps.
        poisson: whether batches are Poisson samples.
        clipping: of Opacus, `flat` or `per_layer`.
        mode: how Opacus gets gradients of examples, `hooks` or `ghost`.
        physical: examples of a micro-batch; None for whole batches.
        seed: of batches and noise.
        rows: number of examples.
        model: a BERT classifier; None makes a tiny one.
        config: further keys of the audit's configuration.
    """
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    tokenizer, made = tiny.bert_tokenizer(), tiny.bert() if model is None else model
    made.train()
    made.bert.embeddings.position_embeddings.weight.requires_grad_(False)  # type: ignore[union-attr]
    trained = [p for p in made.parameters() if p.requires_grad]
    pad = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=20)
    data = (Rows(tokenizer).rows * math.ceil(rows / 8))[:rows]
    torch.manual_seed(seed)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=size, collate_fn=lambda r: dict(pad(r)), shuffle=True)  # type: ignore[arg-type]
    bounds: Any = [bound / math.sqrt(len(trained))] * len(trained) if clipping == "per_layer" else bound
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = PrivacyEngine()
        options = {"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}
        found = engine.make_private(
            module=made, optimizer=torch.optim.SGD(trained, lr=0.01), data_loader=loader, noise_multiplier=noise,
            max_grad_norm=bounds, poisson_sampling=poisson, clipping=clipping, grad_sample_mode=mode, **options,
        )  # fmt: skip
        module, optimizer, *criterion, loader = found
        if mistake is not None:
            mistake(optimizer, made)
        audit = watch(
            module, optimizer, tokenizer=tokenizer, config=audit_config(folder, max_snapshots=50, **(config or {}))
        )
        with without_side_process(), audit:
            done = 0
            while done < steps:
                if physical:
                    with BatchMemoryManager(
                        data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
                    ) as pieces:
                        done = _epoch(module, optimizer, pieces, criterion, done, steps)
                else:
                    done = _epoch(module, optimizer, loader, criterion, done, steps)
    return audit


def _epoch(module: Any, optimizer: Any, loader: Any, criterion: Any, done: int, steps: int) -> int:
    for batch in loader:
        if len(batch["input_ids"]) == 0:
            continue
        optimizer.zero_grad()
        if criterion:
            labels = batch.pop("labels")
            criterion[0](module(**batch).logits, labels).backward()
        else:
            module(**batch).loss.backward()
        optimizer.step()
        done += not getattr(optimizer, "_is_last_step_skipped", False)
        if done >= steps:
            break
    return done
