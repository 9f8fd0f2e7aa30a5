"""The experiment trackers of a training run; each gets numbers in its own way.

A tracker is recognised by what it offers: the writer of TensorBoard has `add_scalar`, a run of W&B has `define_metric`, and so on. No tracker
is imported here. Only numbers are sent, under names of attacks and metrics, and the masked report if the user asks for it (`trackers: report`).
"""

from __future__ import annotations

import functools
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from leakaudit.capture.boundary import from_signal_handler
from leakaudit.errors import type_and_place
from leakaudit.results.schema import TrackerRun

logger = logging.getLogger(__name__)

T = TypeVar("T")

PREFIX = "leakaudit/"
STEP = "leakaudit/step"
"""Name of the number of the audited step, beside the numbers of a tracker whose points may not go back."""

REPORT = "leakaudit-report"
"""Name and type of the report, where a tracker has artefacts."""


class Tracker(ABC):
    """One run of one tracker."""

    @abstractmethod
    def facts(self) -> TrackerRun | None:
        """Return kind, id, name and address of the run; None if nothing is known."""

    @abstractmethod
    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers at an audited step."""

    def end(self) -> None:  # noqa: B027 # most trackers write by themselves
        """Write what is left, if the trainer has closed the run already."""


class ReportTracker(Tracker):
    """A run of a tracker that keeps files in private beside its numbers."""

    @abstractmethod
    def keep(self, report: Path) -> None:
        """Keep a report as an artefact of the run."""


@dataclass(frozen=True)
class TensorBoardWriter(Tracker):
    """A `SummaryWriter`, whose points have a `global_step`."""

    writer: Any

    def facts(self) -> TrackerRun:
        """Return the kind; a run is a folder, whose name may be the host's."""
        return TrackerRun(kind="TensorBoard")

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers at an audited step."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, global_step=step)
        self.writer.flush()


@dataclass(frozen=True)
class WandbRun(ReportTracker):
    """A run of W&B, whose own steps never go back; ours are on another axis."""

    run: Any
    defined: set[str] = field(default_factory=set)
    """Names of numbers whose axis is set. A pattern would not do: the trainer's own, `*`, comes first."""

    def facts(self) -> TrackerRun:
        """Return the run; it has no address offline."""
        return TrackerRun(
            kind="W&B", id=_text(self.run, "id"), name=_text(self.run, "name"), url=shown_url(_text(self.run, "url"))
        )

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers beside the audited step, which is their axis."""
        if not self.defined:
            self.run.define_metric(STEP, hidden=True)
        for name in sorted(numbers.keys() - self.defined):
            self.run.define_metric(name, step_metric=STEP)
            self.defined.add(name)
        self.run.log({**numbers, STEP: step})

    def keep(self, report: Path) -> None:
        """Keep a report as an artefact of the run."""
        self.run.log_artifact(str(report), name=f"{REPORT}-{_text(self.run, 'id')}", type=REPORT)


@dataclass(frozen=True)
class MlflowRun(ReportTracker):
    """A run of MLflow; its client also logs to a run that has ended."""

    client: Any
    run_id: str

    def facts(self) -> TrackerRun:
        """Return the run; it has an address if a server has it."""
        info = self.client.get_run(self.run_id).info
        base = str(getattr(self.client, "tracking_uri", "") or "")
        page = f"{base.rstrip('/')}/#/experiments/{info.experiment_id}/runs/{self.run_id}"
        url = shown_url(page) if base.startswith(("http://", "https://")) else ""
        return TrackerRun(kind="MLflow", id=self.run_id, name=_text(info, "run_name"), url=url)

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers at an audited step, in one request that training does not wait for."""
        metric = import_module(type(self.client).__module__.partition(".")[0] + ".entities").Metric
        now = int(time.time() * 1000)
        batch = [metric(name, float(value), now, step) for name, value in numbers.items()]
        quick = {"synchronous": False} if "synchronous" in signature(self.client.log_batch).parameters else {}
        self.client.log_batch(self.run_id, metrics=batch, **quick)

    def keep(self, report: Path) -> None:
        """Keep a report as an artefact of the run."""
        self.client.log_artifact(self.run_id, str(report), REPORT)


@dataclass(frozen=True)
class TrackioRun(Tracker):
    """A run of Trackio, which takes steps in any order."""

    run: Any
    current: Callable[[], Any]
    """Returns the run that the trainer logs to now; None after it was finished."""

    def facts(self) -> TrackerRun:
        """Return the run; it has an address if a server has it."""
        url = _text(self.run, "url")
        return TrackerRun(
            kind="Trackio",
            id=_text(self.run, "id"),
            name=_text(self.run, "name"),
            url=shown_url(url) if url.startswith(("http://", "https://")) else "",
        )

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers at an audited step."""
        self.run.log(dict(numbers), step=step)

    def end(self) -> None:
        """Write the numbers that came after the trainer had finished the run."""
        if self.current() is not self.run:
            self.run.finish()


@dataclass(frozen=True)
class OtherLogger(Tracker):
    """A logger that nothing is known of: it gets the step as a number, too."""

    log: Callable[[int, dict[str, float]], object]

    def facts(self) -> None:
        """Return nothing."""

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers beside the audited step."""
        self.log(step, {STEP: step, **numbers})


# ---------------------------------------------------------------------- recognising


def tracker_of(offered: Any, run_id: str | None = None) -> Tracker | None:
    """Return the tracker that an object is, or holds the current run of.

    Args:
        offered: a writer, a run, a client, or the module of a tracker.
        run_id: of a run of MLflow, whose client has many.
    """
    try:
        return _tracker_of(offered, run_id)
    except Exception as error:
        if from_signal_handler(error):
            raise
        return None


