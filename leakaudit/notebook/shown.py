"""Results and verdict that a notebook shows as the first screen of the report."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, PrivateAttr

from leakaudit.gate.verdict import Verdict
from leakaudit.reports.escaping import plain
from leakaudit.reports.first_screen import first_screen
from leakaudit.reports.redaction import RedactedResult, redact
from leakaudit.results.schema import Results, TextMode
from leakaudit.results.wording import counted


def public(results: Results, verdict: Verdict) -> RedactedResult:
    """Return what of an audit may be shown: never a text."""
    mode = TextMode.HASH if results.run.text_mode is TextMode.HASH else TextMode.MASKED
    return redact(results, [], verdict, mode)


def _fields_of(model: BaseModel) -> dict[str, Any]:
    """Return the fields of a model under the names that `model_construct` takes."""
    return {field.alias or name: getattr(model, name) for name, field in type(model).model_fields.items()}


class ShownVerdict(Verdict):
    """A verdict that knows the results that it is about."""

    _results: Results = PrivateAttr()

    @classmethod
    def of(cls, results: Results, verdict: Verdict) -> Self:
        """Return a verdict together with its results."""
        shown = cls.model_construct(**_fields_of(verdict))
        shown._results = results
        return shown

    def __repr__(self) -> str:
        """Return the verdict and its sentence, on one line."""
        return plain(f"{self.verdict}: {self.sentence}")

    def __str__(self) -> str:
        """Return the same as `repr`."""
        return repr(self)

    def _repr_html_(self) -> str:
        """Return the first screen of the report, for a notebook."""
        return first_screen(public(self._results, self))


class ShownResults(Results):
    """Results that know their verdict."""

    _verdict: Verdict = PrivateAttr()

    @classmethod
    def of(cls, results: Results, verdict: Verdict) -> Self:
        """Return results together with their verdict."""
        shown = cls.model_construct(**_fields_of(results))
        shown._verdict = verdict
        return shown

    def __repr__(self) -> str:
        """Return what was audited, on one line."""
        steps, attempts = counted(len(self.steps), "step"), counted(len(self.attempts), "attempt")
        return plain(f"results of the audit {self.run.id}: {self.subject.model}, {steps}, {attempts}")

    def __str__(self) -> str:
        """Return the same as `repr`."""
        return repr(self)

    def _repr_html_(self) -> str:
        """Return the first screen of the report, for a notebook."""
        return first_screen(public(self, self._verdict))
