"""A deployment of Flower on loopback.

It has a SuperLink, a SuperNode, and a process for each message. All rounds of a client are one audit, although each of them is trained in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from leakaudit.results.files import load_results
from leakaudit.results.schema import Results

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]

SUPPORT = Path(__file__).parents[1] / "support"
BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240
pytest.importorskip("flwr")


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of Flower's processes."""
    own = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **own}


@contextmanager
def started(folder: Path, *words: str) -> Iterator[None]:
    """Run a program of Flower until the end of the context."""
    with (folder / f"{words[0]}.log").open("w") as log:
        process = subprocess.Popen(
            [str(BIN / words[0]), *words[1:]], cwd=folder, env=environment(folder), stdout=log, stderr=log
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)


def deployed(folder: Path, isolation: str, *, defended: bool) -> Results:
    """Run the app in a deployment and return the results of its only client."""
    app, audits, home = folder / "app", folder / "audits", folder / "home"
    shutil.copytree(SUPPORT / "flower_deployment", app)
    shutil.copy(SUPPORT / "pastes" / "small.py", app)
    home.mkdir()
    link, node = free_port(), free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    )
    with ExitStack() as stack:
        stack.enter_context(started(folder, "flower-superlink", "--insecure", "--port", str(link)))
        time.sleep(5)
        words = ["--insecure", "--superlink", f"127.0.0.1:{link}", "--isolation", isolation, "--port", str(node)]
        stack.enter_context(started(folder, "flower-supernode", *words))
        if isolation == "process":
            time.sleep(3)
            runtime = ["--insecure", "--runtime-api-address", f"127.0.0.1:{node}"]
            stack.enter_context(started(folder, "flower-superexec", *runtime))
        time.sleep(3)
        run = f"folder='{audits}' defended={str(defended).lower()}"
        done = subprocess.run(
            [str(BIN / "flwr"), "run", str(app), "local", "--run-config", run],
            env=environment(folder), capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return finished(folder, audits)


def finished(folder: Path, audits: Path) -> Results:
    """Wait for the results of two rounds."""
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        for path in audits.glob("client-*/results.json"):
            if len((found := load_results(path.parent)).steps) == 2:
                return found
        time.sleep(1)
    logs = "\n".join(path.read_text()[-1500:] for path in folder.glob("*.log"))
    raise AssertionError(f"no audit of two rounds after {LIMIT_SECONDS} s:\n{logs}")


@pytest.mark.parametrize("isolation", ["subprocess", "process"])
def test_rounds_of_several_processes_are_one_audit(isolation: str, tmp_path: Path) -> None:
    """What leaves is what training made, so the report has one column."""
    results = deployed(tmp_path, isolation, defended=False)
    assert [step.verification.status.value for step in results.steps] == ["verified"] * 2
    assert all(step.sent is None for step in results.steps)
    assert {attempt.defense for attempt in results.attempts} == {"none"}
    assert all("all_words" in attempt.events for attempt in results.attempts)


def test_what_leaves_behind_a_mod_is_judged(tmp_path: Path) -> None:
    """Clipped and noised by Flower's own mod, which nobody declared here."""
    results = deployed(tmp_path, "subprocess", defended=True)
    sent = [step.sent for step in results.steps]
    assert all(one is not None and one.status.value == "unverifiable" for one in sent)
    assert {attempt.defense for attempt in results.attempts} == {"none", "as-sent"}
