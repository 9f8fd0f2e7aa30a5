"""Processes agree over a key-value store.

There is one decision for all, no waiting beyond the limit, and no influence of earlier audits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from leakaudit.capture.processes.agreement import MEETING, REMEMBERED, Agreement, Settled

dist: Any = torch.distributed
"""Its stores are missing from its `__all__`."""

STORES: dict[str, Callable[[Path], Any]] = {
    "hash": lambda folder: dist.HashStore(),
    "file": lambda folder: dist.FileStore(str(folder / "store"), -1),
    "tcp": lambda folder: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a store of each kind that torch has."""
    return STORES[request.param](tmp_path)


def at_once(*calls: Callable[[], Settled]) -> list[Settled]:
    """Call functions in threads of their own, as processes would."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def asked(
    agreements: list[Agreement], answers: list[bool | None], topic: str = "step 1", limit: float = 0.3
) -> list[Settled]:
    """Ask several processes about a topic; None stays away."""
    return at_once(
        *(
            lambda a=agreement, yes=answer: a.settle(topic, yes, limit)
            for agreement, answer in zip(agreements, answers, strict=True)
            if answer is not None
        )
    )


def three(store: Any) -> list[Agreement]:
    """Return what three processes have."""
    return [Agreement(store, rank, 3) for rank in range(3)]


def test_all_hear_yes_only_if_all_say_it(store: Any) -> None:
    """One no is enough, whoever says it, and nobody waits for the limit then."""
    assert asked(three(store), [True] * 3, "a", 30) == [Settled(yes=True)] * 3
    for denier in range(3):
        began = time.monotonic()
        found = asked(three(store), [rank != denier for rank in range(3)], f"no {denier}", 30)
        assert not any(settled.yes or settled.silent for settled in found)
        assert time.monotonic() - began < 10


def test_a_process_that_is_silent_costs_the_limit_and_is_named(store: Any) -> None:
    """To all that did answer, and to itself when it comes too late."""
    processes = three(store)
    began = time.monotonic()
    assert asked(processes, [True, None, True]) == [Settled(silent=(1,))] * 2
    assert 0.3 <= time.monotonic() - began < 5
    began = time.monotonic()
    assert processes[1].settle("step 1", True, 30) == Settled(silent=(1,))
    assert time.monotonic() - began < 5, "what was decided is decided"


def test_a_process_that_left_ends_the_waiting(store: Any) -> None:
    """Its number is told; what was decided before stands."""
    processes = three(store)
    assert asked(processes, [True] * 3, "before", 30) == [Settled(yes=True)] * 3
    processes[2].leave()
    began = time.monotonic()
    assert {s.left for s in asked(processes, [True, True, None], "after", 30)} >= {2}
    assert time.monotonic() - began < 10
    assert processes[0].settle("before", True, 1).yes


def test_an_exception_while_waiting_is_a_no(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not go on without the process that was interrupted."""
    one, other = [Agreement(store, rank, 2) for rank in range(2)]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.settle("step 1", True, 30)
    assert other.settle("step 1", True, 30) == Settled()


def test_the_store_does_not_grow_with_the_run(store: Any) -> None:
    """Old topics are forgotten; that a place was taken is not."""
    pair = [Agreement(store, rank, 2) for rank in range(2)]
    asked(pair, [True] * 2, MEETING, 30)
    asked(pair, [True] * 2, "first", 30)
    counted = []
    for number in range(3 * REMEMBERED):
        assert asked(pair, [True] * 2, f"step {number}", 30) == [Settled(yes=True)] * 2
        counted.append(store.num_keys())
    assert counted[-1] == counted[REMEMBERED]
    assert pair[0].settled(MEETING) and not pair[0].settled("first")


@pytest.mark.parametrize("seed", range(3))
def test_nobody_acts_on_a_yes_that_another_one_does_not_hear(seed: int) -> None:
    """Answers at the limit: some processes see all answers and others see the clock."""
    store = dist.HashStore()
    pair = [Agreement(store, rank, 2) for rank in range(2)]

    def at(number: int, delay: float, rank: int) -> Settled:
        time.sleep(delay)
        return pair[rank].settle(f"step {number}", True, 0.05)

    for number in range(10):
        delay = 0.045 + 0.001 * number + 0.0003 * seed
        one, other = at_once(lambda n=number: at(n, 0.0, 0), lambda n=number, d=delay: at(n, d, 1))  # type: ignore[misc]
        assert one == other


def test_a_process_that_left_after_a_yes_takes_the_yes_from_nobody(store: Any) -> None:
    """Else one stops its training on it, and another trains on and waits."""
    slow, fast = Agreement(store, 0, 2), Agreement(store, 1, 2)
    store.set("stopping/0", "yes")  # the slow one answered, and looks next when all is over
    assert fast.settle("stopping", True, 1) == Settled(yes=True)
    fast.leave()
    seen: list[str] = []

    class Late(Agreement):
        def _silent(self, topic: str) -> tuple[int, ...]:
            return (1,)  # what it saw before the other answered

        def settled(self, topic: str) -> bool:
            seen.append(topic)
            return False

    slow = Late(store, 0, 2)
    assert slow.settle("stopping", True, 1) == Settled(yes=True)
    assert seen
