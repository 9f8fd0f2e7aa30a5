"""What the user's audit object knows of its audit: folder, results and verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from leakaudit.capture.rounds.run import RoundRun
from leakaudit.capture.run import AuditRun
from leakaudit.errors import LeakAuditError

if TYPE_CHECKING:
    from leakaudit.gate.verdict import Verdict
    from leakaudit.notebook.loaded import LoadedAudit
    from leakaudit.results.schema import Results


class Finished:
    """The base of adapters that shows the audit after training."""

    _off: str
    _run: AuditRun | RoundRun | None
    _folder: Path | None = None

    @property
    def folder(self) -> Path | None:
        """Folder of the audit (results.json, report.html), known once training has begun."""
        return self._folder

    @property
    def results(self) -> Results | None:
        """What results.json holds after training.

        It is None before the end of training, and while there are no results: the run was not audited, or a side process still works. The file
        is read anew each time.

        Raises:
            ResultsError: the results cannot be read, or were changed after they were written.
        """
        loaded = self._loaded()
        return None if loaded is None else loaded.results

    @property
    def verdict(self) -> Verdict | None:
        """The answer of the gate after training; None and errors as for `results`."""
        loaded = self._loaded()
        return None if loaded is None else loaded.verdict

    def _loaded(self) -> LoadedAudit | None:
        """Return the finished audit; None if there is none."""
        if self._off or self._run is not None or self._folder is None or not (self._folder / "results.json").is_file():
            return None
        from leakaudit.notebook.loaded import load

        return load(self._folder)

    def __repr__(self) -> str:
        """Return how far the audit is, on one line."""
        return f"{type(self).__name__}({self._state_in_words()})"

    def _repr_html_(self) -> str | None:
        """Return the first screen of the report, for a notebook; None before there is one."""
        try:
            loaded = self._loaded()
        except LeakAuditError:
            return None  # the line of `repr` stands in its place
        return None if loaded is None else loaded._repr_html_()

    def _state_in_words(self) -> str:
        if self._off:
            return f"not audited: {self._off}"
        if self._folder is None:
            return "training has not begun"
        place = f"folder {str(self._folder)!r}"
        if self._run is not None:
            return f"training runs, steps kept: {self._run.kept}, {place}"
        try:
            loaded = self._loaded()
        except LeakAuditError as error:
            return f"{type(error).__name__}, {place}"
        return f"{'no results yet' if loaded is None else loaded.verdict.verdict}, {place}"
