"""The cost of a snapshot: disk, time, and what it takes from training.

The encoder has 22.5 million parameters; snapshots are in clear and encrypted.

python -m tests.benchmarks.snapshot_files
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from leakaudit.storage.encryption import new_identity
from leakaudit.storage.snapshot_files import read_tensors, write_tensors

PARAMETERS = 22_500_000
REPEATS = 3


def best(folder: Path, action: Callable[[], object]) -> float:
    """Return the shortest of some repetitions in seconds.

    The folder is emptied before each.
    """
    seconds = []
    for _ in range(REPEATS):
        for path in folder.iterdir():
            path.unlink()
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def steps_while(going: Callable[[], bool]) -> tuple[float, float]:
    """Train a small network; return steps a second and the longest step in ms."""
    network = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(20)))
    batch = torch.randn(32, 256)
    steps, longest, start = 0, 0.0, time.perf_counter()
    last = start
    while going():
        network(batch).sum().backward()
        now = time.perf_counter()
        steps, longest, last = steps + 1, max(longest, now - last), now
    return steps / (last - start), 1000 * longest


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    tensors = {f"{i}": torch.randn(PARAMETERS // 15) for i in range(30)}  # weights and update
    public, private = new_identity()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{sum(t.numel() * 4 for t in tensors.values()) / 1e6:.0f} MB, best of {REPEATS}")
        for what, recipients in (("in clear", ()), ("encrypted", (public,))):
            seconds = best(folder, lambda to=recipients: write_tensors(folder / "t", tensors, to))  # type: ignore[misc]
            print(f"written and synced {what}: {seconds:.2f} s")
        start = time.perf_counter()
        read_tensors(folder / "t.age", (private,))
        print(f"decrypted: {time.perf_counter() - start:.2f} s")
        end = time.perf_counter() + 2.0
        print(
            "training alone: {:.0f} steps a second, longest {:.0f} ms".format(
                *steps_while(lambda: time.perf_counter() < end)
            )
        )
        for what, recipients in (("in clear", ()), ("encrypted", (public,))):
            for path in folder.iterdir():
                path.unlink()
            writer = threading.Thread(target=write_tensors, args=(folder / "t", tensors, recipients))
            writer.start()
            print("while it is written {}: {:.0f}, longest {:.0f} ms".format(what, *steps_while(writer.is_alive)))


if __name__ == "__main__":
    main()
