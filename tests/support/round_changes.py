"""Clients that do something to a round beside training on its batches.

Each of them is one way of published federated clients: a penalty in the loss (FedProx), control variates (SCAFFOLD), clipping by value, a
gradient that nobody zeroed, weights that the loop changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.snapshot import Snapshot
from tests.support import stacks, tiny
from tests.support.tiny_trainer import audit_config, kept, without_side_process

MU = 1.0
"""Strength of FedProx."""


class Client:
    """A client that trains a tiny BERT; its methods are what others change."""

    local_steps = 3
    rate = 0.1
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = tiny.bert(dropout=0.1).train()
        self.moved = self.make()
        self.start = self.weights()
        self.control = {name: 0.01 * torch.randn_like(p) for name, p in self.model.named_parameters()}

    def make(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return type(self).optimizer(self.model.parameters(), lr=self.rate)

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the weights."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def distance(self) -> Tensor:
        """Return half the squared distance from the first weights."""
        squares = [((p - self.start[name]) ** 2).sum() for name, p in self.model.named_parameters()]
        return sum(squares, torch.zeros(())) / 2

    def loss(self, batch: stacks.Batch) -> Tensor:
        """Return the loss of a batch."""
        found: Tensor = self.model(**batch).loss
        return found

    def after_backward(self) -> None:
        """Change gradients before the optimizer steps."""

    def after_step(self) -> None:
        """Change weights after the optimizer has stepped."""

    def zero(self) -> None:
        """Zero the gradients."""
        self.moved.zero_grad()

    def train(self, batch: stacks.Batch) -> None:
        """Take one optimizer step."""
        self.loss(batch).backward()
        self.after_backward()
        self.moved.step()
        self.after_step()
        self.zero()

    def rounds(self, folder: Path, count: int = 1, **options: Any) -> list[Snapshot]:
        """Train some rounds with an audit, and return what it kept.

        Every round begins with weights of its own, as those that a server sends.
        """
        given = {"observe": "delta", "local_steps": self.local_steps, **options}
        audit = watch(
            self.model,
            self.moved,
            tokenizer=tiny.bert_tokenizer(),
            config=audit_config(folder, max_snapshots=50),
            **given,
        )
        batches = stacks.classes(count=count * self.local_steps)
        with without_side_process(), audit:
            for number in range(count):
                self.start = self.weights()
                for batch in batches[number * self.local_steps :][: self.local_steps]:
                    self.train(batch)
        return list(kept(audit).values())


class ProximalLoss(Client):
    """FedProx, with its term in the loss."""

    def loss(self, batch: stacks.Batch) -> Tensor:
        """Add the term (Li et al. 2020, Algorithm 2)."""
        return super().loss(batch) + MU * self.distance()


class ProximalGradient(Client):
    """FedProx, with the gradient of its term added by hand."""

    def after_backward(self) -> None:
        """Add mu (w - w0)."""
        for name, p in self.model.named_parameters():
            p.grad.add_(p.detach() - self.start[name], alpha=MU)


class ControlInGradients(Client):
    """SCAFFOLD, with the control variates added to the gradients."""

    def after_backward(self) -> None:
        """Add c (Karimireddy et al. 2020, Algorithm 1)."""
        for name, p in self.model.named_parameters():
            p.grad.add_(self.control[name])


class ControlInWeights(Client):
    """SCAFFOLD, with the control variates subtracted from the weights."""

    def after_step(self) -> None:
        """Subtract the rate times c."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.sub_(self.control[name], alpha=self.rate)


class ClippedByValue(Client):
    """Clipping by value that nobody told the audit of."""

    def after_backward(self) -> None:
        """Clip."""
        nn.utils.clip_grad_value_(self.model.parameters(), 1e-3)


class ClippedByNorm(Client):
    """Clipping by norm that nobody told the audit of."""

    def after_backward(self) -> None:
        """Clip."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class Unscaled(Client):
    """A factor of the loss that the loop takes back, as a `GradScaler` does."""

    def loss(self, batch: stacks.Batch) -> Tensor:
        """Multiply the loss."""
        return 1024 * super().loss(batch)

    def after_backward(self) -> None:
        """Divide the gradients."""
        for p in self.model.parameters():
            p.grad.div_(1024)


class Noised(Client):
    """Noise that nobody declared."""

    def after_backward(self) -> None:
        """Add noise."""
        for p in self.model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=1e-3)


class NeverZeroed(Client):
    """A loop without `zero_grad`."""

    def zero(self) -> None:
        """Forget it."""


class Decayed(Client):
    """A penalty on all weights in the loss."""

    def loss(self, batch: stacks.Batch) -> Tensor:
        """Add the squares."""
        squares = torch.stack([(p**2).sum() for p in self.model.parameters()])
        return super().loss(batch) + 0.01 * squares.sum()


class SparseHead(Client):
    """A penalty on the absolute values of the head's weights in the loss."""

    def loss(self, batch: stacks.Batch) -> Tensor:
        """Add the absolute values."""
        found: Tensor = super().loss(batch) + 0.01 * self.model.classifier.weight.abs().sum()
        return found


class Bounded(Client):
    """Weights that the loop keeps within bounds."""

    def after_step(self) -> None:
        """Bound them."""
        with torch.no_grad():
            for p in self.model.parameters():
                p.clamp_(-0.05, 0.05)


class Averaged(Client):
    """Weights that the loop pulls back to those of the server."""

    def after_step(self) -> None:
        """Take a mean."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.lerp_(self.start[name], 0.1)


class Sharpened(Client):
    """FedSAM: the gradient at weights that a first gradient moved."""

    def train(self, batch: stacks.Batch) -> None:
        """Take one step of SAM (Foret et al. 2021, Algorithm 1)."""
        self.loss(batch).backward()
        moves = {name: 0.05 * p.grad.sign() for name, p in self.model.named_parameters()}
        with self.moved_by(moves):
            self.moved.zero_grad()
            self.loss(batch).backward()
        self.moved.step()
        self.moved.zero_grad()

    @contextlib.contextmanager
    def moved_by(self, moves: dict[str, Tensor]) -> Any:
        """Move the weights within the block."""
        before = self.weights()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.add_(moves[name])
        yield
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(before[name])


class Distilled(Client):
    """A loss that holds the distance to another model's logits."""

    def loss(self, batch: stacks.Batch) -> Tensor:
        """Add the distance."""
        outputs = self.model(**batch)
        teacher = torch.zeros_like(outputs.logits).softmax(-1)
        found: Tensor = outputs.loss + nn.functional.kl_div(
            outputs.logits.log_softmax(-1), teacher, reduction="batchmean"
        )
        return found
