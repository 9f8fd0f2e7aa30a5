"""Files of an audit are for their owner only, and hold nothing private."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leakaudit.capture.worker.process import SideProcess
from leakaudit.models.recipe import ModelRecipe
from leakaudit.results.files import load_results
from leakaudit.storage.encryption import new_identity
from leakaudit.storage.parent_watch import KEY_VARIABLE, PARENT_VARIABLE
from leakaudit.storage.snapshots import read_snapshot
from tests.audit.test_worker import ROOT, make
from tests.support import tiny
from tests.support.endless import ENDLESS
from tests.support.processes import until

CANARIES = ("patient-zero", "grief-counselling", "secret-project-name")


@pytest.fixture(params=[0o022, 0o000])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the umask for this process and its children."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def everything(folder: Path) -> Iterator[Path]:
    """Yield a folder and all that is below it."""
    yield folder
    yield from folder.rglob("*")


def test_every_file_and_folder_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """A whole audit with a kept and a refused snapshot, by a real side process."""
    spool = make(tmp_path, 1, 2, keep_snapshots=True, wait_at_end_s=240.0)
    (spool.snapshot_folder(2) / "truth.safetensors").write_bytes(b"short")
    side = SideProcess(spool)
    side.wait_or_detach()
    side.stop()
    audit = tmp_path / "audit"
    found = {path.relative_to(audit).as_posix(): stat.S_IMODE(path.lstat().st_mode) for path in everything(audit)}
    assert {"spool/tokenizer", "spool/000001.kept", "spool/000002.bad/reason.json", "worker.log", "report.html"} <= set(
        found
    )
    wrong = {name: oct(mode) for name, mode in found.items() if mode != (0o700 if (audit / name).is_dir() else 0o600)}
    assert not wrong


def labelled() -> Any:
    """Return a model with private words in every field that a user may set."""
    model: Any = tiny.bert(num_labels=3)
    config = model.config
    config.id2label = {number: f"{CANARIES[0]}-{number}" for number in range(3)}
    config.label2id = {name: number for number, name in config.id2label.items()}
    config.task_specific_params = {CANARIES[1]: {"max_length": 3}}
    config.custom_key = {CANARIES[1]: [CANARIES[2]]}
    config._name_or_path = f"/home/{CANARIES[2]}"
    config.finetuning_task = CANARIES[2]
    config.architectures = [CANARIES[2]]
    return model


@pytest.mark.parametrize("encrypted", [False, True])
def test_label_names_and_a_users_own_keys_are_in_no_file_at_any_log_level(
    tmp_path: Path, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds at every log level; the model is rebuilt with all its classes."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "debug")
    monkeypatch.setenv("HF_HUB_VERBOSITY", "debug")
    monkeypatch.setenv("HF_DEBUG", "1")
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    more: dict[str, Any] = {"encrypt_to": (new_identity()[0],)} if encrypted else {}
    spool = make(tmp_path, wait_at_end_s=240.0, keep_snapshots=True, text="full", allow_full=True, **more)
    monkeypatch.delenv("CI", raising=False)
    spool.write(1, **parts(labelled()))
    side = SideProcess(spool)
    side.wait_or_detach()
    side.stop()
    assert load_results(tmp_path / "audit").coverage.audited_steps == 1
    assert (tmp_path / "audit" / "worker.log").stat().st_size > 0
    for path in everything(tmp_path / "audit"):
        content = path.read_bytes() if path.is_file() else b""
        assert not [word for word in CANARIES if word.encode() in content or word in path.name], path
    if not encrypted:
        kept = read_snapshot(spool.root / "000001.kept")
        assert kept.observation.model.config.num_labels == 3  # type: ignore[union-attr]


def parts(model: Any) -> dict[str, Any]:
    """Return what `Spool.write` takes."""
    from leakaudit.client.snapshot import Manifest, Provenance
    from leakaudit.models.tensors import state_of

    step = tiny.client_step(model, tiny.bert_tokenizer(), ["the old dog chased a cat ."], [1])
    return {
        "update": step.update(),
        "weights": state_of(model),
        "truth": step.truth,
        "manifest": Manifest(
            model=ModelRecipe.of(model),
            facts=step.facts,
            recipe=step.recipe,
            provenance=Provenance(framework="test", step=1),
        ),
    }


def test_a_configuration_keeps_all_that_its_class_declares() -> None:
    """Only what the user added goes, and the names of classes are counted."""
    found = ModelRecipe.of(labelled()).config
    plain = ModelRecipe.of(tiny.bert(num_labels=3)).config
    assert found == plain
    assert found["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    assert {"vocab_size", "hidden_size", "num_hidden_layers", "hidden_act", "layer_norm_eps"} <= set(found)


def test_parts_of_a_configuration_are_cleaned_too() -> None:
    """A model of several parts has a configuration for each."""
    config: Any = tiny.hf.CLIPConfig()
    config.text_config.custom_key = CANARIES[0]
    config.text_config.id2label = {0: CANARIES[1]}
    from leakaudit.models.recipe import architecture

    assert not [word for word in CANARIES if word in str(architecture(config))]
    assert architecture(config)["text_config"]["hidden_size"] == config.text_config.hidden_size


LOOK = """
import os, resource, sys
from leakaudit.storage.parent_watch import watch_parent
watch_parent()
from leakaudit.cli import main
sys.argv = ["leakaudit", "worker", {spool!r}]
import leakaudit.audit.worker as worker
def look(*a, **k):
    import ctypes
    dumpable = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
    print("LIMIT", resource.getrlimit(resource.RLIMIT_CORE), "DUMPABLE", dumpable, flush=True)
    return 0
