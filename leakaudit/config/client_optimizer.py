"""The optimizers of `leakaudit simulate --optimizer` and their options.

No torch.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leakaudit.config.audit import PluginSpec
from leakaudit.errors import ConfigError


class OptimizerOptions(BaseModel):
    """Options of a client's optimizer; the defaults are those of torch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: ClassVar[str]
    """Name of the class in `torch.optim`."""
    fresh: bool = True
    """Whether every round begins with a new optimizer; if not, the moments of the round before are kept."""

    def options(self) -> dict[str, Any]:
        """Return the options of torch's parameter group."""
        return self.model_dump(exclude={"fresh"})


class Sgd(OptimizerOptions):
    """Stochastic gradient descent."""

    algorithm = "SGD"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)


class Adam(OptimizerOptions):
    """Adam (Kingma and Ba 2015); its weight decay is added to the gradient."""

    algorithm = "Adam"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)

    def options(self) -> dict[str, Any]:
        """Return the options of torch's parameter group."""
        return {"betas": (self.beta1, self.beta2), **self.model_dump(exclude={"fresh", "beta1", "beta2"})}


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019); its weight decay is apart from the gradient."""

    algorithm = "AdamW"
    weight_decay: float = Field(default=0.01, ge=0)


class Adafactor(OptimizerOptions):
    """Adafactor (Shazeer and Stern 2018)."""

    algorithm = "Adafactor"
    weight_decay: float = Field(default=0.0, ge=0)


OPTIMIZERS: dict[str, type[OptimizerOptions]] = {"adamw": AdamW, "adam": Adam, "sgd": Sgd, "adafactor": Adafactor}
"""Name in `--optimizer` -> its options."""


def parse_optimizer(text: str) -> OptimizerOptions:
    """Read `adamw` or `adamw(weight_decay=0.01, fresh=true)`.

    Raises:
        ConfigError: the name, an option or a value is not known; the message lists what there is.
    """
    try:
        spec = PluginSpec.parse(text)
    except ValueError as error:
        raise ConfigError(f"--optimizer {error}") from None
    kind = OPTIMIZERS.get(spec.name)
    if kind is None:
        raise ConfigError(f"--optimizer {spec.name!r} is not known; one of {', '.join(OPTIMIZERS)}")
    try:
        return kind.model_validate(spec.options)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(
            f"--optimizer {spec.name}, option {problem['loc'][0]!r}: {problem['msg']}; its options are "
            f"{', '.join(kind.model_fields)}"
        ) from None
