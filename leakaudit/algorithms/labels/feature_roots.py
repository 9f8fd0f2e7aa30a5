"""Reads every sequence's features out of one feed-forward part of the model: linear, activation, linear.

Letters: B sequences, D features into the first linear layer, M out of it, f the activation.

Close to the output of a classifier only one row a sequence carries gradient: the class token of an encoder's last block, or a hidden
layer of a picture classifier. There the two updates are dW1 = sum_k e_k x_k^T and dW2 = sum_k g_k u_k^T with u_k = f(W1 x_k + b1), so
their row spaces are X = span{x_k} and U = span{u_k}, both of dimension B while B is small enough. Every x of the batch is
therefore a root, within X, of

    r(x) = f(W1 x + b1) - its projection on U:

B unknowns and M - B equations, so that other roots do not happen. The update names the batch's features one by one, and how
many there are. Source: the row spaces are DAGER's observation (Petrov et al. 2024, Sec. 4.1); the rest is derived here.

Roots are found by Levenberg's damped Gauss-Newton method from random starts. The residual is divided by the distance from a hyperplane
that holds the origin and all roots that are known, which keeps further starts away from them (deflation as in Farrell et al.
2015, with a plane instead of points); the origin is a root of its own where the first layer's bias is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.plugins.budget import Budget

CLEAR_GAP = 20.0
"""Factor between the last singular value that counts and the first that does not. Measured on MiniLM: 100 or more for up to 128
sequences; nothing like it without a gap to find."""

NOTHING = 1e-9
"""Singular values below this share of the largest are rounding. Our choice: float32 updates leave about 1e-8."""

IS_ROOT = 1e-2
"""Length of r over that of f(W1 x + b1) up to which x counts as found. Measured: 1e-5 or less at roots, 1e-3 in the weakest
directions of 128 sequences, 0.9 where the search ends elsewhere."""

SAME_ROOT = 1e-3
"""Relative distance up to which two roots are one."""

TURNS = 40
"""Gauss-Newton steps a start. Measured: 8 on average for 32 sequences, 25 for 128."""

REACH = 4.0
"""How far starts lie from the centre, in scatters of what dummy inputs give. Measured on train texts: with 1 the same roots come
again and again, 2 and 4 do."""

OTHER_REACHES = (1.0, 0.5, 2.0, 0.25)
"""Times that, after four starts without a new root each: the last root may lie near the others, or far from them. Our choice."""

POLE = 2.0
"""Distance from the hyperplane of known roots at which the deflated residual has doubled. Measured with `REACH`."""

FRUITLESS = 64
"""Starts in a row without a new root after which the search is given up. Our choice."""


@dataclass(frozen=True)
class FeedForward:
    """Where to look."""

    first: nn.Linear
    second: nn.Linear
    activation: nn.Module
    source: nn.Module
    """The module that gives x; what it returns is replaced to run the rest of the model from given features."""


def find_feed_forward(model: nn.Module, head: nn.Module, inputs: dict[str, Tensor]) -> FeedForward:
    """Find the last feed-forward part with one row a sequence behind it.

    Args:
        model: the public model, in eval mode.
        head: its output layer, whose update has fewer directions than there are classes: taken as the second layer only where
            there is no other.
        inputs: keyword arguments of its forward, two examples or more, all different.

    Raises:
        AnatomyError: there is none, or more than x passes by it.
    """
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    leaves = [m for m in model.modules() if not list(m.children())]

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            calls.append((module, args[0], output))

    handles = [leaf.register_forward_hook(note) for leaf in leaves]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    made = {id(output): module for module, _, output in calls}
    linear: dict[int, tuple[nn.Linear, Tensor]] = {}
    for module, taken, output in calls:
        if isinstance(module, nn.Linear):
            linear[id(output)] = (module, taken)
    ends = [(module, taken) for module, taken, _ in reversed(calls) if isinstance(module, nn.Linear)]
    for end, taken in sorted(ends, key=lambda call: call[0] is head):
        for activation, before, after in calls:
            if after is taken and id(before) in linear and not list(activation.parameters()):
                first, x = linear[id(before)]
                if id(x) in made:
                    found = FeedForward(first, end, activation, made[id(x)])
                    if _is_all_there_is(model, found, inputs):
                        return found
    raise AnatomyError(
        "looked for a feed-forward part (linear, activation, linear) whose input decides the output alone, and found none; models "
        "that normalise before each part keep a second path around it, and plain convolutional ones have no such part"
    )


def _is_all_there_is(model: nn.Module, found: FeedForward, inputs: dict[str, Tensor]) -> bool:
    """Return whether the outputs depend on x alone: with the same x for all, different inputs give the same output."""
    x = features_into(model, found, inputs)[:1]
    logits = run_from(model, found, x.expand(len(next(iter(inputs.values()))), -1), inputs)
    return bool(torch.allclose(logits, logits[:1].expand_as(logits), atol=1e-5, rtol=1e-4))


def features_into(model: nn.Module, part: FeedForward, inputs: dict[str, Tensor]) -> Tensor:
    """Return (N, D) what N inputs give to the part, at the position that the output depends on; the first of several."""
    taken: list[Tensor] = []
    handle = part.source.register_forward_hook(lambda module, args, output: taken.append(output.requires_grad_()))
    try:
        with torch.enable_grad(), _frozen(model):
            logits: Tensor = model(**inputs).logits
            (pull,) = torch.autograd.grad(logits.sum(), taken[-1])
    finally:
        handle.remove()
    x = taken[-1].detach()
    if x.dim() == 2:
        return x
    rows = pull.abs().sum(dim=2) > 0  # (N, T)
    if int(rows.sum(dim=1).max()) != 1:
        raise AnatomyError(
            "every token of a sequence carries gradient behind the last feed-forward part (mean pooling), so its update does "
            "not hold one row a sequence"
        )
    return x[torch.arange(len(x)), rows.long().argmax(dim=1)]


def run_from(model: nn.Module, part: FeedForward, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits (N, C) that features give, whatever stood before them.

    Args:
        model: the public model.
        part: where they enter.
        x: (N, D).
        inputs: any inputs of the model; the first is repeated as often as needed where their number differs.
    """
    with torch.no_grad():
        return _run(model, part, x, inputs)


