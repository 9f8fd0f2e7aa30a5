"""What an audit does to a training on a GPU: nothing, and how long it takes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from leakaudit.callbacks.torch_loop import watch
from leakaudit.results.schema import VerificationStatus
from tests.benchmarks.capture import setup
from tests.gpu.families import CPU, FAMILIES, bert, off, stamped, train
from tests.gpu.record import DEVICE, MEASURED, STEPS
from tests.support.tiny_trainer import audit_config, kept, without_side_process

pytestmark = pytest.mark.gpu

EVERY = 5
"""Kept steps of the training that is timed: every fifth."""


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_training_is_the_same_to_the_bit_with_an_audit(precision: str, tmp_path: Path) -> None:
    """Gradients, weights and generators, with dropout; kernels add in a fixed order."""
    family = replace(FAMILIES["BERT, classes"], model=lambda: bert(dropout=0.1))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        without = train(family, precision, DEVICE, STEPS, None)
        audited = train(family, precision, DEVICE, STEPS, tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(audited.snapshots) == STEPS
    assert [name for name in without.end if not torch.equal(without.end[name], audited.end[name])] == []
    for step, (one, other) in enumerate(zip(without.given, audited.given, strict=True)):
        assert [name for name in one if not torch.equal(one[name], other[name])] == [], f"step {step}"


def test_dropout_comes_back_on_the_device_that_drew_it(tmp_path: Path) -> None:
    """On another kind of device the step is not called a mismatch."""
    family = replace(FAMILIES["BERT, classes"], model=lambda: bert(dropout=0.1))
    trained = train(family, "float32", DEVICE, min(STEPS, 10), tmp_path)
    assert off(trained) == []
    assert {stamped(one, torch.device(DEVICE)).status for one in trained.snapshots.values()} == {
        VerificationStatus.VERIFIED
    }
    elsewhere = {stamped(one, CPU).status for one in trained.snapshots.values()}
    same_kind = VerificationStatus.VERIFIED if DEVICE == "cpu" else VerificationStatus.UNVERIFIABLE
    assert elsewhere == {same_kind}


@dataclass
class Timed:
    """What stood between a backward pass and the end of the optimizer's step."""

    host_ms: list[float]
    """The training thread."""
    device_ms: list[float]
    """The training's stream; the same on a CPU."""


def test_a_kept_step_is_copied_through_pinned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kept update is the optimizer's; the page says how long copies block."""
    pinned = _counting_pinned_memory(monkeypatch)
    model, optimizer, batch, tokenizer = setup("22M", DEVICE)
    config = audit_config(tmp_path, every_n_steps=EVERY, max_snapshots=STEPS)
    times = {True: Timed([], []), False: Timed([], [])}
    given: dict[int, dict[str, Any]] = {}
    watched = watch(model, optimizer, tokenizer=tokenizer, config=config)
    with without_side_process(), watched:
        for step in range(STEPS if DEVICE != "cpu" else min(STEPS, 10)):
            due = step % EVERY == 0
            model(**batch).loss.backward()
            if due:
                given[step] = {n: p.grad.detach().cpu().clone() for n, p in model.named_parameters()}
            _time(optimizer.step, times[due])
            optimizer.zero_grad()
    snapshots = kept(watched)
    assert sorted(snapshots) == sorted(given)
    for step, snapshot in snapshots.items():
        update = snapshot.observation.update
        assert [n for n, g in given[step].items() if n not in update or not torch.equal(update[n], g)] == []
    if DEVICE != "cpu":
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        assert sum(pinned) >= size, f"{sum(pinned)} bytes were pinned for a step of {size}"
    kept_ms, plain_ms = ([median(t.host_ms), median(t.device_ms)] for t in (times[True], times[False]))
    parameters = sum(p.numel() for p in model.parameters())
    MEASURED.notes.append(
        f"Copies of a kept step of {parameters / 1e6:.1f} M parameters, n = {len(snapshots)}: the training thread is blocked "
        f"{kept_ms[0] - plain_ms[0]:.1f} ms, the training's stream {kept_ms[1] - plain_ms[1]:.1f} ms (medians, kept steps less others)."
    )


def _time(step: Any, into: Timed) -> None:
    """Call an optimizer's step; its hooks copy what is kept."""
    if DEVICE == "cpu":
        start = time.perf_counter()
        step()
        into.host_ms.append(1e3 * (time.perf_counter() - start))
        into.device_ms.append(into.host_ms[-1])
        return
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start = time.perf_counter()
    first.record()
    step()
    last.record()
    into.host_ms.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    into.device_ms.append(first.elapsed_time(last))


def _counting_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the bytes of every pinned tensor that is made from now on."""
    pinned: list[int] = []
    make = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if kwargs.get("pin_memory"):
            assert made.is_pinned()
            pinned.append(made.numel() * made.element_size())
        return made

    monkeypatch.setattr(torch, "empty", empty)
    return pinned
