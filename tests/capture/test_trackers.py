"""Trackers get numbers in their own way.

Stubs here have the interfaces of the real ones.

The real packages are asked in `tests/integrations/test_trackers.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from leakaudit.capture.results_log import ResultsLog, numbers_of
from leakaudit.capture.trackers import (
    MlflowRun,
    OtherLogger,
    TensorBoardWriter,
    Trackers,
    TrackioRun,
    WandbRun,
    shown_url,
    tracker_in,
    tracker_of,
)
from leakaudit.config.audit import AuditConfig
from leakaudit.results.journal import JournalEntry
from leakaudit.results.schema import Missing, Score, TextMode, TrackerRun
from tests.support.factories import attempt

NUMBERS = {"leakaudit/span/exact": 0.5}


@dataclass
class Writer:
    """The interface of a `SummaryWriter`."""

    points: list[tuple[str, float, int]] = field(default_factory=list)

    def add_scalar(self, name: str, value: float, global_step: int) -> None:
        self.points.append((name, value, global_step))

    def flush(self) -> None:
        pass


@dataclass
class Wandb:
    """The interface of a run of W&B."""

    id: str = "a1b2"
    name: str = "sunny-sky-3"
    url: str | None = "https://ann:key@wandb.example/team/runs/a1b2"
    axes: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    files: list[tuple[str, str]] = field(default_factory=list)

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool = False) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def log_artifact(self, path: str, name: str, type: str) -> None:
        self.files.append((Path(path).name, name))


@dataclass
class Mlflow:
    """The interface of a client of MLflow."""

    tracking_uri: str = "https://mlflow.example"
    points: list[tuple[str, float, int]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id, run_name="night one", experiment_id="4"))

    def log_batch(self, run_id: str, metrics: Any, synchronous: bool | None = None) -> None:
        assert run_id == "r7" and synchronous is False
        self.points += [(m.key, m.value, m.step) for m in metrics]

    def log_artifact(self, run_id: str, path: str, folder: str) -> None:
        self.files.append(f"{folder}/{Path(path).name}")


@pytest.fixture(autouse=True)
def _entities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the stub's package the class that holds a point."""
    module: Any = ModuleType("tests.entities")
    module.Metric = lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)
    monkeypatch.setitem(sys.modules, "tests.entities", module)


def test_each_tracker_is_known_by_what_it_offers() -> None:
    """A writer, a run and the modules that hold one.

    A class, a setting and a module without a run are none.
    """
    run = SimpleNamespace(log=print, finish=print)
    held = SimpleNamespace(context_vars=SimpleNamespace(current_run=SimpleNamespace(get=lambda: run)))
    module = SimpleNamespace(define_metric=print, log=print, log_artifact=print, run=Wandb())
    active = SimpleNamespace(info=SimpleNamespace(run_id="r7"))
    flow = SimpleNamespace(active_run=lambda: active, MlflowClient=Mlflow)
    several: list[Any] = [Writer(), Wandb(), module, flow, held]
    kinds = [type(tracker_of(one)) for one in several]
    assert kinds == [TensorBoardWriter, WandbRun, WandbRun, MlflowRun, TrackioRun]
    assert isinstance(tracker_of(Mlflow(), "r7"), MlflowRun)
    module.run = None
    flow.active_run = lambda: None
    others: list[Any] = [Writer, Mlflow(), module, flow, "run", None, {}]
    assert [tracker_of(one) for one in others] == [None] * 7


def test_a_tracker_among_the_attributes_of_a_callback_is_found() -> None:
    """The class of the writer stands beside it, and comes first."""
    writer = Writer()
    assert tracker_in(SimpleNamespace(kind=Writer, tb_writer=writer)) == TensorBoardWriter(writer)
    assert tracker_in(SimpleNamespace(model=object())) is None


def test_points_stand_at_the_audited_step_in_each_trackers_way() -> None:
    """Each tracker has a way of its own to place a point."""
    writer, run, client, logged = Writer(), Wandb(), Mlflow(), list[Any]()
    trackio = SimpleNamespace(log=lambda numbers, step: logged.append(("trackio", step)), finish=print)
    other = OtherLogger(lambda step, numbers: logged.append((step, numbers)))
    found = Trackers.of(
        [TensorBoardWriter(writer), WandbRun(run), MlflowRun(client, "r7"), TrackioRun(trackio, lambda: trackio), other]
    )
    found.send(7, NUMBERS)
    found.send(3, NUMBERS)
    assert [step for _, _, step in writer.points] == [step for _, _, step in client.points] == [7, 3]
    assert run.axes == {"leakaudit/step": None, "leakaudit/span/exact": "leakaudit/step"}
    assert [row["leakaudit/step"] for row in run.rows] == [7, 3]
    assert logged[:2] == [("trackio", 7), (7, {"leakaudit/step": 7, **NUMBERS})]


