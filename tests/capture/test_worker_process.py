"""The side process as the trainer sees it.

It is started again when it dies, waited for at the end, and left behind only on request.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leakaudit.capture.remaining_snapshots import command_to_continue
from leakaudit.capture.worker import process as process_module
from leakaudit.capture.worker import restarts as worker_restarts
from leakaudit.capture.worker import wait as worker_wait
from leakaudit.capture.worker.environment import clean_environment
from leakaudit.capture.worker.process import SideProcess, start_worker
from leakaudit.config.audit import AuditConfig
from leakaudit.models import factories
from leakaudit.storage.encryption import new_identity
from leakaudit.storage.parent_watch import FACTORIES_VARIABLE, KEY_VARIABLE, ORPHANED, PARENT_VARIABLE
from leakaudit.storage.spool import Spool
from tests.support import tiny, tiny_trainer

SLEEP = "import time; time.sleep(60)"


def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, **more: Any) -> Any:
    """Return a side process that runs `code` instead of a worker."""
    config: AuditConfig = tiny_trainer.audit_config(tmp_path, **more)
    spool = Spool.create(tmp_path / "audit" / "spool", config, tiny.bert_tokenizer(), "test")
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", code], **options))
    return SideProcess(spool)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something, but not forever."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_a_side_process_that_keeps_dying_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After two restarts, with one line that says where to look."""
    side = make(tmp_path, monkeypatch, "raise SystemExit(1)")
    for _ in range(worker_restarts.RESTARTS + 1):
        assert side.ensure()
        side._process.wait(timeout=60)
    assert not side.ensure() and not side.ensure()
    assert side.given_up
    assert capsys.readouterr().err.count("the side process died 3 times: see") == 1
    side.stop()


@pytest.mark.parametrize("code", worker_restarts.THROUGH_CODES)
def test_a_side_process_that_is_through_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Nor is one that was asked to stop."""
    side = make(tmp_path, monkeypatch, f"raise SystemExit({code})", wait_at_end_s=20.0)
    side.wait_or_detach()
    assert side._process.returncode == code and not side.given_up
    first = side.pid
    assert not side.ensure() and side.pid == first
    side.stop()


def test_a_side_process_that_cannot_work_is_given_up_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configuration that it refuses does not get better."""
    side = make(tmp_path, monkeypatch, "raise SystemExit(2)")
    assert side.ensure()
    side._process.wait(timeout=60)
    first = side.pid
    assert not side.ensure() and side.given_up and side.pid == first
    assert "the side process cannot work with this configuration: see" in capsys.readouterr().err
    side.stop()


