"""The folder of the nights, and the audits that a command names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

from leakaudit.cli.common import EXISTING, say
from leakaudit.errors import ConfigError, ResultsError

if TYPE_CHECKING:
    from leakaudit.config.nightly import Nightly
    from leakaudit.gate.policy import Policy
    from leakaudit.history.compare import Counted
    from leakaudit.history.nights import History
    from leakaudit.history.record import NightRecord
    from leakaudit.results.schema import Results

P = ParamSpec("P")
R = TypeVar("R")

LAST = "last"
"""Word for the latest night with results."""


def of_nights(command: Callable[P, R]) -> Callable[P, R]:
    """Give a command the options that name the folder of the nights."""
    command = click.option("--folder", type=EXISTING, help="Folder of the nights; wins over --config.")(command)
    return click.option(
        "--config", "config", type=EXISTING, help="YAML of the nights; default: nightly.yaml, if it is here."
    )(command)


@dataclass(frozen=True)
class Nights:
    """The folder of the nights."""

    folder: Path
    history: History
    config: Nightly | None
    """None if the user named the folder only."""

    @property
    def period(self) -> timedelta | None:
        """Time from one night to the next; None if unknown."""
        from leakaudit.config.duration import length_of

        return length_of(self.config.every) if self.config else None


def nights_of(config: Path | None, folder: Path | None) -> Nights | None:
    """Find the nights; None if there are none.

    There are none if no option names them and there is no `nightly.yaml` here. Records that cannot be read are named on stderr.

    Args:
        config: the option --config.
        folder: the option --folder: the folder of the nights, or its history.

    Raises:
        ConfigError: the configuration is wrong, or there is no such folder.
        ResultsError: the history cannot be read, or none of its records.
    """
    from leakaudit.config.nightly import FILE, load_nightly
    from leakaudit.history.nights import HISTORY, History

    nightly = None
    if folder is None:
        if config is None and not Path(FILE).is_file():
            return None
        nightly = load_nightly(config or Path(FILE))
        folder = nightly.folder
    elif not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; name the folder of the nights")
    own = folder / HISTORY
    if not own.is_dir() and folder.name == HISTORY:
        own, folder = folder, folder.parent
    history = History.load(own)
    for bad in history.unreadable:
        say(f"warning: {bad.problem}")
    return Nights(folder, history, nightly)


def needed(nights: Nights | None) -> Nights:
    """Return the nights.

    Raises:
        ConfigError: there are none.
    """
    if nights is None:
        raise ConfigError(
            "nightly.yaml: no such file here; name the configuration with --config, or the folder of the nights with --folder"
        )
    return nights


@dataclass(frozen=True)
class Audited:
    """An audit that a command names."""

    name: str
    """As the user named it."""
    results: Results | None
    """None if they were removed, and only the night's record is left."""
    sha256: str
    """Of results.json."""
    record: NightRecord | None
    """The night's record, if the audit is one of the nights."""

    @property
    def shown(self) -> str:
        """Id of the night, or of the run if the audit is no night."""
        if self.record is not None:
            return self.record.night
        assert self.results is not None  # an audit has results or a record
        return self.results.run.id

    @property
    def data(self) -> str:
        """Name or mark of the data set; empty if unknown."""
        return self.record.keys.get("data", "") if self.record else ""

    def counted(self, policy: Policy) -> Counted:
        """Return the counts of the audit, by a policy where its results are there.

        The comparability keys of a night are those that were recorded.
        """
        from leakaudit.history.compare import Counted
        from leakaudit.history.keys import keys_of
        from leakaudit.history.rates import rates_of

        if self.results is not None:
            keys = self.record.keys if self.record else keys_of(self.results, policy)
            return Counted(self.results.run.id, keys, rates_of(self.results, policy))
        assert self.record is not None  # an audit has results or a record
        return Counted(self.record.run, self.record.keys, self.record.rates)


def audit_of(name: str, nights: Nights | None) -> Audited:
    """Find the audit that an argument names.

    Args:
        name: a folder with results.json, the file itself, the id of a night, or `last`.
        nights: where ids of nights are looked up; None if there are no nights.

    Raises:
        ConfigError: the argument names a night, and there are no nights.
        ResultsError: there is no such audit, or it cannot be read.
    """
    from leakaudit.history.record import NIGHT_PATTERN
    from leakaudit.results.files import read_results

    if name != LAST and not re.match(NIGHT_PATTERN, name):
        path = Path(name)
        if not path.exists():
            raise ResultsError(
                f"{name}: no such folder or file; name an audit's folder, its results.json, a night such as 2026-11-25T0000Z, or {LAST}"
            )
        results, sha256 = read_results(path)
        return Audited(name, results, sha256, _recorded(sha256, nights))
    found = needed(nights)
    record = _night(name, found)
    file = _folder_of(found, record) / "results.json"
    if not file.exists():
        return Audited(name, None, record.results_sha256, record)
    results, sha256 = read_results(file)
    if sha256 != record.results_sha256:
        raise ResultsError(f"{file}: is not what the record of the night names; it was changed after the night")
    return Audited(name, results, sha256, record)


def _folder_of(nights: Nights, record: NightRecord) -> Path:
    from leakaudit.history.nights import NIGHTS

    return nights.folder / NIGHTS / record.night


def _night(name: str, nights: Nights) -> NightRecord:
    history = nights.history
    audited = [record for record in history.records if record.status == "audited"]
    if name == LAST:
        if not audited:
            raise ResultsError(f"{history.folder}: no night has results yet; `leakaudit nightly` runs one")
        return audited[-1]
    record = history.of(name)
    if record is None:
        span = f"; the history has nights from {audited[0].night} to {audited[-1].night}" if audited else ""
        raise ResultsError(history.unreadable_of(name) or f"{name}: no such night in {history.folder}{span}")
    if record.status == "gap":
        raise ResultsError(f"{name}: the night has no results ({record.reason or 'no reason is recorded'})")
    return record


def _recorded(sha256: str, nights: Nights | None) -> NightRecord | None:
    """Return the night whose results these are; None if it is none."""
    if nights is None:
        return None
    return next((record for record in nights.history.records if record.results_sha256 == sha256), None)


def policy_for(path: Path | None, nights: Nights | None, *audits: Audited) -> Policy:
    """Return the named policy, else that of the nights, else the built-in one.

    Raises:
        ConfigError: it is wrong, or names something that neither we nor the audits know.
    """
    from leakaudit.gate.policy import default_policy, load_policy
    from leakaudit.plugins.names import names_for

    path = path or (nights.config.policy if nights and nights.config else None)
    if path is None:
        return default_policy()
    known = [names_for(audit.results) for audit in audits if audit.results is not None]
    if not known or len(known) < len(audits):
        return load_policy(path)  # of a night whose results were removed no names are left to check by
    names = known[0]
    for more in known[1:]:
        names = names | more
    return load_policy(path, names)
