"""Tells whether the declared defences alone make a sent update.

The stamp of verification says that an update comes from the batch, up to rounding and up to noise of the declared strength. That leaves room
for what nobody audited: digits below the rounding, and anything that is as large as the noise. Here the produced update is known to the last
bit. So what is computed from it has to be equal, and what is drawn at random has to look like another draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from leakaudit.audit.comparison import Update
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.local_steps import delta_divisor
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.errors import LeakAuditError

UNITS = 8.0
"""Units in the last place by which a number may differ that a defence computed. Our choice: clipping and quantising round four times."""

ROUNDING = 2.0**-20
"""Relative error of the produced update for defences that jump. Our choice: a few units in the last place of float32."""

ENTRIES = 1 << 16
"""Most entries of one parameter whose distribution is compared. Our choice: enough to see a change of one per cent."""

CHANCE = 1e-9
"""Chance of one comparison to call two draws different. Our choice: a model has up to a thousand comparisons."""

LARGEST = 3.0
"""Largest entry of what a defence adds, in units of the largest entry of another draw.

Our choice: Laplace noise on n weights exceeds it with a chance of about n^-2.
"""


def is_as_declared(
    step: ClientStep,
    produced: Observation,
    sent: Update,
    defenses: Sequence[DeclaredDefense],
    *,
    factor: float = 1.0,
    differences: bool,
) -> bool:
    """Return whether defences make the sent update from the produced one.

    Args:
        step: the step that produced the update.
        produced: the update of the training.
        sent: parameter name -> what was sent.
        defenses: those that were applied to the produced update, in their order.
        factor: by which what was sent is larger, as verification found it.
        differences: whether differences were sent, which are rounded more finely than weights.
    """
    bare = {name: produced.update[name] for name in sent}
    if not defenses and factor == 1.0:
        return all(torch.equal(update, sent[name]) for name, update in bare.items())
    plugins = [declared.known() for declared in defenses]
    if any(plugin is None for plugin in plugins):
        return False
    for before, after in {(factor, 1.0), (1.0, factor)}:
        base = {name: before * update for name, update in bare.items()}
        seen = {name: update / after for name, update in sent.items()}
        try:
            noisy = any(plugin.added_noise(step, base) > 0 for plugin in plugins)
            if _is_drawn(step, produced, base, seen, plugins, noisy=noisy) and (
                noisy or _is_computed(step, base, seen, plugins, differences=differences, copied=factor == 1.0)
            ):
                return True
        except (LeakAuditError, ValueError):
            continue  # a defence that cannot be applied to this update
    return False


def _is_computed(
    step: ClientStep, base: Update, seen: Update, plugins: Iterable[Any], *, differences: bool, copied: bool
) -> bool:
    """Return whether every entry is what the defences compute, up to its last digits.

    Args:
        step: that produced the update.
        base: the update before the defences.
        seen: what was sent.
        plugins: the defences.
        differences: whether differences were sent.
        copied: whether entries of differences that the defences leave as they are have to be equal.
    """
    expected = base
    for plugin in plugins:
        expected = plugin.expected(step, expected, seen, ROUNDING)
    divisor = delta_divisor(step.facts) if step.facts.view == "delta" else 1.0
    weights = dict(step.model.named_parameters())
    for name, update in seen.items():
        size = update.abs() if differences else update.abs() + weights[name].detach().float().abs() / divisor
        room = UNITS * torch.finfo(torch.float32).eps * size
        if differences and copied:
            room = room.where(expected[name] != base[name], 0.0)
        if bool(((update - expected[name]).abs() > room).any()):
            return False
    return True


def _is_drawn(
    step: ClientStep, produced: Observation, base: Update, seen: Update, plugins: Sequence[Any], *, noisy: bool
) -> bool:
    """Return whether what the defences add is distributed as in another draw."""
    if not plugins:
        return True
    facts = produced.facts.model_copy(update={"defenses": ()})
    drawn = replace(produced, update=base, facts=facts)
    rng = torch.Generator().manual_seed(0)
    for plugin in plugins:
        drawn = plugin(step, drawn, rng)
    # A tensor that was left as it is holds nothing that nobody audited, but it lacks its noise.
    names = [n for n in base if n in drawn.update and (noisy or not torch.equal(seen[n], base[n]))]
    if not names:
        return all(torch.equal(drawn.update[name], base[name]) for name in base if name in drawn.update)
    own = _in_units({name: seen[name] - base[name] for name in names})
    other = _in_units({name: drawn.update[name] - base[name] for name in names})
    if own is None or other is None:
        return False
    largest = [max(float(added.abs().max()) for added in one.values() if added.numel()) for one in (own, other)]
    if largest[0] > LARGEST * largest[1]:
        return False
    return not any(_differ(one, two) for one, two in _samples(own, other))


def _in_units(added: Update) -> Mapping[str, Tensor] | None:
    """Return entries over their root mean square; None if all are zero."""
    squares = sum(float(tensor.double().square().sum()) for tensor in added.values())
    entries = sum(tensor.numel() for tensor in added.values())
    if not squares:
        return None
    size = math.sqrt(squares / entries)
    return {name: tensor / size for name, tensor in added.items()}


def _samples(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what is compared: entries, and sizes of rows and columns.

    Rows and columns show what was added to the words or units of a text.
    """
    rng = torch.Generator().manual_seed(0)
    pooled: list[tuple[Tensor, Tensor]] = []
    for name, tensor in own.items():
        pair = tensor.flatten(), other[name].flatten()
        if tensor.numel() > ENTRIES:
            chosen = torch.randint(tensor.numel(), (ENTRIES,), generator=rng).to(tensor.device)
            pair = pair[0][chosen], pair[1][chosen]
        pooled.append(pair)
        yield pair
        if tensor.dim() == 2:
            for dim in (0, 1):
                yield tensor.square().mean(dim=dim), other[name].square().mean(dim=dim)
    yield torch.cat([one for one, _ in pooled]), torch.cat([two for _, two in pooled])


def _differ(one: Tensor, two: Tensor) -> bool:
    """Return whether two samples of one size are surely of different distributions.

    It is the two-sample test of Kolmogorov and Smirnov with its asymptotic bound, 2 exp(-n D^2) for two samples of n entries.
    """
    n = one.numel()
    if n == 0:
        return False
    first, second = one.sort().values.contiguous(), two.sort().values.contiguous()
    every = torch.cat([first, second])
    shares = [torch.searchsorted(sample, every, right=True).double() / n for sample in (first, second)]
    distance = float((shares[0] - shares[1]).abs().max())
    return distance > math.sqrt(math.log(2 / CHANCE) / n)
