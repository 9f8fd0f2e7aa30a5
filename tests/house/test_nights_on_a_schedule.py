"""The examples that start a night on a schedule, or tell how it ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from leakaudit.exit_codes import ExitCode
from tests.house.test_packaging import ROOT
from tests.support.nights import gap, night

EXAMPLES = ROOT / "examples/nights"


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[Any]]]:
    """Serve an address that keeps what is posted to it."""
    posted: list[Any] = []

    class Keep(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Keep)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", posted
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(
    ("record", "said"),
    [
        (night(0, k=2, sentence="Two of 20.", worse=True), "FAIL. Two of 20. Worse than the baseline."),
        (gap(0), "ERROR. the data file is missing"),
    ],
)
def test_the_webhook_posts_the_night(webhook: tuple[str, list[Any]], record: Any, said: str) -> None:
    """The document is the one that `notify_command` gets."""
    address, posted = webhook
    done = subprocess.run(
        ["sh", str(EXAMPLES / "webhook.sh")],
        input=record.model_dump_json(by_alias=True),
        env={"PATH": os.environ["PATH"], "LEAKAUDIT_WEBHOOK": address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert posted == [{"text": f"leakaudit 2026-11-01T0000Z: {said}"}]


def test_the_webhook_without_an_address_says_so() -> None:
    """It ends with an error, which the night prints."""
    done = subprocess.run(
        ["sh", str(EXAMPLES / "webhook.sh")],
        input="{}",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "set it to the address of your webhook" in done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """With a program at the place that the service names."""
    program = tmp_path / "leakaudit"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    for name in ("service", "timer"):
        text = (EXAMPLES / f"nightly.{name}").read_text(encoding="utf-8")
        text = text.replace("/srv/audits/.venv/bin/leakaudit", str(program)).replace("/srv/audits", str(tmp_path))
        (tmp_path / f"leakaudit-nightly.{name}").write_text(text, encoding="utf-8")
    units = [str(tmp_path / f"leakaudit-nightly.{name}") for name in ("service", "timer")]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "leakaudit" in line]
    assert not ours, done.stderr


def test_the_service_counts_an_undecided_night_as_one_that_ran() -> None:
    """The codes are those of the command."""
    text = (EXAMPLES / "nightly.service").read_text(encoding="utf-8")
    assert f"SuccessExitStatus={int(ExitCode.FAIL)} {int(ExitCode.INCONCLUSIVE)}" in text


@pytest.mark.parametrize("code", [0, 3])
def test_the_shell_step_of_the_workflow_ends_as_the_night(tmp_path: Path, code: int) -> None:
    """`tee` does not hide the exit code, and the summary has the line."""
    workflow = yaml.safe_load((EXAMPLES / "github_nightly.yaml").read_text(encoding="utf-8"))
    step = next(step for step in workflow["jobs"]["night"]["steps"] if step.get("name") == "Night")
    assert step["shell"] == "bash"
    summary = tmp_path / "summary"
    done = _shell(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]], tmp_path, code, summary)
    assert done.returncode == code
    assert summary.read_text(encoding="utf-8") == "the night\n"


def test_the_job_of_gitlab_ends_as_the_night(tmp_path: Path) -> None:
    """INCONCLUSIVE may be a warning there."""
    job = yaml.safe_load((EXAMPLES / "gitlab_nightly.yaml").read_text(encoding="utf-8"))["nightly-audit"]
    done = _shell(["sh", "-c", job["script"][-1]], tmp_path, 4, tmp_path / "summary")
    assert done.returncode == 4
    assert job["allow_failure"]["exit_codes"] == [int(ExitCode.INCONCLUSIVE)]


def test_the_line_for_cron_keeps_the_night_private(tmp_path: Path) -> None:
    """What it writes is for its owner only."""
    (line,) = [
        line for line in (EXAMPLES / "crontab").read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    *when, command = line.split(maxsplit=5)
    assert when == ["30", "2", "*", "*", "*"]
    assert "%" not in command, "cron ends a command at a percent sign"
    command = command.replace("/srv/audits", str(tmp_path)).replace(".venv/bin/leakaudit", "leakaudit")
    done = _shell(["sh", "-c", command], tmp_path, 0, tmp_path / "summary")
    assert done.returncode == 0
    assert (tmp_path / "nights.txt").stat().st_mode & 0o077 == 0


def _shell(command: list[str], place: Path, code: int, summary: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with a `leakaudit` that prints a line and ends with a code."""
    program = place / "bin/leakaudit"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho the night\nexit {code}\n", encoding="utf-8")
    program.chmod(0o755)
    environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": str(summary)}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