def test_a_full_disk_is_tried_again_after_a_while_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old checkpoints may have gone by then; it is no reason to keep no more steps."""
    monkeypatch.setattr(worker_restarts, "RETRY_SECONDS", 0.3)
    side = make(tmp_path, monkeypatch, "raise SystemExit(5)", wait_at_end_s=20.0)
    started: list[int] = []

    def let_it_fail() -> bool:
        again = side.ensure()
        if again:
            side._process.wait(timeout=60)
            started.append(side.pid)
        return bool(again)

    assert let_it_fail() and not let_it_fail()
    for _ in range(worker_restarts.RESTARTS + 2):  # it is no death, and may come back as often as it likes
        time.sleep(0.35)
        assert let_it_fail() and not let_it_fail()
    monkeypatch.setattr(worker_restarts, "RETRY_SECONDS", 3600.0)
    side.wait_or_detach()
    assert side.pid not in started and not side.given_up
    side.stop()


@pytest.mark.parametrize("interrupt", [False, True])
def test_waiting_ends_with_patience_or_ctrl_c_and_asks_for_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interrupt: bool
) -> None:
    """The worker is asked to stop, not killed.

    A Ctrl-C does not lose the result of training.
    """
    side = make(tmp_path, monkeypatch, SLEEP, wait_at_end_s=30.0 if interrupt else 0.5)

    class Impatient:
        def __exit__(self, *error: object) -> None: ...

        def __enter__(self) -> Any:
            raise KeyboardInterrupt

    if interrupt:
        side.ensure()
        monkeypatch.setattr(worker_wait, "countdown", Impatient)
    side.wait_or_detach()
    assert side._process.returncode == -signal.SIGTERM
    said = "not waiting any longer" if interrupt else "stopped waiting after 0.5 s"
    assert said in capsys.readouterr().err
    side.stop()


def test_a_second_ctrl_c_ends_the_side_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It deserves no minute to write its report; the program itself goes on."""
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    side = make(tmp_path, monkeypatch, stubborn, wait_at_end_s=0.0)
    side.ensure()
    until(lambda: (tmp_path / "audit" / "worker.log").read_text() == "up\n")
    process, wait = side._process, side._process.wait

    def ctrl_c(timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return int(wait(20))

    monkeypatch.setattr(process, "wait", ctrl_c)
    side.wait_or_detach()
    assert process.returncode == -signal.SIGKILL
    assert "ended without a report; `leakaudit worker" in capsys.readouterr().err


def test_a_side_process_told_to_go_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues at once.

    The end of the program gives the worker time to write its report.
    """
    slow = (
        "import signal, sys, time, pathlib\n"
        "def go(*_): time.sleep(3.0); pathlib.Path('report').touch(); sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, go); print('up', flush=True); time.sleep(60)"
    )
    monkeypatch.chdir(tmp_path)
    side = make(tmp_path, monkeypatch, slow)
    side.ensure()
    until(lambda: (tmp_path / "audit" / "worker.log").read_text() == "up\n")
    began = time.monotonic()
    side.terminate()
    assert time.monotonic() - began < 2.0 and side._process.poll() is None
    side.stop()
    assert not side.ensure()
    assert side._process.returncode == 130 and (tmp_path / "report").exists()


def test_deferred_attacks_begin_with_the_end_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a process before, however many steps were kept."""
    side = make(tmp_path, monkeypatch, "pass", schedule="deferred", wait_at_end_s=20.0)
    assert not side.ensure() and side.pid is None
    side.wait_or_detach()
    assert side._process.returncode == 0
    side.stop()


def test_what_is_left_to_others_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job attacks the steps.

    Neither the end of training nor an exception starts a process here.
    """
    side = make(tmp_path, monkeypatch, SLEEP, schedule="deferred", at_end="leave")
    side.ensure(), side.wait_or_detach()
    assert side.continue_detached() == f"{command_to_continue(side._spool)} continues with them"
    assert side.pid is None


def test_leaving_the_rest_to_others_ends_the_worker_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked, not killed."""
    side = make(tmp_path, monkeypatch, SLEEP, at_end="leave")
    side.ensure()
    side.wait_or_detach()
    assert side._process.returncode == -signal.SIGTERM
    side.stop()


@pytest.mark.parametrize("ended", ["wait_or_detach", "continue_detached"])
def test_a_detached_side_process_is_told_so_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: str
) -> None:
    """It does not matter whether training was interrupted.

    To stop it afterwards has no effect.
    """
    code = "import sys, pathlib; pathlib.Path('heard').write_text(sys.stdin.read()); import time; time.sleep(60)"
    monkeypatch.chdir(tmp_path)
    side = make(tmp_path, monkeypatch, code, at_end="detach")
    side.ensure()
    process = side._process
    try:
        getattr(side, ended)()
        side.stop()
        assert not side.ensure()
        until(lambda: (tmp_path / "heard").exists() and (tmp_path / "heard").read_text() == "detach\n")
        assert process.poll() is None
        assert f"(process {process.pid}) continues alone" in capsys.readouterr().err
    finally:
        process.kill()
        process.wait(timeout=60)


def test_a_worker_that_somebody_started_by_hand_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the spool; a second one would be refused."""
    side = make(tmp_path, monkeypatch, "pass")
    with side._spool.worker_lock():
        assert side.ensure()
    assert side._process is None


def test_a_fork_of_the_trainer_does_not_end_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader processes inherit what is to be done at exit."""
    side = make(tmp_path, monkeypatch, SLEEP)
    side.ensure()
    with monkeypatch.context() as patch:
        patch.setattr(side, "_owner", os.getpid() + 1)
        side.stop()
    assert side._process.poll() is None
    side.stop()
    assert side._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("slow", [False, True])
