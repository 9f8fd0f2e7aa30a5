"""The nights that a report shows as its trend, in a file beside `results.json`.

The night that makes a report writes the file, so that the same folder gives the same report later, whatever the history holds by then.
"""

from __future__ import annotations

import json
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from leakaudit.files.private_files import write_atomic
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.history.record import NightModel, NightRecord
from leakaudit.history.trend import Trend, time_of, trend_of
from leakaudit.results.sequential import PRIOR

FILE = "trend.json"


class SavedTrend(NightModel):
    """The content of `trend.json`."""

    schema_: Literal["leakaudit.trend/1"] = Field(default="leakaudit.trend/1", alias="schema")
    records: tuple[NightRecord, ...]
    """The nights up to this one, earliest first."""
    period_s: Annotated[FiniteFloat, Field(ge=60.0, le=366 * 86_400.0)]
    """Seconds from one night to the next."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1.0)
    """Confidence of the bounds over all nights together."""
    prior: tuple[Annotated[FiniteFloat, Field(gt=0.0)], Annotated[FiniteFloat, Field(gt=0.0)]] = PRIOR
    """Beta prior of the bounds."""
    not_compared: str = ""
    """Why the night is not compared with the baseline; empty if it is."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        """Refuse nights that no time axis can show."""
        times = [time_of(record.night) for record in self.records]
        if any(later <= earlier for earlier, later in pairwise(times)):
            raise ValueError("the nights are not in the order of time")
        return self

    def trend(self, last: int = 30) -> Trend:
        """Return the nights on a time axis."""
        return trend_of(self.records, period=timedelta(seconds=self.period_s), last=last)


def save_trend(saved: SavedTrend, folder: Path) -> None:
    """Write the trend into the folder of an audit.

    Raises:
        OSError: it cannot be written.
    """
    write_atomic(folder / FILE, json.dumps(saved.model_dump(mode="json", by_alias=True)))


def load_trend(folder: Path) -> SavedTrend | None:
    """Read the trend in the folder of an audit; None if none can be read.

    A report is made without it then: it says nothing about the audit itself.
    """
    try:
        return SavedTrend.model_validate(parse_json(read_bounded(folder / FILE)))
    except (OSError, ValueError):
        return None
