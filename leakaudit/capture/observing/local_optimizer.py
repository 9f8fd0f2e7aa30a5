"""The optimizer of local steps, with its options, rates and state."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from leakaudit.capture.observing.optimizers import STEP_WRAPPER, base_optimizers
from leakaudit.capture.observing.private_sgd import private_sgd
from leakaudit.client.local_steps import state_tensors
from leakaudit.client.optimizer import ALGORITHMS, UNKNOWN, ClientOptimizer, Option, ParameterGroup
from leakaudit.errors import SnapshotError

WHAT_TO_DO = f"train with one of {', '.join(ALGORITHMS)}, or set `observe='update'`, which keeps the gradient that the optimizer is given"

CANNOT_REPEAT = ("capturable", "differentiable")
"""Options under which a step of torch takes other kernels than on another machine."""


def check_local_optimizer(optimizer: Any) -> None:
    """Refuse optimizers whose local steps cannot be computed again.

    Args:
        optimizer: one, wrapped or not, or a list of several.

    Raises:
        SnapshotError: says what was found and what to do.
    """
    movers = base_optimizers(optimizer)
    if len(movers) > 1:
        raise SnapshotError(
            f"`observe='delta'` is for one optimizer; {len(movers)} were given: put the parameters into groups of one optimizer, or set "
            "`observe='update'`"
        )
    if private_sgd(optimizer) is not None:
        raise _refusal(
            movers[0], "a private optimizer around it adds noise in every local step, and nobody keeps that noise"
        )
    unknown = rule_of(movers[0]) == UNKNOWN
    for group in movers[0].param_groups:
        options_of(movers[0], group)
        rate_of(movers[0], group)
    if not unknown:
        state_tensors(movers[0], {id(p): "" for group in movers[0].param_groups for p in group["params"]})


def algorithm_of(optimizer: Any) -> str:
    """Return the name in `ALGORITHMS` of the rule by which an optimizer steps.

    A subclass counts as the class in the table if it inherits all functions of the step.

    Raises:
        SnapshotError: it steps by another rule, or its state is not one that can be kept.
    """
    if why := _peculiar_state(optimizer):
        raise _refusal(optimizer, why)
    known = {kind: name for name, kind in _known_classes()}
    kinds = type(optimizer).__mro__
    base = next((kind for kind in kinds if kind in known), None)
    if base is None:
        raise _refusal(optimizer, "it is none of the optimizers whose step the audit can compute again")
    if changed := _changed_functions(kinds[: kinds.index(base)], base):
        raise _refusal(optimizer, f"it replaces `{changed}` of {base.__name__}, so it may step by another rule")
    return known[base]


def rule_of(optimizer: Any) -> str:
    """Return the name of an optimizer's rule, or `UNKNOWN`.

    The local steps of an unknown one are kept, and attacked by what needs neither its rule nor its moments.
    """
    try:
        return algorithm_of(optimizer)
    except SnapshotError:
        return UNKNOWN


def _known_classes() -> Iterator[tuple[str, type]]:
    """Yield the optimizers of the table that are loaded.

    Some are in newer versions only, as Adafactor is in torch from 2.5 on.
    """
    for name, (module, kind) in ALGORITHMS.items():
        if (found := getattr(sys.modules.get(module), kind, None)) is not None:
            yield name, found


def _changed_functions(kinds: Sequence[type], base: type) -> str:
    """Return a function of a base class's step that a subclass replaces, or ""."""
    family = [
        kind for kind in base.__mro__ if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]
    step = {name for kind in family for name, value in vars(kind).items() if callable(_plain(value))}
    names = sorted(name for kind in kinds for name in vars(kind) if name in step and not name.startswith("__"))
    return next(
        (name for name in names if _unhooked(getattr(kinds[0], name)) is not _unhooked(getattr(base, name))), ""
    )


