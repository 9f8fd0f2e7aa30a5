"""Memory that is freed is kept for the next tensor."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNTED = """
import resource, torch
from leakaudit.cli.memory import keep_freed_memory
if {kept}:
    keep_freed_memory()
torch.ones(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(10_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_tensor_takes_the_place_of_the_one_before() -> None:
    """So the system clears no page again."""
    usual, kept = (
        int(subprocess.run([sys.executable, "-c", COUNTED.format(kept=kept)], capture_output=True, check=True).stdout)
        for kept in (False, True)
    )
    assert usual >= 20 and kept <= usual / 10
