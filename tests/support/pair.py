"""Two processes that trained together, once for all tests of their steps."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from leakaudit.capture.adapter import Adapter
from leakaudit.client.snapshot import Snapshot
from tests.support.tiny_trainer import kept

ROOT = Path(__file__).parents[2]
PATIENCE = 150.0
"""Seconds after which two processes that should take twenty are hung."""


def run_two(module: str, folder: Path) -> list[str]:
    """Run a module in two processes that know of each other; return what each said.

    Raises:
        AssertionError: one of them failed or hangs; both are gone then.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            cwd=ROOT,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)[-3000:]
    return said


class Run:
    """What two processes did."""

    def __init__(self, folder: Path, module: str) -> None:
        self.folder = folder
        self.said = run_two(module, folder)
        self.updates: list[dict[str, Any]] = [torch.load(folder / f"updates-{rank}.pt") for rank in range(2)]

    def kept(self, name: str) -> dict[int, Snapshot]:
        audit = Adapter()
        audit._folder = self.folder / name / "audit"
        return kept(audit)


@functools.cache
def pair(module: str = "tests.support.two_processes") -> Run:
    """Return what two processes of a module did; they run when it is first asked for."""
    folder = tempfile.mkdtemp(prefix="two-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Run(Path(folder), module)