def _tracker_of(offered: Any, run_id: str | None) -> Tracker | None:
    if offered is None or isinstance(offered, type | str | int | float | Mapping | list | tuple):
        return None
    if _offers(offered, "add_scalar", "flush"):
        return TensorBoardWriter(offered)
    if (now := getattr(getattr(offered, "context_vars", None), "current_run", None)) is not None:
        return TrackioRun(run, now.get) if (run := now.get()) is not None else None
    if _offers(offered, "define_metric", "log", "log_artifact"):
        run = getattr(offered, "run", offered)  # the module of W&B holds its run, a run holds none
        return WandbRun(run) if run is not None else None
    if _offers(offered, "active_run", "MlflowClient"):
        active = offered.active_run()
        return MlflowRun(offered.MlflowClient(), active.info.run_id) if active is not None else None
    if run_id is not None and _offers(offered, "log_batch", "log_artifact", "get_run"):
        return MlflowRun(offered, run_id)
    return None


def trackers_behind(log: Callable[..., object]) -> list[Tracker]:
    """Return where the numbers go that a loop of the user's gives to its log.

    The `log` of an `Accelerator` belongs to an object with a list of trackers, each with `log(values, step)`. A tracker of a known kind gets
    points in its own way, and another one gets them by its `log` at the audited step. Any other log gets numbers without a step, because the
    axis of what stands behind it is unknown.

    Args:
        log: called with finished numbers.
    """
    theirs = getattr(getattr(log, "__self__", None), "trackers", None)
    if not isinstance(theirs, list | tuple):
        return [OtherLogger(lambda _step, numbers: log(numbers))]
    if not theirs:  # they may be made later
        return [OtherLogger(lambda step, numbers: log(numbers, step=step))]
    return [_held_tracker(one) or OtherLogger(functools.partial(_logged_at, one)) for one in theirs]


def _held_tracker(holder: Any) -> Tracker | None:
    """Return what a tracker of Accelerate is built around, if that is known."""
    try:
        return tracker_of(holder.tracker)
    except Exception as error:  # `tracker` is a property, and may be the user's
        if from_signal_handler(error):
            raise
        return None


def _logged_at(holder: Any, step: int, numbers: Mapping[str, float]) -> None:
    holder.log(dict(numbers), step=step)


def tracker_in(holder: object) -> Tracker | None:
    """Return the first tracker among the attributes of an object."""
    return next((found for value in vars(holder).values() if (found := tracker_of(value)) is not None), None)


def _offers(candidate: Any, *names: str) -> bool:
    return all(callable(getattr(candidate, name, None)) for name in names)


def _text(holder: Any, name: str) -> str:
    value = getattr(holder, name, None)
    return value[:MOST_CHARACTERS] if isinstance(value, str) else ""


MOST_CHARACTERS = 500
"""Most characters of a name or an address that results keep. Our choice: addresses of trackers have about 100."""


def shown_url(url: str) -> str:
    """Return an address without a password and without a query.

    >>> shown_url("https://ann:secret@host:5000/a?token=1#/runs/7")
    'https://host:5000/a#/runs/7'
    """
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", parts.fragment))


def name_of(attack: str, metric: str) -> str:
    """Return the name of a number, of characters that every tracker takes.

    >>> name_of("tag(steps=300)", "rouge1")
    'leakaudit/tag_steps_300/rouge1'
    """
    return PREFIX + "/".join(re.sub(r"[^A-Za-z0-9.-]+", "_", part).strip("_") for part in (attack, metric))


# ---------------------------------------------------------------------- all of a run


@dataclass
class Trackers:
    """The trackers of one training run; one that fails gets nothing more."""

    all: list[Tracker]

    @classmethod
    def of(cls, found: Iterable[Tracker | None]) -> Trackers:
        """Return the trackers, each run once."""
        distinct: list[Tracker] = []
        for one in found:
            if one is not None and not any(_same(one, other) for other in distinct):
                distinct.append(one)
        return cls(distinct)

    def facts(self) -> tuple[TrackerRun, ...]:
        """Return what each tracker calls this run, as far as it is known."""
        return tuple(run for one in list(self.all) if (run := self._contained(one.facts, one)) is not None)

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers at an audited step, in every tracker."""
        for one in list(self.all):
            self._contained(functools.partial(one.send, step, numbers), one)

    def keep(self, report: Path) -> int:
        """Keep a report as an artefact; return how many trackers have it now."""
        keepers = [one for one in self.all if isinstance(one, ReportTracker)]
        for one in keepers:
            self._contained(functools.partial(one.keep, report), one)
        return len([one for one in keepers if one in self.all])

    def end(self) -> None:
        """Write what is left, where the trainer has closed a run already."""
        for one in list(self.all):
            self._contained(one.end, one)

    def _contained(self, call: Callable[[], T], one: Tracker) -> T | None:
        """Return what a call returns; a tracker that fails is left out from now on."""
        try:
            return call()
        except Exception as error:
            if from_signal_handler(error):
                raise
            self.all.remove(one)
            logger.warning(
                "leakaudit sends nothing more to a tracker of this run (%s): it raised %s",
                type(one).__name__,
                type_and_place(error),
            )
            return None


def _same(one: Tracker, other: Tracker) -> bool:
    """Return whether two trackers log to the same run."""
    if type(one) is not type(other):
        return False
    keys = [getattr(t, "run_id", None) or id(getattr(t, "run", None) or getattr(t, "writer", t)) for t in (one, other)]
    return keys[0] == keys[1]