def _run(model: nn.Module, part: FeedForward, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    count = len(x)
    plain = {k: v if len(v) == count else v[:1].expand(count, *v.shape[1:]) for k, v in inputs.items()}

    def replace(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        given = x.to(output)
        return given if output.dim() == 2 else given[:, None].expand_as(output)

    handle = part.source.register_forward_hook(replace)
    try:
        logits: Tensor = model(**plain).logits
    finally:
        handle.remove()
    return logits


def pulls_behind(model: nn.Module, part: FeedForward, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return (N, C, M') how each logit depends on what the part's second layer gives, in float64.

    Args:
        model: the public model.
        part: its second layer has M' outputs.
        x: (N, D) features that enter it.
        inputs: any inputs of the model.
    """
    taken: list[Tensor] = []
    handle = part.second.register_forward_hook(lambda module, args, output: taken.append(output.requires_grad_()))
    try:
        with torch.enable_grad(), _frozen(model):
            logits = _run(model, part, x, inputs)
            output_gradients = [
                torch.autograd.grad(z.sum(), taken[-1], retain_graph=True)[0] for z in logits.unbind(dim=1)
            ]
    finally:
        handle.remove()
    # Behind the part only one position of a sequence matters, so that the sum over positions is that one.
    return torch.stack([pull if pull.dim() == 2 else pull.sum(dim=1) for pull in output_gradients], dim=1).double()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Ask for no gradient of parameters for the duration of the block."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)


def row_space(update: Tensor) -> Tensor:
    """Return (B, D) an orthonormal basis of the rows of an update.

    Raises:
        AnatomyError: no gap shows how many directions there are.
    """
    _, strength, rows = torch.linalg.svd(update.double(), full_matrices=False)
    floor = (strength[0] * NOTHING).clamp_min(1e-300)
    ratio = strength[:-1] / strength[1:].clamp_min(float(floor))
    if float(strength[0]) == 0.0 or float(ratio.max()) < CLEAR_GAP:
        raise AnatomyError(
            "no gap in the singular values of the feed-forward part's update says how many sequences there are: as many as the "
            "layer is wide, several local steps, or a defence that changes every entry"
        )
    clear = (ratio >= CLEAR_GAP).nonzero().flatten()
    basis: Tensor = rows[: int(clear[-1]) + 1]  # the last gap: earlier ones are of the classes, not of the sequences
    return basis


@dataclass
class Roots:
    """What was found."""

    features: Tensor
    """(N, D) float64."""
    wanted: int
    """How many there are."""
    starts: int


def find_roots(
    weight: Tensor,
    bias: Tensor,
    activation: Callable[[Tensor], Tensor],
    inner: Tensor,
    outer: Tensor,
    centre: Tensor,
    scatter: float,
    rng: torch.Generator,
    budget: Budget,
) -> Roots:
    """Find the batch's features.

    Args:
        weight: (M, D) of the first layer, float64.
        bias: (M,).
        activation: elementwise.
        inner: (B, D) orthonormal basis of X.
        outer: (B, M) orthonormal basis of U.
        centre: (D,) where features are to be expected.
        scatter: how far from it.
        rng: draws the starts; a CPU generator.
        budget: looked at before each start.
    """
    count = len(inner)
    mixed = weight @ inner.T  # (M, B)
    middle = expected = inner @ centre  # (B,)
    known = torch.zeros(0, count, dtype=torch.float64, device=weight.device)
    starts = fruitless = 0
    while len(known) < count and fruitless < FRUITLESS and not budget.exhausted():
        starts += 1
        away = torch.randn(count, generator=rng, dtype=torch.float64).to(weight.device)
        if len(known):
            basis = torch.linalg.qr(known.T)[0]  # (B, K)
            away = away - basis @ (basis.T @ away)
            middle = known.mean(dim=0)
        away = away / away.norm()
        reach = REACH * OTHER_REACHES[fruitless // 4 % len(OTHER_REACHES)]
        start = (middle if fruitless % 2 == 0 else expected) + reach * scatter * away
        found, error = _descend(start, mixed, bias, activation, outer, away)
        if error < IS_ROOT:
            found, error = _descend(found, mixed, bias, activation, outer, None)
        fruitless += 1
        far = float(found.norm()) > SAME_ROOT * float(start.norm())  # the origin, if the plane did not keep it away
        if error < IS_ROOT and far and not bool(((known - found).norm(dim=1) < SAME_ROOT * found.norm()).any()):
            known = torch.cat([known, found[None]])
            fruitless = 0
    return Roots(known @ inner, count, starts)


def _descend(
    at: Tensor,
    mixed: Tensor,
    bias: Tensor,
    activation: Callable[[Tensor], Tensor],
    outer: Tensor,
    plane: Tensor | None,
) -> tuple[Tensor, float]:
    """Return where Levenberg's method ends, and |r| / |f| there.

    With `plane` (B,) the residual is m r, m = 1 + (POLE / (plane . c))^2, whose logarithm has the gradient h; the Gauss-Newton matrix
    of m r is m^2 (J + r h^T)^T (J + r h^T).
    """

    def residual(c: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        z = (mixed @ c + bias).detach().requires_grad_()
        with torch.enable_grad():
            value = activation(z)
            (slope,) = torch.autograd.grad(value.sum(), z)
        value = value.detach()
        r = value - outer.T @ (outer @ value)
        m = 1.0 if plane is None else 1.0 + (POLE / float(plane @ c)) ** 2
        return value, slope, r, m

    damping = 1e-2
    rough = mixed.float(), outer.float()
    value, slope, r, m = residual(at)
    cost = m * m * float(r @ r)
    for _ in range(TURNS):
        jacobian = (
            slope.float()[:, None] * rough[0]
        )  # (M, B), before the projection; float32 will do for the way, not for r
        inside = rough[1] @ jacobian
        matrix = (jacobian.T @ jacobian - inside.T @ inside).double()
        pull = mixed.T @ (slope * r)
        if plane is not None:
            h = -2 * POLE**2 / (float(plane @ at) ** 3 * m) * plane
            squared = float(r @ r)
            matrix = matrix + torch.outer(pull, h) + torch.outer(h, pull) + squared * torch.outer(h, h)
            pull = pull + squared * h
        mean = matrix.diagonal().mean().clamp_min(1e-300)
        better = False
        while not better and damping < 1e4:
            damped = matrix + torch.diag((damping * mean).expand(len(at)))
            step = torch.linalg.solve(damped, pull)
            new = residual(at - step)
            new_cost = new[3] ** 2 * float(new[2] @ new[2])
            better = new_cost < cost
            damping = max(damping / 3, 1e-12) if better else damping * 4
        if not better:
            break
        settled = new_cost > 0.99999 * cost
        at, (value, slope, r, m), cost = at - step, new, new_cost
        if settled or float(r.norm()) < 1e-9 * float(value.norm()):
            break
    return at, float(r.norm() / value.norm().clamp_min(1e-300))