def _plain(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _unhooked(function: Any) -> Any:
    """Return a function without the wrapper that torch puts around each `step`."""
    while getattr(function, "__code__", None) is STEP_WRAPPER:
        function = function.__wrapped__
    return function


def _peculiar_state(optimizer: Any) -> str:
    """Return why an optimizer's state cannot be kept as plain tensors; "" if it can."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
    if isinstance(bits, int) and bits < 32:
        return f"its state is quantised to {bits} bits"
    if getattr(optimizer, "is_paged", False):
        return "its state is in paged memory, which moves while it is read"
    if hasattr(optimizer, "block_size"):  # as the low-bit optimizers of torchao
        return "its state is quantised in blocks"
    return ""


def _refusal(optimizer: Any, why: str) -> SnapshotError:
    kind = type(optimizer)
    return SnapshotError(
        f"`observe='delta'` needs local steps that can be computed again, and those of {kind.__name__} ({kind.__module__}) cannot: {why}. "
        f"{WHAT_TO_DO[0].upper()}{WHAT_TO_DO[1:]}"
    )


def options_of(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Option]:
    """Return the options of a group that its class defines, without the rate.

    Raises:
        SnapshotError: the step cannot be computed again under one of them.
    """
    found = {name: group.get(name, default) for name, default in optimizer.defaults.items() if name != "lr"}
    for name in CANNOT_REPEAT:
        if found.pop(name, False):
            raise _refusal(optimizer, f"it was made with `{name}=True`; make it with `{name}=False`")
    if rule_of(optimizer) == UNKNOWN:
        return {
            name: number for name, value in found.items() if isinstance(number := _number(value), bool | int | float)
        }
    return {name: _option(optimizer, name, value) for name, value in found.items()}


def _option(optimizer: Any, name: str, value: Any) -> Option:
    if isinstance(value, tuple | list):
        parts = [_number(part) for part in value]
        if all(part is None or isinstance(part, int | float) for part in parts):
            return tuple(parts)
    value = _number(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _refusal(optimizer, f"its option `{name}` is a {type(value).__name__}, no number and no text")


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def rate_of(optimizer: Any, group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group; a tensor is read.

    Raises:
        SnapshotError: the optimizer chooses the rate itself.
    """
    rate = group.get("lr")
    if rate is None:
        raise _refusal(
            optimizer,
            "a group has no learning rate (`relative_step=True`); give it a rate (`lr`, `relative_step=False`)",
        )
    return float(rate)


def has_stepped(optimizer: Any, names: Mapping[int, str]) -> bool:
    """Return whether an optimizer keeps moments of earlier steps for some parameters.

    Some optimizers (Adagrad) make their state at once, with a step of 0.

    Args:
        optimizer: the base optimizer.
        names: id of a parameter -> its name.
    """
    states = [state for parameter, state in optimizer.state.items() if id(parameter) in names]
    return any(
        float(state.get("step", 1)) > 0 for state in states if any(value is not None for value in state.values())
    )


@dataclass
class LocalOptimizer:
    """What an optimizer was set to in each local step of a round."""

    algorithm: str
    fresh: bool
    """Whether it had no moments when the round began."""
    groups: list[tuple[tuple[str, ...], dict[str, Option]]] = field(default_factory=list)
    """Names of the parameters of each group, and its options, at the first local step."""
    rates: list[list[float]] = field(default_factory=list)
    """For each local step, the learning rate of each group."""

    @classmethod
    def of(cls, optimizer: Any, names: Mapping[int, str]) -> Self:
        """Describe an optimizer before its first local step.

        Args:
            optimizer: the base optimizer.
            names: id of each parameter that it moves -> its name in the audited model.

        Raises:
            SnapshotError: its step cannot be computed again.
        """
        rule = rule_of(optimizer)
        return cls(rule, rule != UNKNOWN and not has_stepped(optimizer, names))

    def note_step(self, optimizer: Any, names: Mapping[int, str]) -> None:
        """Note the learning rates of a local step that begins.

        Raises:
            SnapshotError: groups or options are others than in the first local step.
        """
        groups = []
        rates = []
        for group in optimizer.param_groups:
            mine = tuple(names[id(p)] for p in group["params"] if id(p) in names)
            if mine:
                groups.append((mine, options_of(optimizer, group)))
                rates.append(rate_of(optimizer, group))
        self.groups = self.groups or groups
        if self.algorithm == UNKNOWN:  # schedule-free ones count their steps in an option
            self.groups, groups = _steady(self.groups, groups), _steady(groups, self.groups)
        if groups != self.groups:
            raise SnapshotError(
                f"{_changed_option(self.groups, groups)} of its optimizer changed between its local steps"
            )
        self.rates.append(rates)

    @property
    def local_steps(self) -> int:
        """Number K of local steps so far."""
        return len(self.rates)

    @property
    def learning_rate(self) -> float:
        """Mean learning rate of the first group."""
        rates = [step[0] for step in self.rates]
        return rates[0] if len(set(rates)) == 1 else sum(rates) / len(rates)

    def described(self) -> ClientOptimizer | None:
        """Return the optimizer as it becomes public; None for plain SGD with one rate."""
        if self._is_plain():
            return None
        groups = tuple(
            ParameterGroup(parameters=names, learning_rates=tuple(step[number] for step in self.rates), options=options)
            for number, (names, options) in enumerate(self.groups)
        )
        return ClientOptimizer(algorithm=self.algorithm, groups=groups, fresh=self.fresh)

    def _is_plain(self) -> bool:
        """Return whether each step subtracts only one rate times the gradient."""
        names = ("momentum", "weight_decay", "nesterov", "maximize", "fused")
        options = [options.get(name) for _, options in self.groups for name in names]
        return self.algorithm == "SGD" and not any(options) and len({rate for step in self.rates for rate in step}) == 1


def _steady(
    groups: Sequence[tuple[tuple[str, ...], dict[str, Option]]],
    others: Sequence[tuple[tuple[str, ...], dict[str, Option]]],
) -> list[tuple[tuple[str, ...], dict[str, Option]]]:
    """Return groups without the options that differ from those of another local step.

    The weight decay stays: attacks on rows ask for it.
    """
    if len(groups) != len(others):
        return list(groups)
    return [
        (
            names,
            {n: value for n, value in mine.items() if n == "weight_decay" or (n in other and other[n] == value)},
        )
        for (names, mine), (_, other) in zip(groups, others, strict=True)
    ]


def _changed_option(
    before: Sequence[tuple[tuple[str, ...], dict[str, Option]]],
    now: Sequence[tuple[tuple[str, ...], dict[str, Option]]],
) -> str:
    """Name the first option that differs between the groups of two local steps."""
    for (_, old), (_, new) in zip(before, now, strict=False):
        for name, value in old.items():
            if new.get(name) != value:
                return f"the option `{name}`"
    return "the parameter groups"
