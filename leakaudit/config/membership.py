"""What an audit needs to ask who was in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from leakaudit.errors import ConfigError

FEWEST_CALIBRATION = 16
"""Fewest calibration texts, as `leakaudit.algorithms.membership.readings` asks."""

MOST_TEXTS = 10_000
"""Most texts of a kind. Our choice: their gradients then take 8 GB."""

FIELD_NAME = r"^.{1,200}$"
"""Name of a field of a data file."""


class MembershipConfig(BaseModel):
    """Where the texts of no step come from, and how many are compared.

    `leakaudit simulate --nonmembers` sets `nonmembers`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    nonmembers: Path
    """File of texts of the same source as the training data, of which the training uses none. Formats are those of `leakaudit simulate --data`.
    Texts that are in a step all the same are left out there and counted. A relative path counts from the folder of the configuration."""
    calibration: Annotated[int, Field(ge=FEWEST_CALIBRATION, le=MOST_TEXTS)] = 128
    """Texts of no step that the attacker knows to be in none. They fix the threshold. The gradient of each is computed on every kept step."""
    candidates: Annotated[int, Field(ge=2, le=MOST_TEXTS)] = 64
    """Texts of which the attacker does not know whether they were in the step: at most half of them are texts of the step, the others are not."""
    max_length: Annotated[int, Field(ge=2, le=10**6)] | None = None
    """Tokens after which the training cuts a text. Null: 512, or what the model takes if that is less."""
    text_field: Annotated[str, Field(pattern=FIELD_NAME)] = "text"
    """Field of the file that holds the text."""
    label_field: Annotated[str, Field(pattern=FIELD_NAME)] = "label"
    """Field that holds the class. Where it has no class for every text, labels are taken as unknown."""


def check_nonmembers(found: MembershipConfig | None) -> None:
    """Refuse a file of non-members that is not there, before anything trains.

    Raises:
        ConfigError: with the path.
    """
    if found is not None and not found.nonmembers.exists():
        raise ConfigError(
            f"`membership: {{nonmembers: {found.nonmembers}}}`: there is no such file; name a file of texts that the training does not use"
        )
