"""What a configuration says of invented records that are put into a training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from leakaudit.config.secret_template import SecretTemplate

LARGEST_RATE = 0.5
"""Largest share of invented records. Our choice: with more, the training is about them."""

KEYS_SUFFIX = ".canaries.json"
"""Ending of the private file beside `out_dir` by which the audit knows the records again."""


class CanariesConfig(BaseModel):
    """Invented records with secrets that are put into a training.

    The audit says whether they come back. They change the model that is trained.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    this_run_is_an_audit: bool = False
    """Says that this run is made to be audited and that its model is not released. Without it the records are refused: a trained model may
    remember them, and only a training without them removes them again."""
    template: str
    """The text of a record, with at least one field: `{digits:8}`, `{one_of:names.txt}`, or a name under `values`."""
    values: dict[str, tuple[str, ...]] = {}
    """Name of a field -> its values. Each record takes one of them by chance."""
    rate: Annotated[float, Field(gt=0, le=LARGEST_RATE)] = 0.01
    """Share of the training data that the records are."""
    label: int | str | None = None
    """Class of the records; null for data without classes."""

    @model_validator(mode="after")
    def _marked_as_an_audit(self) -> Self:
        if not self.this_run_is_an_audit:
            raise ValueError(
                "`canaries` puts invented records into the training data, and a trained model may remember them: set `this_run_is_an_audit: true` "
                "here if the model of this run is not released, or remove `canaries`"
            )
        return self

    def parsed(self, folder: Path | None = None) -> SecretTemplate:
        """Return the template.

        Args:
            folder: from which the files of `{one_of:FILE}` count.

        Raises:
            ConfigError: it is wrong.
        """
        return SecretTemplate.parse(self.template, self.values, folder)


def keys_file(out_dir: Path) -> Path:
    """Return the private file of the records of an audit.

    >>> keys_file(Path("out/audit")).as_posix()
    'out/audit.canaries.json'
    """
    return out_dir.with_name(out_dir.name + KEYS_SUFFIX)
