"""Rounds of optimizers whose rule or state is not known here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.algorithms.embedding_rows import can_read_rows, rows_of_tokens
from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.snapshot import Snapshot
from leakaudit.results.schema import VerificationStatus
from tests.support import stacks, tiny
from tests.support.own_optimizers import EightBits, Lion, Plain
from tests.support.tiny_trainer import audit_config, kept, stamp, without_side_process


def _round(folder: Path, make: Any) -> tuple[Snapshot, set[int]]:
    """Train one round of two local steps; return it and the tokens in it."""
    model = tiny.bert().train()
    optimizer = make(model.parameters())
    batches = stacks.classes(count=2)
    config = audit_config(folder)
    with (
        without_side_process(),
        watch(
            model, optimizer, tokenizer=tiny.bert_tokenizer(), observe="delta", local_steps=2, config=config
        ) as audit,
    ):
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    (snapshot,) = kept(audit).values()
    return snapshot, {int(token) for batch in batches for token in batch["input_ids"].unique()}


@pytest.mark.parametrize("make", [Lion, EightBits, Plain], ids=["lion", "moments of 8 bits", "own"])
def test_a_round_of_an_unknown_rule_says_so_and_its_words_are_read(make: Any, tmp_path: Path) -> None:
    """It is no mismatch, and rows that only decay are no words."""
    snapshot, tokens = _round(tmp_path, make)
    stamped = stamp(snapshot)
    assert stamped.status is VerificationStatus.UNVERIFIABLE and "unknown moments" in stamped.note
    assert not snapshot.truth.optimizer_state
    assert can_read_rows(snapshot.observation).applies
    moved = rows_of_tokens(snapshot.observation).abs().sum(dim=1).nonzero().flatten()
    assert set(moved.tolist()) <= tokens and len(moved) >= len(tokens) - 1  # the padding row has no gradient


def test_rows_that_move_by_an_unknown_amount_name_no_words(tmp_path: Path) -> None:
    """Decay inside the gradient moves every row in its own way."""

    class Coupled(EightBits):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters)
            self.param_groups[0]["weight_decay"] = self.defaults["weight_decay"] = 0.1

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad = p.grad + 0.1 * p
            super().step(closure)

    snapshot, _ = _round(tmp_path, Coupled)
    found = can_read_rows(snapshot.observation)
    assert not found.applies and "unknown amount" in found.reason
