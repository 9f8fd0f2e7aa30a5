"""One night, from its lock to its record."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakaudit.cli.auditing import run_audit
from leakaudit.cli.common import say
from leakaudit.cli.nights.notify import notify
from leakaudit.cli.nights.steps import TRAINING, NightSteps, seed_of, steps_of_night
from leakaudit.cli.stopping import Stopped, exit_code, seconds_to_work, stop_on_signals, time_is_up
from leakaudit.config.duration import length_of
from leakaudit.errors import BudgetError, LeakAuditError, ResultsError, SpoolBusyError
from leakaudit.exit_codes import ExitCode
from leakaudit.files.regular_files import read_regular
from leakaudit.gate.early import decided
from leakaudit.gate.origin import origin_of
from leakaudit.gate.policy import Policy, default_policy, load_policy
from leakaudit.gate.verdict import Verdict
from leakaudit.gate.wording import at_least, at_most
from leakaudit.history.baseline import SavedBaseline
from leakaudit.history.baseline import load as load_baseline
from leakaudit.history.compare import compare
from leakaudit.history.keys import keys_of
from leakaudit.history.nights import HISTORY, NIGHTS, History
from leakaudit.history.rates import rates_of, repeated_steps
from leakaudit.history.record import NightRecord, as_of
from leakaudit.history.saved_trend import SavedTrend, save_trend
from leakaudit.history.trend import id_of, is_worse, time_of, why_not_compared, with_sequences
from leakaudit.results.files import load_results, read_results
from leakaudit.results.wording import counted

if TYPE_CHECKING:
    from leakaudit.audit.audit import Audit
    from leakaudit.config.audit import AuditConfig
    from leakaudit.config.nightly import Nightly
    from leakaudit.results.schema import Results


@dataclass
class Night:
    """The night of one period."""

    config: Nightly
    now: datetime
    """When it begins, with time zone."""
    began: float = field(default_factory=time.monotonic)
    """The same on a clock that no change of the time moves."""
    line: str = ""
    """The night in one line, after `run`."""
    document: dict[str, Any] = field(default_factory=dict)
    """The night as `notify_command` and `--json` give it, after `run`."""

    def __post_init__(self) -> None:
        """Find the name and the folder of the night."""
        self.id = period_of(self.now, length_of(self.config.every))
        self.folder = self.config.folder / NIGHTS / self.id
        self.policy = _policy(self.config)

    def run(self) -> int:
        """Run what the night lacks, and return the exit code.

        Raises:
            SpoolBusyError: another process runs a night in the same folder.
            ResultsError: the history or the baseline cannot be used, or the clock went back.
            ConfigError: the policy is wrong.
        """
        with _only_one(self.config.folder):
            history = History.load(self.config.folder / HISTORY)
            for bad in history.unreadable:
                say(f"warning: {bad.problem}")
            if problem := history.unreadable_of(self.id):
                raise ResultsError(f"the night {self.id} cannot be run: {problem}")
            if (known := history.of(self.id)) is not None and known.status == "audited":
                say(
                    f"the night {self.id} is complete; the next one begins at {self._next()} (`--at {self._next()}` runs it now)"
                )
                known = as_of(known, self.policy.evidence.max_age, datetime.now(UTC))
                self._tell(known)
                return int(known.exit_code)
            if history.last is not None and history.last.night > self.id:
                raise ResultsError(
                    f"the clock says {self.id}, and the last night is {history.last.night}: has the clock gone back? Nothing was run or changed; if "
                    f"the clock was wrong then, move {history.folder / history.last.night}.json aside"
                )
            baseline = load_baseline(self.config.baseline)
            history = self._record_unfinished(history)
            self._purge()
            return self._run(history, baseline)

    def _run(self, history: History, baseline: SavedBaseline | None) -> int:
        """Audit, compare, judge, report, record and notify."""
        from leakaudit.audit.battery import battery_of

        battery_of(self._audit_config())  # refuses a wrong name of an attack or defence before anything is written
        before = history.last
        if self.folder.exists():
            say(f"the night {self.id} was begun before: it goes on")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = history.key()
        origin = origin_of(self.policy, self.config.folder, data=self.config.data_name)  # before the night's training
        stage = "the steps could not be made"
        limit = length_of(self.config.budget).total_seconds()
        try:
            with stop_on_signals(limit) as stop:
                night = steps_of_night(self.config, self.id, self.folder, key, self.began + seconds_to_work(limit))
                stage = "the audit could not be made"
                ends = _Ends(self.policy, self.config.stop_when_decided, len(night.steps.numbers))
                if not _is_complete(self.folder):
                    steps = replace(night.steps, origin=origin)
                    _, stopped = run_audit(self._audit_config(), steps, stop, None, "leakaudit nightly", ends)
                    if stopped is not None:
                        say(f"the night {self.id} is not complete; the next start goes on with it")
                        return exit_code(stopped)
                stop.finish()
                record = self._judged(history, baseline, night, ends)
        except Stopped as early:
            if time_is_up(early):
                return self._failed(
                    history, stage, BudgetError("the budget of the night ended before its first attempt")
                )
            say(f"the night {self.id} was stopped before its audit; the next start goes on with it")
            return exit_code(early)
        except (LeakAuditError, OSError) as error:
            return self._failed(history, stage, error)
        except Exception as error:
            return self._failed(history, stage, error)
        history.append(record)
        shutil.rmtree(self.folder / TRAINING, ignore_errors=True)
        self._tell(record)
        notify(self.config, self.document, before)
        return int(record.exit_code)

    def _judged(self, history: History, baseline: SavedBaseline | None, night: NightSteps, ends: _Ends) -> NightRecord:
        """Return the record of the audited night; its report gets the trend."""
        from leakaudit.reports.page import write_report

        results, sha256 = read_results(self.folder)
        verdict = Verdict.model_validate_json(read_regular(self.folder / "verdict.json"))
        keys = keys_of(results, self.policy, night.data)
        counts = None if baseline is None else baseline.counts()
        rates = with_sequences(
            rates_of(results, self.policy, history.units), keys, history.records, self.policy.nights, counts
        )
        worse = is_worse(rates, self.policy.nights)
        code = int(verdict.exit_code)
        if worse and self.policy.nights.level == "error" and code in (ExitCode.PASS, ExitCode.INCONCLUSIVE):
            code = int(ExitCode.FAIL)
        not_compared = why_not_compared(counts, keys)
        record = NightRecord(
            night=self.id,
            status="audited",
            started=_stamp(self.now),
            finished=_stamp(datetime.now(UTC)),
            exit_code=code,
            verdict=verdict.verdict,
            sentence=verdict.sentence,
            run=results.run.id,
            results_sha256=sha256,
            tool=results.run.tool,
            keys=keys,
            model_version=night.model_version,
            steps=len(results.steps),
            planned=len(night.steps.numbers),
            repeated=repeated_steps(results, history.units),
            saved=ends.said,
            seconds=round(time.monotonic() - self.began, 1),
            baseline="" if not_compared or counts is None else counts.run,
            since_last=self._since_last(results, history),
            worse=worse,
            rates=rates,
            units=tuple(step.unit for step in results.steps if step.unit),
        )
        earlier = (one for one in history.records if one.night != self.id)  # a start without results may have a record
        shown = (*earlier, record)[-self.config.last :]
        period = length_of(self.config.every).total_seconds()
        saved = SavedTrend(
            records=shown,
            period_s=period,
            confidence=self.policy.nights.confidence,
            prior=self.policy.nights.prior,
            not_compared=not_compared,
        )
        save_trend(saved, self.folder)
        write_report(self.folder, self.config.text_mode, now=self.now, policy=self.policy, verdict=verdict)
        return record

    def _since_last(self, results: Results, history: History) -> str:
        """Return how the first event differs from the night before, in a sentence."""
        last = next((record for record in reversed(history.records) if record.status == "audited"), None)
        if last is None:
            return ""
        try:
            before = load_results(self.config.folder / NIGHTS / last.night)
        except ResultsError:
            return "The results of the night before are removed."
        found = compare(
            before, results, self.policy, keys=(last.keys, keys_of(results, self.policy, last.keys.get("data", "")))
        )
        if found.refused:
            return found.refused
        return next((f"{one.event}: {one.answer}. {one.sentence}" for one in found.differences), "")

    def _failed(self, history: History, stage: str, error: Exception) -> int:
        """Record that the night could not run; a later start of it tries again."""
        from leakaudit.errors import type_and_place

        ours = isinstance(error, LeakAuditError | OSError)
        say(f"error: {stage}: {error if ours else type_and_place(error)}")
        reason = f"{stage}: {_without_places(error) if ours else type_and_place(error)}"
        self._gap(history, self.id, reason, notified=True)
        return int(ExitCode.ERROR)

    def _gap(self, history: History, night: str, reason: str, *, notified: bool = False) -> History:
        record = NightRecord(
            night=night,
            status="gap",
            reason=reason,
            started=_stamp(self.now),
            finished=_stamp(datetime.now(UTC)),
            exit_code=int(ExitCode.ERROR),
            seconds=round(time.monotonic() - self.began, 1),
        )
        before = history.last
        history = history.append(record)
        if notified:
            self._tell(record)
            notify(self.config, self.document, before)
        return history

    def _record_unfinished(self, history: History) -> History:
        """Record earlier nights that were begun and never recorded as gaps."""
        folders = self.config.folder / NIGHTS
        begun = sorted(path.name for path in folders.iterdir()) if folders.is_dir() else []
        for name in begun:
            with contextlib.suppress(ValueError):
                if time_of(name) < time_of(self.id) and history.of(name) is None and not history.unreadable_of(name):
                    say(f"the night {name} was never finished: it is a gap in the history")
                    history = self._gap(history, name, "it was stopped before its end, and the next night began")
        return history

    def _purge(self) -> None:
        """Remove the folders of nights that are older than the configuration keeps."""
        folders = self.config.folder / NIGHTS
        oldest = min(self.now, datetime.now(UTC)) - length_of(self.config.keep)
        for path in sorted(folders.iterdir()) if folders.is_dir() else []:
            with contextlib.suppress(ValueError):
                if time_of(path.name) < oldest and path.name != self.id:
                    shutil.rmtree(path, ignore_errors=True)
                    say(f"removed the results of the night {path.name}, older than {self.config.keep}")

    def _audit_config(self) -> AuditConfig:
        """Return the configuration of the night's audit."""
        from leakaudit.config.audit import AuditConfig

        own = self.config
        return AuditConfig(
            out_dir=self.folder,
            attacks=own.attacks,
            defenses=own.defenses,
            budget_s=own.budget_s,
            seed=seed_of(self.id),
            controls=own.controls,
            text=own.text_mode,
            policy=own.policy,
            data_name=own.data_name,
            device=own.device,
            sentence_model=own.sentence_model,
        )

    def _tell(self, record: NightRecord) -> None:
        """Set what the command prints and gives to others."""
        shown = record.model_dump(mode="json", by_alias=True, exclude={"units"})
        self.document = {**shown, "report": str((self.folder / "report.html").absolute())}
        self.line = in_one_line(record, self.folder / "report.html")

    def _next(self) -> str:
        return id_of(time_of(self.id) + length_of(self.config.every))