def test_the_end_of_the_program_asks_the_side_process_for_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], slow: bool
) -> None:
    """It gets the trainer's priority; a slow one ends itself after the program."""
    monkeypatch.setattr(process_module, "TERMINATED_SECONDS", 1.0 if slow else 60.0)
    answer = "SIG_IGN" if slow else "SIG_DFL"
    side = make(
        tmp_path, monkeypatch, f"import signal; signal.signal(15, signal.{answer}); print(1, flush=True); {SLEEP}"
    )
    raised: list[tuple[int, int, int]] = []
    side.ensure()
    until(lambda: (tmp_path / "audit" / "worker.log").read_text() == "1\n")
    monkeypatch.setattr(process_module, "yield_processor", lambda *priority: raised.append(priority))
    side.end_with_program()
    assert raised == [(side._process.pid, os.getpid(), 0)]
    assert side._process.poll() == (None if slow else -signal.SIGTERM)
    assert "the program ends before the attacks did" in capsys.readouterr().err
    assert not (side._spool.root / ORPHANED).exists()
    side._process.kill()


def test_a_process_that_cannot_be_started_costs_the_audit_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Out of memory, out of processes: one line, and no exception."""
    side = make(tmp_path, monkeypatch, "pass")

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(11, os.strerror(11))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert not side.ensure() and side.given_up
    assert "no side process can be started (Resource temporarily unavailable)" in capsys.readouterr().err


def test_the_key_of_the_run_goes_through_the_pipe_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not into the environment, not onto the command line, not onto the disk."""
    code = f"import os, sys; print(os.environ[{KEY_VARIABLE!r}], sys.stdin.readline(), flush=True); {SLEEP}"
    side = make(tmp_path, monkeypatch, code, encrypt_to=(new_identity()[0],))
    seen: dict[str, Any] = {}
    popen = subprocess.Popen

    def spy(command: list[str], **options: Any) -> Any:
        seen.update(options, command=command)
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", spy)
    side.ensure()
    log = tmp_path / "audit" / "worker.log"
    until(lambda: side._spool.keys.identity in log.read_text())
    side.stop()
    assert log.read_text().startswith("1 AGE-SECRET-KEY-")
    assert not any("SECRET" in value for value in [*seen["command"], *seen["env"].values()])
    log.unlink()
    for path in (path for path in (tmp_path / "audit").rglob("*") if path.is_file()):
        assert b"AGE-SECRET-KEY" not in path.read_bytes(), path


CREDENTIALS = [
    "DATABASE_URL",
    "REDIS_URL",
    "MONGODB_URI",
    "http_proxy",
    "HTTPS_PROXY",
    "PIP_INDEX_URL",
    "PGPASSWORD",
    "MYSQL_PWD",
    "SSHPASS",
    "GITHUB_PAT",
    "GITHUB_TOKEN",
    "GH_TOKEN",
    "GITLAB_TOKEN",
    "CI_JOB_TOKEN",
    "CI_JOB_JWT",
    "WANDB_API_KEY",
    "WANDB_APIKEY",
    "HF_TOKEN",
    "HUGGINGFACE_APIKEY",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_API_KEY",
    "GCLOUD_KEYFILE_JSON",
    "SLACK_WEBHOOK_URL",
    "SLACK_TOKEN",
    "SENTRY_DSN",
    "DOCKER_AUTH_CONFIG",
    "DOCKER_PASSWORD",
    "KUBECONFIG",
    "SSH_AUTH_SOCK",
    "SSH_PRIVATE_KEY",
    "GPG_PASSPHRASE",
    "PASSWORD",
    "SECRET",
    "TOKEN",
    "API_KEY",
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "COHERE_API_KEY",
    "NVIDIA_API_KEY",
    "NVIDIA_NGC_API_KEY",
    "NGC_CLI_API_KEY",
    "COMET_API_KEY",
    "NEPTUNE_API_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "CLEARML_API_SECRET_KEY",
    "KAGGLE_KEY",
    "NPM_TOKEN",
    "TWINE_PASSWORD",
    "POETRY_PYPI_TOKEN_PYPI",
    "VAULT_TOKEN",
    "CONSUL_HTTP_TOKEN",
    "STRIPE_SECRET_KEY",
    "LEAKAUDIT_IDENTITY",
    "db_password",
    "PYTHON_KEYRING_PASSWORD",
]
"""Usual names of variables with credentials, among them some that begin as settings of computing libraries do."""


