"""The user's code runs exactly as often with an audit as without one.

Each training runs twice, without and with the audit, under a profile hook that lists every call of the user's functions. The lists,
the counts in holders of every kind, weights, optimizer state, random states and the registries of libraries must be the same.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from leakaudit.capture.context import OFF_SWITCH
from leakaudit.capture.recording.current_step import CurrentStep
from tests.support import stacks, tiny
from tests.support.counted_runs import Trained, assert_same, bert, counted, over_ddp
from tests.support.pair import run_two
from tests.support.stacks import STACKS, Case


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Trained, Trained]]:
    """Return a function that trains without the audit and with it."""

    def train(*args: Any, **more: Any) -> tuple[Trained, Trained]:
        with monkeypatch.context() as off:
            off.setenv(OFF_SWITCH, "1")
            without = counted(tmp_path / "without", *args, **more)
        return without, counted(tmp_path / "with", *args, **more)

    return train


def t5() -> Any:
    """Return a tiny encoder-decoder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny.hf.T5ForConditionalGeneration(
            tiny.hf.T5Config(
                vocab_size=len(tiny.VOCABULARY), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
                dropout_rate=0.1, pad_token_id=0, decoder_start_token_id=0,
            )
        )  # fmt: skip


def texts() -> list[stacks.Batch]:
    """Return batches whose labels are their texts."""
    found = [{k: v for k, v in batch.items() if k != "token_type_ids"} for batch in stacks.classes()]
    return [{**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)} for batch in found]


@pytest.mark.parametrize("stack", STACKS)
def test_every_function_of_the_user_runs_exactly_as_often(
    twice: Callable[..., tuple[Trained, Trained]], stack: str
) -> None:
    """Every counter, weight, random number, registry and log record is the same."""
    make, batches = (t5, texts()) if stack == "Seq2SeqTrainer" else (bert, stacks.classes())
    without, audited = twice(STACKS[stack], make, batches)
    assert audited.kept == 2, "the audit was at work"
    assert without.kept == 0
    assert_same(without, audited)
    assert len(without.seen) > 20 and len(audited.seen[0]) > 25


@pytest.mark.parametrize(
    "more",
    [
        {"config": {"schedule": "inline"}},
        {"options": {"observe": "local"}},
        {"options": {"observe": "delta", "local_steps": 2}},
        {"config": {"schedule": "deferred", "at_end": "leave"}},
    ],
    ids=["inline", "local", "delta", "deferred"],
)
def test_no_way_to_audit_calls_the_users_code(
    tmp_path: Path, twice: Callable[..., tuple[Trained, Trained]], more: dict[str, Any]
) -> None:
    """Neither attacks in the training process nor rounds of local steps do."""
    without, audited = twice(STACKS["plain torch"], bert, stacks.classes(), **more)
    assert audited.kept or (tmp_path / "with" / "audit" / "results.json").exists()
    assert_same(without, audited)


def test_a_side_process_at_work_changes_nothing(
    tmp_path: Path, twice: Callable[..., tuple[Trained, Trained]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It attacks while training goes on, and training waits for it at its end."""
    monkeypatch.setattr(stacks, "without_side_process", contextlib.nullcontext)
    config = {"attacks": ({"name": "idlg"},), "controls": 0, "wait_at_end_s": 200.0}
    without, audited = twice(STACKS["plain torch"], bert, stacks.classes(), config=config)
    assert_same(without, audited)
    assert (tmp_path / "with" / "audit" / "results.json").exists()


def distributed(folder: Path, case: Case) -> Any:
    """Train over DDP in a group of one process."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        return over_ddp(folder, case)
    finally:
        dist.destroy_process_group()


def test_ddp_runs_the_users_code_exactly_as_often(twice: Callable[..., tuple[Trained, Trained]]) -> None:
    """Its hooks and buckets are the library's; the model's hooks are the user's."""
    without, audited = twice(distributed, bert, stacks.classes())
    assert audited.kept == 2
    assert_same(without, audited)


@pytest.mark.integrations
def test_two_processes_run_the_users_code_exactly_as_often(tmp_path: Path) -> None:
    """Each of them compares its own training with one without the audit."""
    said = run_two("tests.support.counted_runs", tmp_path)
    assert "the same, 2 steps kept" in said[0] and "the same, 0 steps kept" in said[1], said


BATCH = stacks.classes(count=1)[0]


def _once_more(self: Any, optimizer: Any) -> None:
    with torch.no_grad():
        self._model.module(**BATCH)


def _hook_once_more(self: Any, optimizer: Any) -> None:
    next(iter(self._model.module.get_input_embeddings()._forward_hooks.values()))(None, (), torch.zeros(1, 1))


def _draw(self: Any, optimizer: Any) -> None:
    random.random()


def _instantiate(self: Any, optimizer: Any) -> None:
    """Do what an earlier version did to every ordered dictionary that it found."""
    table = transformers.activations.ACT2FN
    dict.update(table, gelu_accurate=table["gelu_accurate"])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_once_more, "before"),
        (_hook_once_more, "scaled"),
        (_draw, "the counts differ"),
        (_instantiate, "gelu_accurate"),
    ],
)
def test_the_guard_notices(
    twice: Callable[..., tuple[Trained, Trained]], monkeypatch: pytest.MonkeyPatch, harm: Callable[..., None], said: str
) -> None:
    """One call, one random number or one entry of a registry is enough."""
    real = CurrentStep._copy

    def copy(self: Any, optimizer: Any) -> None:
        harm(self, optimizer)
        real(self, optimizer)

    table = transformers.activations.ACT2FN
    monkeypatch.setattr(CurrentStep, "_copy", copy)
    entry = dict.__getitem__(table, "gelu_accurate")
    try:
        without, audited = twice(STACKS["plain torch"], bert, stacks.classes())
        with pytest.raises(AssertionError, match=said):
            assert_same(without, audited)
    finally:
        dict.update(table, gelu_accurate=entry)
