"""`leakaudit.load`, which reads the folder of a finished audit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from leakaudit.files.strict_json import read_bounded
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.policy_source import PolicyFiles
from leakaudit.gate.verdict import Verdict
from leakaudit.history.reference import reference_for
from leakaudit.notebook.frames import frame
from leakaudit.notebook.shown import ShownResults, ShownVerdict, public
from leakaudit.plugins.names import names_for
from leakaudit.reports.escaping import plain
from leakaudit.results.files import read_results
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class LoadedAudit:
    """A finished audit: its results, its verdict, and four tables of pandas.

    The tables hold no text. `leakaudit.notebook.columns.TABLES` has their columns with dtypes and units.
    """

    folder: Path
    """Folder of the audit."""
    results: ShownResults
    """What results.json holds. A notebook shows it as the first screen of the report."""
    verdict: ShownVerdict
    """The answer of the gate."""

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row: the audit, its subject and its verdict."""
        return frame("runs", self._public, self.verdict)

    @cached_property
    def attempts(self) -> pd.DataFrame:
        """A row for each attack on a step under a defence.

        Steps whose update comes from another batch have no rows: no number may be told of them.
        """
        return frame("attempts", self._public, self.verdict)

    @cached_property
    def texts(self) -> pd.DataFrame:
        """A row for each true text and each attempt that guessed it."""
        return frame("texts", self._public, self.verdict)

    @cached_property
    def labels(self) -> pd.DataFrame:
        """A row for each attempt to recover the label counts of a step."""
        return frame("labels", self._public, self.verdict)

    @cached_property
    def _public(self) -> Results:
        return public(self.results, self.verdict).results

    def __repr__(self) -> str:
        """Return the verdict and what was audited, on one line."""
        steps = counted(len(self.results.steps), "step")
        return plain(
            f"leakaudit.load({str(self.folder)!r}): {self.verdict.verdict}, {self.results.subject.model}, {steps}"
        )

    def _repr_html_(self) -> str:
        """Return the first screen of the report, for a notebook."""
        return self.verdict._repr_html_()


def load(folder: Path | str, policy: Path | str | None = None) -> LoadedAudit:
    """Read a finished audit.

    Args:
        folder: of the audit, with results.json; or this file itself.
        policy: YAML policy that judges the results now. None reads verdict.json beside the results; where there is none on these results, the
            built-in policy judges, as in `leakaudit gate FOLDER`.

    Returns:
        The audit. Nothing in the folder is changed.

    Raises:
        ResultsError: the results cannot be read, or were changed after they were written.
        ConfigError: the policy is wrong.
    """
    path = Path(folder)
    results, sha256 = read_results(path)
    home = path if path.is_dir() else path.parent
    verdict = None if policy is not None else _written(home / "verdict.json", sha256)
    if verdict is None:
        verdict = _judged(results, sha256, None if policy is None else Path(policy))
    return LoadedAudit(home, ShownResults.of(results, verdict), ShownVerdict.of(results, verdict))


def _written(file: Path, sha256: str) -> Verdict | None:
    """Return the verdict of a file; None if it is not about these results."""
    try:
        verdict = Verdict.model_validate_json(read_bounded(file))
    except (OSError, ValueError):
        return None
    return verdict if verdict.results_sha256 == sha256 else None


def _judged(results: Results, sha256: str, policy_file: Path | None) -> Verdict:
    files = PolicyFiles(policy_file)
    policy = files.load_policy(names_for(results))
    return evaluate(
        results,
        policy,
        now=datetime.now(UTC),
        results_sha256=sha256,
        waivers=files.load_waivers(policy),
        reference=reference_for(results, policy, policy_file),
    )