worker.run_worker = look
main()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
@pytest.mark.parametrize("started", ["by hand", "by a trainer"])
def test_a_crash_of_the_worker_leaves_no_copy_of_its_memory(tmp_path: Path, started: str) -> None:
    """It holds the private batch and the key of the run."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOOK.format(spool=str(make(tmp_path).root))],
        cwd=ROOT,
        env={**os.environ, **({PARENT_VARIABLE: str(os.getpid())} if started == "by a trainer" else {})},
        stdin=subprocess.PIPE,  # stays open: its end would end the worker
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process, process.stdout:
        said = process.stdout.read()
    assert "LIMIT (0, 0) DUMPABLE 0" in said


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_the_training_process_keeps_its_own_limits(tmp_path: Path) -> None:
    """Whether a training run leaves a core file is the user's affair."""
    before = resource.getrlimit(resource.RLIMIT_CORE), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
    spool = make(tmp_path, 1, wait_at_end_s=240.0)
    side = SideProcess(spool)
    side.wait_or_detach()
    side.stop()
    assert (resource.getrlimit(resource.RLIMIT_CORE), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)) == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_the_key_of_the_run_is_neither_in_the_arguments_nor_in_the_environment(tmp_path: Path) -> None:
    """Whoever lists processes would see it there."""
    spool = make(tmp_path, finished=False, attacks=(ENDLESS,), encrypt_to=(new_identity()[0],), budget_s=60.0)
    spool.write(1, **parts(tiny.bert()))
    assert spool.keys is not None and spool.keys.identity.startswith("AGE-SECRET-KEY-")
    side = SideProcess(spool)
    seen: list[bytes] = []
    popen = subprocess.Popen

    def note(command: Any, **options: Any) -> Any:
        seen.append("\0".join([*map(str, command), *(f"{k}={v}" for k, v in options["env"].items())]).encode())
        return popen(command, **options)

    subprocess.Popen = note  # type: ignore[misc, assignment]
    try:
        assert side.ensure()
        seen.append(Path(f"/proc/{side.pid}/cmdline").read_bytes())
        until(lambda: any(path.suffix == ".run" for path in spool.entries()))
    finally:
        subprocess.Popen = popen  # type: ignore[misc]
        side.stop()
    assert len(seen) == 2 and not [text for text in seen if b"AGE-SECRET-KEY" in text]
    assert f"{KEY_VARIABLE}=1".encode() in seen[0]
    written = b"".join(path.read_bytes() for path in everything(tmp_path / "audit") if path.is_file())
    assert spool.keys.identity.encode() not in written


def test_a_worker_that_cannot_go_on_quotes_no_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback would, and its message may hold private values."""
    from leakaudit.audit.worker import run_worker

    def broken(*_: Any) -> Any:
        raise ValueError(CANARIES[0])

    assert run_worker(make(tmp_path, 1).root, audit_factory=broken) == 1
    said = capsys.readouterr()
    assert "error: the worker cannot continue: ValueError at" in said.out
    assert CANARIES[0] not in said.out + said.err


def test_libraries_are_quiet_in_a_worker_whatever_was_set() -> None:
    """Debug messages of transformers and urllib3 hold configurations and addresses."""
    from leakaudit.audit.worker import LOUD, quiet_libraries

    before = {name: logging.getLogger(name).level for name in LOUD}
    try:
        for name in LOUD:
            logging.getLogger(name).setLevel(logging.DEBUG)
        quiet_libraries()
        assert all(logging.getLogger(name).getEffectiveLevel() >= logging.WARNING for name in LOUD)
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