@dataclass
class _Ends:
    """Ends the audit of a night before all steps are audited, and says so."""

    policy: Policy
    when_decided: bool
    planned: int
    said: str = ""
    """What the night did not do, in a sentence; empty if it did everything."""

    def enough(self, audit: Audit) -> str:
        """Return why no further attempt is needed; empty if one is."""
        if not self.when_decided or (audit.audited >= self.planned and not audit.battery.slow):
            return ""
        status = decided(audit.results_so_far(), self.policy, now=datetime.now(UTC))
        if status is None:
            return ""
        return self._end(audit, f"the policy was decided ({status})")

    def out_of_time(self, audit: Audit) -> str:
        """Close what is left, because the budget of the night is used up."""
        return self._end(audit, "the budget of the night was used up")

    def _end(self, audit: Audit, why: str) -> str:
        attempts, steps = audit.leave_out(why), self.planned - audit.audited
        left = [counted(number, what) for number, what in ((steps, "step"), (attempts, "attempt")) if number]
        if left:
            self.said = f"{' and '.join(left)} left out: {why}."
            say(self.said)
        return why


def period_of(now: datetime, every: timedelta) -> str:
    """Return the id of the period that holds a time, counted from 1970 in UTC.

    >>> period_of(datetime(2026, 11, 25, 3, 30, tzinfo=UTC), timedelta(days=1))
    '2026-11-25T0000Z'
    """
    start = datetime(1970, 1, 1, tzinfo=UTC)
    return id_of(start + (now.astimezone(UTC) - start) // every * every)


def _without_places(error: Exception) -> str:
    """Return what went wrong without a path or a name, which its message may hold."""
    if reason := getattr(error, "reason", ""):
        return str(reason)
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    said = (type(error).__doc__ or type(error).__name__).splitlines()[0].rstrip(".")
    return said[0].lower() + said[1:]


def _policy(config: Nightly) -> Policy:
    from leakaudit.plugins.names import registered_names

    return default_policy() if config.policy is None else load_policy(config.policy, registered_names())


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the lock of the nights' folder.

    Raises:
        SpoolBusyError: another process holds it.
        ResultsError: the folder cannot be made.
    """
    from leakaudit.storage.locks import try_lock

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ResultsError(f"{folder}: the folder of the nights cannot be used ({error.strerror})") from None
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            if not try_lock(descriptor):
                raise SpoolBusyError(f"{folder}: another process runs a night there; wait until it ends")
        yield
    finally:
        os.close(descriptor)


def _is_complete(folder: Path) -> bool:
    """Return whether an earlier start of the night has finished its audit."""
    from leakaudit.audit.state import is_finished

    return is_finished(folder) and (folder / "verdict.json").is_file()


def in_one_line(record: NightRecord, report: Path) -> str:
    """Return a night in one line."""
    if record.status == "gap":
        return f"{record.night} ERROR: {record.reason}"
    first = next((rate for rate in record.rates if rate.n), None)
    seen = f"{first.event} {first.k}/{first.n}" if first else "no step could be judged"
    bound = ""
    if first is not None and first.upper is not None and first.lower is not None and first.so_far is not None:
        leaks, steps = first.so_far
        least = f"{at_least(first.lower)} to " if leaks else "at most "
        bound = f"; leak rate {least}{at_most(first.upper)} over {counted(steps, 'step')}, however often you look"
    worse = "; worse than the baseline" if record.worse else ""
    return f"{record.night} {record.verdict}: {seen}{bound}{worse}; {report}"


def _stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
