"""The baseline: the audit that nights and releases are compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from leakaudit.errors import ResultsError
from leakaudit.files.private_files import write_atomic
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.gate.policy import Policy
from leakaudit.gate.verdict import Verdict
from leakaudit.history.keys import keys_of
from leakaudit.history.rates import rates_of
from leakaudit.history.record import NightModel, Rate
from leakaudit.history.trend import Baseline
from leakaudit.results.schema import Results

FILE = "leakaudit.baseline.json"
"""Name of the file unless the user gives another one. It is meant to be committed beside the policy."""


class SavedBaseline(NightModel):
    """The content of a baseline's file. It holds numbers only, so it may be committed."""

    schema_: Literal["leakaudit.baseline/1"] = Field(default="leakaudit.baseline/1", alias="schema")
    run: str
    results_digest: str
    set_at: str
    verdict: str
    keys: dict[str, str]
    rates: tuple[Rate, ...]

    def counts(self) -> Baseline:
        """Return the counts that nights are compared with."""
        return Baseline(self.run, self.keys, {rate.series: (rate.fresh_k, rate.fresh_n) for rate in self.rates})


def baseline_of(results: Results, policy: Policy, verdict: Verdict, data: str = "") -> SavedBaseline:
    """Return the baseline that an audit makes.

    Args:
        results: the audit.
        policy: the policy that judged it.
        verdict: its verdict.
        data: name of the data set, or a mark of it, as nights record it.
    """
    return SavedBaseline(
        run=results.run.id,
        results_digest=results.digest or "",
        set_at=verdict.evaluated_at,
        verdict=verdict.verdict,
        keys=keys_of(results, policy, data),
        rates=rates_of(results, policy),
    )


def save(baseline: SavedBaseline, path: Path) -> None:
    """Write a baseline's file.

    Raises:
        ResultsError: it cannot be written.
    """
    try:
        write_atomic(path, json.dumps(baseline.model_dump(mode="json", by_alias=True), indent=1) + "\n")
    except OSError as error:
        raise ResultsError(f"{path}: the baseline cannot be written ({error.strerror})") from None


def load(path: Path) -> SavedBaseline | None:
    """Read a baseline's file; None if there is none.

    Raises:
        ResultsError: it cannot be read.
    """
    try:
        return SavedBaseline.model_validate(parse_json(read_bounded(path)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise ResultsError(
            f"{path}: the baseline cannot be read ({what}); set it again with `leakaudit baseline set RUN`"
        ) from None
