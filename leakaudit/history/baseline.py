"""The baseline: the audit that nights and releases are compared with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from leakaudit.errors import ResultsError
from leakaudit.files.private_files import write_atomic
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.gate.controls import trusted
from leakaudit.gate.evidence import gather_own
from leakaudit.gate.policy import Policy
from leakaudit.gate.regression import Series, outcomes, series_of
from leakaudit.gate.verdict import Verdict
from leakaudit.history.keys import keys_of
from leakaudit.history.rates import rates_of
from leakaudit.history.record import NightModel, Rate
from leakaudit.history.trend import Baseline
from leakaudit.results.schema import Count, Mark, Results

FILE = "leakaudit.baseline.json"
"""Name of the file unless the user gives another one. It is meant to be committed beside the policy."""


SEEN = {True: "1", False: "0", None: "?"}
"""Whether a step leaked -> how the file says it; `?` where nobody could judge it."""

_NOT_COUNTED = "-"
"""How the file says that a step is no evidence: it could not have the event, or repeats another step's update."""


class Outcomes(NightModel):
    """Which steps had one event of the policy."""

    event: str
    min_tokens: Count | None = None
    defense: str
    attack: str
    """The attacks of the rule, or `any`."""
    steps: str = Field(pattern=r"^[01?-]*$")
    """One character for each step, in the order of `SavedBaseline.batches`: 1 leaked, 0 clean, ? not judged, - not counted."""

    @property
    def series(self) -> Series:
        """What a rule counts: event, shortest text, defence, attacks."""
        return self.event, self.min_tokens, self.defense, self.attack


class SavedBaseline(NightModel):
    """The content of a baseline's file, which may be committed.

    It holds numbers and marks only. A mark is a keyed hash of a batch. Without the key nobody can tell from it what the batch was, or confirm a guess.
    """

    schema_: Literal["leakaudit.baseline/1"] = Field(default="leakaudit.baseline/1", alias="schema")
    run: str
    results_digest: str
    set_at: str
    verdict: str
    keys: dict[str, str]
    rates: tuple[Rate, ...]
    pairing: Mark = ""
    """Id of the key of the marks; empty if the audit had none."""
    batches: tuple[Mark, ...] = ()
    """Mark of each step's batch, in the order of the audit; an empty text for a step without one. Empty in files of earlier versions."""
    outcomes: tuple[Outcomes, ...] = ()
    """What the rules of the gate compare, step by step. Empty in files of earlier versions."""
    digest: str = ""
    """`sha256:` over everything else in the file. It shows that the file was not changed by accident. Empty in files of earlier versions."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if any(len(found.steps) != len(self.batches) for found in self.outcomes):
            raise ValueError("outcomes and batches are not of the same steps")
        return self

    def with_digest(self) -> SavedBaseline:
        """Return the same baseline with the digest of its content."""
        return self.model_copy(update={"digest": self.content_digest})

    @property
    def content_digest(self) -> str:
        """SHA-256 of everything but the digest."""
        plain = self.model_dump(mode="json", by_alias=True, exclude={"digest"})
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def counts(self) -> Baseline:
        """Return the counts that nights are compared with."""
        return Baseline(self.run, self.keys, {rate.series: (rate.fresh_k, rate.fresh_n) for rate in self.rates})


def baseline_of(results: Results, policy: Policy, verdict: Verdict, data: str = "") -> SavedBaseline:
    """Return the baseline that an audit makes.

    Args:
        results: the audit.
        policy: the policy that judged it.
        verdict: its verdict.
        data: name of the data set, or a mark of it, as nights record it; empty for the name in the results.
    """
    return SavedBaseline(
        run=results.run.id,
        results_digest=results.digest or "",
        set_at=verdict.evaluated_at,
        verdict=verdict.verdict,
        keys=keys_of(results, policy, data or results.subject.data),
        rates=rates_of(results, policy),
        pairing=results.run.pairing,
        batches=tuple(step.batch for step in results.steps),
        outcomes=tuple(_outcomes(results, policy)),
    ).with_digest()


def _outcomes(results: Results, policy: Policy) -> Iterator[Outcomes]:
    """Yield the outcomes of every event that the policy limits."""
    rules = {series_of(rule): rule for rule in policy.rules if rule.event is not None}
    for (event, min_tokens, defense, attack), rule in rules.items():
        seen = outcomes(gather_own(results, rule, trusted(results, policy, rule)))
        steps = "".join(SEEN[seen[step.id]] if step.id in seen else _NOT_COUNTED for step in results.steps)
        yield Outcomes(event=event, min_tokens=min_tokens, defense=defense, attack=attack, steps=steps)


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
        ResultsError: it cannot be read, or was changed after it was written.
    """
    try:
        raw = read_bounded(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(str(path), error) from None
    return parse(raw, str(path))


def parse(raw: bytes, source: str) -> SavedBaseline:
    """Return the content of a baseline's file; `source` is its name in messages.

    Raises:
        ResultsError: it is no baseline, or was changed after it was written.
    """
    try:
        found = SavedBaseline.model_validate(parse_json(raw))
    except ValueError as error:
        raise _unreadable(source, error) from None
    if found.digest and found.digest != found.content_digest:
        raise ResultsError(
            f"{source}: the baseline was changed after it was written; set it again with `leakaudit baseline set RUN`"
        )
    return found


def _unreadable(source: str, error: OSError | ValueError) -> ResultsError:
    what = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
    return ResultsError(
        f"{source}: the baseline cannot be read ({what}); set it again with `leakaudit baseline set RUN`"
    )
