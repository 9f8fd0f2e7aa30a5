"""The optimizer of a client's local steps, as the protocol makes it public."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

UpdateKind = Literal["gradient", "sgd", "momentum", "adam", "adafactor", "other"]
"""What a client's update is made of.

`gradient`: no optimizer. The other kinds are differences of weights after local steps: `sgd` of SGD without momentum, `momentum` of SGD with
it, `adam` of Adam and AdamW, `adafactor` of Adafactor, `other` of every other optimizer.
"""

ALGORITHMS: Mapping[str, tuple[str, str]] = {
    **{
        name: ("torch.optim", name)
        for name in (
            "SGD",
            "Adam",
            "AdamW",
            "Adafactor",
            "Adadelta",
            "Adagrad",
            "Adamax",
            "NAdam",
            "RAdam",
            "RMSprop",
        )
    },
    "transformers.Adafactor": ("transformers.optimization", "Adafactor"),
}
"""Name of an optimizer whose local steps can be computed again -> its module and class."""

UNKNOWN = "unknown"
"""Name of an optimizer whose rule or state is not known here; its local steps cannot be computed again."""

Option = bool | int | float | str | tuple[float | None, ...] | None
"""Value of an option of a parameter group."""


class ParameterGroup(BaseModel):
    """Parameters that share the options of an optimizer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: tuple[str, ...]
    learning_rates: tuple[float, ...]
    """One learning rate for each of the K local steps."""
    options: dict[str, Option] = {}
    """All other options of the group, as the optimizer names them, such as `betas`, `eps` and `weight_decay`."""


class ClientOptimizer(BaseModel):
    """An optimizer with its options; the server knows both."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: str
    """A name in `ALGORITHMS`, or `UNKNOWN`."""
    groups: tuple[ParameterGroup, ...]
    fresh: bool = True
    """Whether the optimizer had no state when the local steps began, so that its moments were zero."""

    @property
    def kind(self) -> UpdateKind:
        """The kind of update that this optimizer makes."""
        if self.algorithm == "SGD":
            return "momentum" if any(group.options.get("momentum") for group in self.groups) else "sgd"
        if self.algorithm in ("Adam", "AdamW"):
            return "adam"
        return "adafactor" if self.algorithm.endswith("Adafactor") else "other"

    @property
    def local_steps(self) -> int:
        """Number K of local steps."""
        return len(self.groups[0].learning_rates)

    @property
    def learning_rate(self) -> float:
        """Mean learning rate of the first group over the local steps."""
        rates = self.groups[0].learning_rates
        return sum(rates) / len(rates)

    def group_of(self, parameter: str) -> ParameterGroup | None:
        """Return the group that holds a parameter; None if the optimizer does not move it."""
        return next((group for group in self.groups if parameter in group.parameters), None)

    def moving(self, parameters: Collection[str]) -> ClientOptimizer:
        """Return this optimizer for some of its parameters; empty groups are left out."""
        groups = (
            group.model_copy(update={"parameters": tuple(name for name in group.parameters if name in parameters)})
            for group in self.groups
        )
        return self.model_copy(update={"groups": tuple(group for group in groups if group.parameters)})

    def one_fresh_step(self) -> ClientOptimizer:
        """Return this optimizer for a client that takes one step with it and begins anew.

        The learning rates are the means over the local steps.
        """
        groups = tuple(
            group.model_copy(update={"learning_rates": (sum(group.learning_rates) / len(group.learning_rates),)})
            for group in self.groups
        )
        return self.model_copy(update={"groups": groups, "fresh": True})

    def make(self, parameters: Mapping[str, Any]) -> Any:
        """Return a new torch optimizer of this kind, with the first step's learning rates.

        Args:
            parameters: name -> parameter, for all names of the groups.

        Raises:
            KeyError: the algorithm is not in `ALGORITHMS`, or a parameter is missing.
        """
        module, name = ALGORITHMS[self.algorithm]
        groups: list[dict[str, Any]] = [
            {
                "params": [parameters[each] for each in group.parameters],
                **group.options,
                "lr": group.learning_rates[0],
            }
            for group in self.groups
        ]
        kind = getattr(importlib.import_module(module), name)
        taken = inspect.signature(kind).parameters.keys() - {"params"}
        # A class may check its arguments together (Adafactor's `lr` and `relative_step`), so it gets those of the first group.
        return kind(groups, **{option: value for option, value in groups[0].items() if option in taken})
