"""The filter judges rounds that another process trained, and trusts nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leakaudit.callbacks.rounds import finish
from leakaudit.results.files import load_results
from tests.support.nvflare_stand_in import stand_in
from tests.support.transmissions import Weights, dxo

NOISE = 20.0
NOISY = {"shipped_defense": f"gaussian-noise(scale={NOISE})"}


class Context:
    """What a filter asks of NVFlare's context."""

    def __init__(self, site: str) -> None:
        """Note the name of the client."""
        self.site = site

    def get_identity_name(self) -> str:
        """Return the name of the client."""
        return self.site

    def get_job_id(self) -> str:
        """Return the id of the job."""
        return "7f3a"


class External:
    """A training process, and the filter of its site in this process."""

    def __init__(self, folder: Path, site: str = "site-1", **more: Any) -> None:
        """Start the training process; it waits for its first task."""
        from leakaudit.integrations.nvflare import LeakAuditFilter

        self.folder, self.context = folder, Context(site)
        self.filter = LeakAuditFilter(str(folder), timeout_s=60)
        command = [sys.executable, "-m", "tests.support.elsewhere_client", str(folder), site, json.dumps(more)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def task(self) -> None:
        """Let a task come."""
        self.filter.handle_event("_before_task_data_filter", self.context)

    def train(self) -> tuple[Weights, Weights]:
        """Return the state dicts before and after a round."""
        saved = self.folder / "weights.pt"
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"train {saved}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "trained\n", self.process.stderr and self.process.stderr.read()
        made = torch.load(saved)
        return made["before"], made["after"]

    def send(self, result: Any) -> str:
        """Send a result; return "" if it leaves, else why not."""
        from nvflare.apis.filter import ContentBlockedException

        try:
            self.filter.process(result, self.context)
        except ContentBlockedException as error:
            return str(error)
        return ""

    def end(self) -> str:
        """End the training process; return what it said."""
        said = self.process.communicate("end\n", timeout=120)[1]
        assert self.process.returncode == 0, said
        return said


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stand_in(monkeypatch)
    yield
    finish()


def noisy(before: Weights, after: Weights) -> dict[str, Tensor]:
    """Return the weights after a round with the declared noise."""
    every = torch.cat([(after[n] - before[n]).flatten() for n in after])
    sigma = NOISE * float(every.square().mean().sqrt())
    rng = torch.Generator().manual_seed(0)
    return {n: w + sigma * torch.randn(w.shape, generator=rng) for n, w in after.items()}


def test_a_clean_round_leaves_once_and_forgeries_do_not(tmp_path: Path) -> None:
    """Altered and added tensors and an older round are blocked."""
    site = External(tmp_path, **NOISY)
    site.task()
    sent = noisy(*site.train())
    first = next(iter(sent))
    assert "not of the audited round" in site.send(dxo({**sent, "hidden": torch.ones(3)}))
    assert site.send(dxo(sent)) == ""
    assert "sent already" in site.send(dxo(sent))
    site.task()
    assert "older" in site.send(dxo(sent))
    site.train()
    assert "cannot be verified" in site.send(dxo(sent))  # weights of the round before
    site.task()
    before, after = site.train()
    sent = noisy(before, after)
    assert site.send(dxo({**sent, first: sent[first] + 60 * (sent[first] - before[first])}))
    said = site.end()
    site.filter.handle_event("_end_run", site.context)
    assert "Traceback" not in said
    results, deadline = load_results(tmp_path / "site-1"), time.monotonic() + 60
    while results.run.interrupted and time.monotonic() < deadline:
        time.sleep(0.2)
        results = load_results(tmp_path / "site-1")
    assert [step.step for step in results.steps] == [0, 1, 2] and not results.run.interrupted


@pytest.mark.integrations
def test_a_round_that_leaks_is_blocked(tmp_path: Path) -> None:
    """The weights leave the process as training left them."""
    site = External(tmp_path)
    site.task()
    _, after = site.train()
    assert "FAIL" in site.send(dxo(after))
    site.end()


@pytest.mark.integrations
def test_a_round_whose_process_has_ended_is_judged(tmp_path: Path) -> None:
    """An executor may launch a process for each task, which ends after it sent."""
    site = External(tmp_path, **NOISY)
    site.task()
    sent = noisy(*site.train())
    site.end()
    assert site.send(dxo(sent)) == ""


@pytest.mark.integrations
def test_the_round_of_another_site_is_blocked(tmp_path: Path) -> None:
    """Each site has its own folder."""
    one, other = External(tmp_path, **NOISY), External(tmp_path, "site-2", **NOISY)
    one.task()
    other.task()
    sent = noisy(*one.train())
    assert "No round" in other.send(dxo(sent))
    one.end()
    other.end()


def test_a_round_that_began_before_the_task_is_blocked(tmp_path: Path) -> None:
    """Such as one of an earlier job, that was killed before it sent."""
    site = External(tmp_path, **NOISY)
    sent = noisy(*site.train())
    assert "did not see the task" in site.send(dxo(sent))
    site.task()
    assert "older" in site.send(dxo(sent))
    site.end()


@pytest.mark.integrations
def test_a_training_that_says_itself_what_is_sent_is_blocked(tmp_path: Path) -> None:
    """Its rounds would be released without the filter."""
    site = External(tmp_path, sent_elsewhere=False, **NOISY)
    site.task()
    sent = noisy(*site.train())
    assert "sent_elsewhere" in site.send(dxo(sent))
    site.end()
