"""Optimizers as people write them: private ones, SAM, containers, wrappers.

Each says which gradients moved the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Plain(torch.optim.Optimizer):
    """SGD in a few lines, with weight decay that is added to the gradient in place."""

    def __init__(self, parameters: Any, lr: float = 0.1, decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if group["decay"]:
                        p.grad.add_(p, alpha=group["decay"])
                    p.add_(p.grad, alpha=-group["lr"])


class Averaged(torch.optim.Optimizer):
    """Mixes a fast and an averaged iterate, as schedule-free SGD does."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                fast = state.setdefault("z", p.clone())
                p.grad.add_(p, alpha=0.01)
                p.lerp_(fast, 0.5)
                p.add_(p.grad, alpha=-0.1 * group["lr"])
                fast.sub_(p.grad, alpha=group["lr"])


class Scratch(torch.optim.Optimizer):
    """Divides the gradients where they stand, as schedule-free AdamW does."""

    def __init__(self, parameters: Any, lr: float = 1e-2, *, decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    squares = self.state[p].setdefault("v", torch.zeros_like(p))
                    squares.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                    p.grad.div_(squares.sqrt().add_(1e-8)).add_(p, alpha=group["weight_decay"])
                    p.add_(p.grad, alpha=-group["lr"])


class Lion(torch.optim.Optimizer):
    """Moves every weight by the sign of an average (Chen et al. 2023)."""

    def __init__(self, parameters: Any, lr: float = 1e-3, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_((0.9 * average + 0.1 * p.grad).sign(), alpha=-group["lr"])
                    average.lerp_(p.grad, 0.01)


class EightBits(torch.optim.Optimizer):
    """Adam whose moments are bytes with one scale, as in bitsandbytes."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self._moved(p, "mean", p.grad, 0.1)
                    square = self._moved(p, "square", p.grad.square(), 0.01)
                    p.sub_(group["lr"] * mean / (square.clamp_min(0).sqrt() + 1e-8))

    def _moved(self, p: Any, key: str, towards: Tensor, share: float) -> Tensor:
        """Return a moment after this step; store it in 8 bits."""
        state = self.state[p]
        before = state[key].float() * state[f"{key} scale"] if key in state else torch.zeros_like(p)
        now = before.lerp(towards, share)
        state[f"{key} scale"] = now.abs().max() / 127 + 1e-30
        state[key] = (now / state[f"{key} scale"]).round().to(torch.int8)
        return now


class Paged(torch.optim.Optimizer):
    """AdamW whose moments are pages of one flat memory, as in bitsandbytes."""

    is_paged = True

    def __init__(self, parameters: Any, lr: float = 1e-3, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": decay})
        self.memory: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    pages = self.memory.setdefault(p, torch.zeros(2, p.numel()))
                    self.state[p]["state1"], self.state[p]["state2"] = pages
                    pages[0].lerp_(p.grad.flatten(), 0.1)
                    pages[1].lerp_(p.grad.flatten().square(), 0.01)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(group["lr"] * (pages[0] / (pages[1].sqrt() + 1e-8)).view_as(p))


class ScheduleFree(torch.optim.Optimizer):
    """AdamW without a schedule (Defazio et al. 2024): it divides gradients in place.

    Between steps the weights lie between a fast iterate and an average; `train` and `eval` choose which.
    """

    def __init__(self, parameters: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def train(self) -> None:
        """Note that the weights are those of training; the average is the same at first."""
        for group in self.param_groups:
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            share, beta, lr = 1 / group["k"], group["beta"], group["lr"]
            for p in group["params"]:
                if p.grad is not None:
                    fast = self.state[p].setdefault("z", p.clone())
                    squares = self.state[p].setdefault("exp_avg_sq", torch.zeros_like(p))
                    squares.lerp_(p.grad.square(), 0.001)
                    p.grad.div_((squares / (1 - 0.999 ** group["k"])).sqrt().add_(1e-8))
                    p.lerp_(fast, share)
                    p.add_(p.grad, alpha=lr * (beta * (1 - share) - 1))
                    fast.sub_(p.grad, alpha=lr)


class Private(torch.optim.Optimizer):
    """Clips and noises the gradients inside its step."""

    def __init__(self, parameters: Any, lr: float = 0.1, *, way: str = "in place", momentum: bool = False) -> None:
        super().__init__(parameters, {"lr": lr})
        self.way, self.momentum = way, momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    moving = self._noised(p)
                    if self.momentum:
                        moving = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(moving)
                    p.add_(moving, alpha=-group["lr"])
                    if self.way == "emptied":
                        p.grad = None

    def _noised(self, p: Any) -> Tensor:
        noise = torch.randn_like(p.grad) * 0.01
        if self.way in ("in place", "emptied"):
            return p.grad.add_(noise)  # type: ignore[no-any-return]
        if self.way == "data":
            p.grad.data.add_(noise)
        elif self.way == "replaced":
            p.grad = p.grad + noise
        else:
            return p.grad + noise  # type: ignore[no-any-return]
        return p.grad  # type: ignore[no-any-return]


class LatelyPrivate(Private):
    """Plain SGD until its third step, and private from then on."""

    taken = 0

    def _noised(self, p: Any) -> Any:
        return super()._noised(p) if self.taken >= 2 else p.grad

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.taken += 1


class PrivateChild(torch.optim.SGD):
    """A usual private optimizer: noise in `step`, then the parent's `step`."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.add_(torch.randn_like(p.grad) * 0.01)
        return super().step(closure)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al. 2021) around a base optimizer.

    It takes one step with a closure, or two steps.
    """

    def __init__(self, parameters: Any, lr: float = 0.1, rho: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb to the worst weights nearby."""
        climb(self)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Go back and step with the gradient from there."""
        for group in self.param_groups:
            for p in group["params"]:
                if "old" in self.state[p]:
                    p.data = self.state[p]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class OwnSam(torch.optim.Optimizer):
    """The same without a base optimizer."""

    def __init__(self, parameters: Any, lr: float = 0.1, rho: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho})

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        climb(self)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.copy_(self.state[p]["old"]).sub_(p.grad, alpha=group["lr"])


@torch.no_grad()
def climb(optimizer: Any) -> None:
    """Move the weights along the gradient by rho, and store the old ones."""
    moved = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.stack([p.grad.norm() for p in moved]).norm()
    for p in moved:
        optimizer.state[p]["old"] = p.data.clone()
        p.add_(p.grad, alpha=float(optimizer.param_groups[0]["rho"] / (norm + 1e-12)))


class Several(torch.optim.Optimizer):
    """One optimizer to the outside, two inside: Muon for matrices, AdamW for the rest."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        given = list(parameters)
        super().__init__(given, {"lr": lr})
        self.parts = muon_and_adamw(given, lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def muon_and_adamw(parameters: Any, lr: float = 0.01) -> list[Any]:
    """Return Muon for matrices and AdamW for the other parameters."""
    given = list(parameters)
    matrices = [p for p in given if p.dim() == 2 and p.requires_grad]
    rest = [p for p in given if p.dim() != 2 and p.requires_grad]
    return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(rest, lr=lr)]


class Wrapper:
    """Keeps an optimizer under a name of its own and delegates the rest."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["inside"], name)
