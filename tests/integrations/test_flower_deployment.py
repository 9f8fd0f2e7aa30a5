"""The mod in Flower's deployment on this machine: SuperLink and two SuperNodes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from leakaudit.results.files import load_results
from leakaudit.results.schema import VerificationStatus

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900)]
APP = Path(__file__).parents[1] / "support" / "flower_app"
BIN = Path(sys.executable).parent
PATIENCE_S = 300.0


def free_port() -> int:
    """Return a port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(folder: Path, environment: dict[str, str], *commands: list[str]) -> Iterator[None]:
    """Run commands until the block ends; what they say goes to files in a folder."""
    with contextlib.ExitStack() as stack:
        started = []
        for number, command in enumerate(commands):
            log = stack.enter_context((folder / f"{number}.log").open("w"))
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        try:
            yield
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                process.kill()


def test_two_nodes_have_one_audit_each_over_the_processes_of_their_messages(tmp_path: Path) -> None:
    """With `--isolation process` each message is handled in a process of its own."""
    pytest.importorskip("flwr")
    out, link, nodes = tmp_path / "audits", free_port(), [free_port(), free_port()]
    secret, home = tmp_path / "secret", tmp_path / "home"
    secret.write_text("0" * 64)
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    )
    environment = os.environ | {
        "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "AUDITED_OUT": str(out),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    common = ["--insecure", "--superexec-auth-secret-file", str(secret)]
    isolated = [*common, "--isolation", "process"]
    superlink = [
        str(BIN / "flower-superlink"),
        *isolated,
        "--port",
        str(link),
        "--disable-runtime-dependency-installation",
    ]
    supernodes = [
        [str(BIN / "flower-supernode"), *isolated, "--superlink", f"127.0.0.1:{link}", "--port", str(port),
         "--node-config", f"partition-id={number} num-partitions=2"]
        for number, port in enumerate(nodes)
    ]  # fmt: skip
    executors = [
        [str(BIN / "flower-superexec"), *common, "--runtime-api-address", f"127.0.0.1:{port}"]
        for port in (link, *nodes)
    ]
    said = ""
    with running(tmp_path, environment, superlink):
        time.sleep(5)
        with running(home, environment, *supernodes, *executors):
            time.sleep(5)
            command = [str(BIN / "flwr"), "run", str(APP), "here", "--stream"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
                )
                said = done.stdout + done.stderr
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not all(complete(out / f"client-{n}") for n in range(2)):
                time.sleep(1)
    logs = [path.read_text()[-1500:] for path in (*tmp_path.glob("*.log"), *home.glob("*.log"))]
    for number in range(2):
        assert complete(out / f"client-{number}"), "\n".join([said[-3000:], *logs])
        results = load_results(out / f"client-{number}")
        assert [step.step for step in results.steps] == [0, 1]
        for step in results.steps:
            assert step.verification.status is VerificationStatus.VERIFIED and step.sent is not None
    assert sorted(path.name for path in out.iterdir()) == ["client-0", "client-1"]


def complete(folder: Path) -> bool:
    """Return whether the audit in a folder has ended with a report."""
    return (folder / "results.json").is_file() and not load_results(folder).run.interrupted
