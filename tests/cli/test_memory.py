"""Memory that is freed is kept for the next tensor."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FREED = """
import os, torch
from pathlib import Path
from leakaudit.cli.memory import keep_freed_memory

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if {kept}:
    keep_freed_memory()
before = held()
torch.ones(50_000_000)
print(held() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_the_memory_of_a_tensor_stays_with_the_process() -> None:
    """A tensor of 200 MB was made and freed."""
    usual, kept = (
        int(subprocess.run([sys.executable, "-c", FREED.format(kept=kept)], capture_output=True, check=True).stdout)
        for kept in (False, True)
    )
    assert usual < 100e6 < kept