def test_no_credential_reaches_the_side_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What computing does not need stays behind, unless the user names it."""
    assert len(CREDENTIALS) == 63
    for name in (*CREDENTIALS, "MINE", "OTHER"):
        monkeypatch.setenv(name, "canary")
    environment = clean_environment(1, ["MINE"])
    assert [name for name, value in environment.items() if "canary" in value] == ["MINE"]


def test_the_side_process_gets_what_computing_needs_and_nothing_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a launch's variables it would wait for processes that never come."""
    launch = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"}
    wanted = {
        "LD_LIBRARY_PATH",
        "LC_ALL",
        "CUDA_VISIBLE_DEVICES",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTHONPATH",
        "HF_HOME",
        "CI",
    }
    for name in launch | wanted | {"PYTHONINSPECT", "TORCH_LOGS"}:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WANDB_MODE", "online")
    environment = clean_environment(threads=3)
    assert not (launch | {"PYTHONINSPECT", "TORCH_LOGS"}) & set(environment)
    assert {name for name, value in environment.items() if value == "1"} >= wanted
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("3", "3")
    assert environment["WANDB_MODE"] == "disabled"


def log_of_a_worker(folder: Path) -> str:
    """Start a worker on a folder that is no spool, and return its log."""
    with start_worker(Spool(folder), folder / "log", "cpu") as process:
        process.wait(timeout=120)
    return (folder / "log").read_text()


def test_a_shadow_of_a_standard_module_behind_it_does_not_break_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old backports and projects with a `types.py` are such shadows."""
    for name in ("pathlib", "types", "html", "enum", "typing"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a shadow')\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert "is no spool" in log_of_a_worker(tmp_path)  # it came as far as its work


def test_the_worker_runs_the_package_that_trains_and_finds_the_trainers_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another leakaudit stands first, and the trainer's folder was added late."""
    mine, other = tmp_path / "my: code", tmp_path / "other"
    for folder, name in ((mine, "my_models"), (other, "leakaudit")):
        folder.mkdir()
        (folder / f"{name}.py").write_text(f"raise SystemExit('imported {name}')\n")
    (mine / "sitecustomize.py").write_text("raise SystemExit('too early')\n")
    monkeypatch.setenv("PYTHONPATH", str(other))
    monkeypatch.setattr(sys, "path", [str(mine), "", *sys.path])
    monkeypatch.chdir(tmp_path)
    code = "import leakaudit.cli, my_models"
    main = Path(process_module.MAIN).read_text().replace("from leakaudit.cli import main", code)
    (tmp_path / "start.py").write_text(main.replace("__file__", repr(process_module.MAIN)))
    monkeypatch.setattr(process_module, "MAIN", str(tmp_path / "start.py"))
    assert log_of_a_worker(tmp_path).strip() == "imported my_models"


def test_the_worker_is_told_whose_death_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that trains, even where that is a fork."""
    side = make(tmp_path, monkeypatch, f"import os; print(os.environ[{PARENT_VARIABLE!r}], flush=True)")
    side.ensure()
    side._process.wait(timeout=60)
    assert (tmp_path / "audit" / "worker.log").read_text().strip() == str(os.getpid())
    side.stop()


def test_the_trainers_signal_handlers_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing on preemption needs them."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)
    }
    side = make(tmp_path, monkeypatch, "pass", wait_at_end_s=20.0)
    side.ensure(), side.wait_or_detach(), side.stop()
    assert {number: signal.getsignal(number) for number in before} == before


def test_the_side_process_and_the_command_get_the_makers_that_the_training_vouched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from the spool, which another may have made."""
    code = (
        f"import os, pathlib; pathlib.Path({str(tmp_path / 'heard')!r}).write_text(os.environ['{FACTORIES_VARIABLE}'])"
    )
    side = make(tmp_path, monkeypatch, code)
    monkeypatch.setattr(factories, "_vouched", {"package.module:Model"})
    assert command_to_continue(side._spool).endswith(" --allow-factory package.module:Model`")
    side.ensure()
    side._process.wait(timeout=60)
    assert (tmp_path / "heard").read_text() == '["package.module:Model"]'
    side.stop()
