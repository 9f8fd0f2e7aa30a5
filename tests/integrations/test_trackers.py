"""Trackers get the audit's numbers at the audited step; each is asked offline.

Every training has three audited steps. The trackers are the real packages, whose files are read back with their own readers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.results.files import load_results
from tests.support import stacks, tiny, tiny_trainer

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

NUMBER = "leakaudit/span/exact"


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give every tracker a folder of its own, and no server."""
    settings = {
        "TENSORBOARD_LOGGING_DIR": tmp_path / "board",
        "WANDB_MODE": "offline",
        "WANDB_DIR": tmp_path,
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "TRACKIO_DIR": tmp_path / "trackio",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    yield
    if mlflow := __import__("sys").modules.get("mlflow"):
        mlflow.set_tracking_uri(None)


def trained(tmp_path: Path, report_to: str, **config: Any) -> Path:
    """Train three steps with a tracker of `report_to`; return the folder of the audit."""
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path, **config))
    trainer = tiny_trainer.make_trainer(
        tmp_path,
        audit,
        max_steps=3,
        report_to=report_to,
        logging_strategy="steps",
        logging_steps=1,
        run_name="night one",
    )
    audit.attach(trainer)
    trainer.train()
    assert audit.folder is not None
    return audit.folder


def test_tensorboard(tmp_path: Path) -> None:
    """A point of each audited step stands at that step, beside the loss."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trained(tmp_path, "tensorboard")
    board = events.EventAccumulator(str(tmp_path / "board")).Reload()
    assert [point.step for point in board.Scalars(NUMBER)] == [0, 1, 2]
    assert "train/loss" in board.Tags()["scalars"]
    assert not [tag for tag in board.Tags()["scalars"] if tag.startswith("train/leakaudit")]


def test_wandb(tmp_path: Path) -> None:
    """The axis of our numbers is the audited step.

    The masked report is an artefact where it is asked for.
    """
    wandb = pytest.importorskip("wandb")
    folder = trained(tmp_path, "wandb", trackers="report")
    (tracker,) = load_results(folder).run.trackers
    assert (tracker.kind, tracker.name, tracker.url) == ("W&B", "night one", "")
    wandb.finish()
    wandb.teardown()  # waits for the process that writes the file
    records = list(_records_of_wandb(tmp_path))
    axes = {one.metric.name: one.metric.step_metric for one in records if one.WhichOneof("record_type") == "metric"}
    assert axes[NUMBER] == "leakaudit/step"
    rows = [_row(one.history) for one in records if one.WhichOneof("record_type") == "history"]
    assert [row["leakaudit/step"] for row in rows if NUMBER in row] == [0, 1, 2]
    assert any(one.request.WhichOneof("request_type") == "log_artifact" or one.HasField("artifact") for one in records)


def test_mlflow(tmp_path: Path) -> None:
    """Points stand at the audited step, also those after the trainer ended the run.

    The report is an artefact.
    """
    mlflow = pytest.importorskip("mlflow")
    folder = trained(tmp_path, "mlflow", trackers="report")
    mlflow.flush_async_logging()
    (tracker,) = load_results(folder).run.trackers
    client = mlflow.MlflowClient()
    assert (tracker.kind, tracker.name) == ("MLflow", "night one")
    assert [point.step for point in client.get_metric_history(tracker.id, NUMBER)] == [0, 1, 2]
    assert client.get_metric_history(tracker.id, "loss") or client.get_metric_history(tracker.id, "train/loss")
    assert [one.path for one in client.list_artifacts(tracker.id, "leakaudit-report")] == [
        "leakaudit-report/report.html"
    ]


def test_trackio(tmp_path: Path) -> None:
    """Points stand at the audited step, also those after the trainer finished the run."""
    trackio = pytest.importorskip("trackio")
    folder = trained(tmp_path, "trackio")
    (tracker,) = load_results(folder).run.trackers
    assert (tracker.kind, tracker.name) == ("Trackio", "night one")
    rows = _rows_of_trackio(trackio, tracker.name)
    assert sorted(row["step"] for row in rows if NUMBER in row) == [0, 1, 2]


def test_nothing_goes_out_with_trackers_false(tmp_path: Path) -> None:
    """Of the audit the event file holds nothing; of the training it holds the loss."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trained(tmp_path, "tensorboard", trackers=False)
    tags = events.EventAccumulator(str(tmp_path / "board")).Reload().Tags()["scalars"]
    assert "train/loss" in tags and not [tag for tag in tags if "leakaudit" in tag]


def _records_of_wandb(folder: Path) -> Iterator[Any]:
    """Yield the records of the one run of W&B that was kept in a folder.

    The file is a log of LevelDB: blocks of 32 KiB, of parts with a checksum, a length and a kind (1 whole, 2 first, 3 middle, 4 last).
    """
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def _row(history: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}


def _rows_of_trackio(trackio: Any, run: str) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    (project,) = SQLiteStorage.get_projects()
    return list(SQLiteStorage.get_logs(project, run))


def _fitted(tmp_path: Path, loggers: list[Any]) -> Path:
    """Fit three steps under Lightning; return the folder of the audit."""
    import lightning.pytorch as pl
    import torch

    from leakaudit.callbacks.lightning_trainer import LeakAuditCallback as OfLightning

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.bert(dropout=0.1).train()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    audit = OfLightning(tiny_trainer.audit_config(tmp_path), tokenizer=tiny.bert_tokenizer())
    rows: Any = stacks.classes(count=3)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=1, collate_fn=lambda picked: dict(picked[0]))
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=loggers,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[audit],
    ).fit(Module(), loader)
    assert audit.folder is not None
    return audit.folder


def test_loggers_of_lightning(tmp_path: Path) -> None:
    """TensorBoard, W&B, MLflow and a file of CSV beside each other.

    All have the audited steps.
    """
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    wandb, mlflow = pytest.importorskip("wandb"), pytest.importorskip("mlflow")
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

    made: list[Callable[[], Any]] = [
        lambda: TensorBoardLogger(tmp_path, "board", version=1),
        lambda: WandbLogger(save_dir=tmp_path, project="p", offline=True),
        lambda: MLFlowLogger("e", tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}"),
        lambda: CSVLogger(tmp_path, "csv", version=1),
    ]
    loggers = [make() for make in made]
    folder = _fitted(tmp_path, loggers)
    wandb.finish()
    wandb.teardown()  # waits for the process that writes the file
    board = events.EventAccumulator(str(tmp_path / "board" / "version_1")).Reload()
    assert [point.step for point in board.Scalars(NUMBER)] == [0, 1, 2]
    rows = [_row(one.history) for one in _records_of_wandb(tmp_path) if one.WhichOneof("record_type") == "history"]
    assert [row["leakaudit/step"] for row in rows if NUMBER in row] == [0, 1, 2]
    mlflow.flush_async_logging()
    run_id = loggers[2].run_id
    assert [point.step for point in loggers[2].experiment.get_metric_history(run_id, NUMBER)] == [0, 1, 2]
    lines = (tmp_path / "csv" / "version_1" / "metrics.csv").read_text().splitlines()
    columns = lines[0].split(",")
    steps = [line.split(",")[columns.index("step")] for line in lines[1:] if line.split(",")[columns.index(NUMBER)]]
    assert steps == ["0", "1", "2"]
    assert [one.kind for one in load_results(folder).run.trackers] == ["TensorBoard", "W&B", "MLflow"]