def test_a_tracker_that_fails_gets_nothing_more_and_the_others_do(caplog: pytest.LogCaptureFixture) -> None:
    """One warning with the type of the exception, without its message."""

    class Broken(Writer):
        def flush(self) -> None:
            raise ValueError("the old dog")

    broken, writer = Broken(), Writer()
    found = Trackers.of([TensorBoardWriter(broken), TensorBoardWriter(writer)])
    found.send(0, NUMBERS)
    found.send(1, NUMBERS)
    assert (len(broken.points), len(writer.points)) == (1, 2)
    assert caplog.text.count("ValueError") == 1 and "dog" not in caplog.text


def test_a_run_of_two_callbacks_is_one_tracker() -> None:
    """Two callbacks that hold one run of W&B do not draw each point twice."""
    run = Wandb()
    assert len(Trackers.of([WandbRun(run), WandbRun(run), None, WandbRun(Wandb())]).all) == 2


def test_a_run_that_was_finished_is_written_once_more() -> None:
    """Trackio's run is finished before the audit ends.

    A run that goes on is not touched.
    """
    ended: list[str] = []
    run = SimpleNamespace(log=print, finish=lambda: ended.append("x"))
    Trackers.of([TrackioRun(run, lambda: run)]).end()
    assert ended == []
    Trackers.of([TrackioRun(run, lambda: None)]).end()
    assert ended == ["x"]


def test_a_run_is_named_without_a_password() -> None:
    """Name and address go to the results; a local store has no address."""
    assert WandbRun(Wandb()).facts() == TrackerRun(
        kind="W&B", id="a1b2", name="sunny-sky-3", url="https://wandb.example/team/runs/a1b2"
    )
    assert MlflowRun(Mlflow(), "r7").facts().url == "https://mlflow.example/#/experiments/4/runs/r7"
    assert MlflowRun(Mlflow(tracking_uri="file:///home/ann/mlruns"), "r7").facts().url == ""
    assert shown_url("https://u:p@host/a?token=1") == "https://host/a"


def test_names_have_attack_and_metric() -> None:
    """A metric that an attack did not measure has no number.

    Options make no strange characters.
    """
    scores = {"exact": Score(value=0.5), "rougeL": Score(value=0.7), "token_recall": Missing(missing="none")}
    found = numbers_of([attempt(0, attack="span", scores=scores), attempt(0, attack="tag(steps=3)", scores=scores)])
    assert found == {"leakaudit/span/exact": 0.5, "leakaudit/tag_steps_3/exact": 0.5}


def _log(folder: Path, run: Wandb, **config: Any) -> ResultsLog:
    (folder / "report.html").write_text("<html>")
    entry = JournalEntry(attempt=attempt(0, attack="span", scores={"exact": Score(value=0.5)}))
    (folder / "journal.jsonl").write_text(entry.model_dump_json() + "\n")
    settings = AuditConfig(out_dir=folder, attacks=({"name": "span"},), **config)  # type: ignore[arg-type] # as YAML gives it
    return ResultsLog.of(settings, Trackers.of([WandbRun(run)]))


@pytest.mark.parametrize(
    ("config", "rows", "files"),
    [
        ({}, 1, 0),
        ({"trackers": False}, 0, 0),
        ({"trackers": "report"}, 1, 1),
        ({"trackers": "report", "text": TextMode.FULL, "allow_full": True}, 1, 0),
    ],
    ids=["numbers", "false", "report", "full"],
)
def test_the_configuration_says_what_trackers_get(tmp_path: Path, config: Any, rows: int, files: int) -> None:
    """Numbers by default, nothing, or the report as well.

    Never a report with full text.
    """
    run = Wandb()
    _log(tmp_path, run, **config).finish(report_is_there=True)
    assert (len(run.rows), len(run.files)) == (rows, files)


def test_no_report_of_half_an_audit_is_kept(tmp_path: Path) -> None:
    """While the side process continues alone, the report is still to come."""
    run = Wandb()
    _log(tmp_path, run, trackers="report").finish(report_is_there=False)
    assert (len(run.rows), run.files) == (1, [])
