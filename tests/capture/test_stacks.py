"""Every stack shows the same numbers for the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leakaudit.callbacks.torch_loop import watch
from leakaudit.results.schema import VerificationStatus
from tests.support import stacks, tiny
from tests.support.stacks import STACKS, Case
from tests.support.tiny_trainer import audit_config, distance, kept, stamp, without_side_process


def by_hand(case: Case) -> list[dict[str, Tensor]]:
    """Return the update of every step, by plain autograd and SGD and nothing of ours."""
    model = case.model().train()
    updates = []
    for start in range(0, len(case.batches), case.windows):
        window = case.batches[start : start + case.windows]
        model.zero_grad()
        for batch in window:
            (model(**batch).loss / len(window)).backward()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        updates.append({n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None})
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-stacks.RATE)
    return updates


@pytest.mark.parametrize("stack", STACKS)
def test_the_same_steps_give_the_same_numbers(tmp_path: Path, stack: str) -> None:
    """Four steps with clipping, against a loop that knows nothing of the audit."""
    case = Case(batches=stacks.classes(), clip=0.02)
    found = STACKS[stack](tmp_path, case)
    assert list(found) == [0, 1, 2, 3]
    for step, own in enumerate(by_hand(case)):
        assert distance(found[step].observation.update, own) < 1e-5
        verified = stamp(found[step])
        assert verified.status is VerificationStatus.VERIFIED
        assert verified.relative_error is not None and verified.relative_error < 1e-5
        batch = found[step].truth.micro_batches[0]
        assert torch.equal(batch.inputs["input_ids"], case.batches[step]["input_ids"])
        assert found[step].truth.labels() == case.batches[step]["labels"].tolist()
        assert found[step].observation.facts.max_grad_norm in (0.02, None)


@pytest.mark.parametrize("stack", ["Lightning, automatic", "Lightning, manual", "Accelerate", "plain torch"])
def test_accumulated_steps_give_the_same_numbers(tmp_path: Path, stack: str) -> None:
    """Train two windows of two micro-batches.

    The Hugging Face Trainer divides otherwise and has tests of its own.
    """
    case = Case(batches=stacks.classes(), windows=2)
    found = STACKS[stack](tmp_path, case)
    for step, own in enumerate(by_hand(case)):
        assert distance(found[step].observation.update, own) < 1e-5
        assert found[step].observation.facts.loss_divisor == pytest.approx(2.0)
        assert len(found[step].truth.sequences()) == 4


def test_a_model_that_the_loop_calls_with_positions_is_read_by_its_signature(tmp_path: Path) -> None:
    """`model(ids, mask)`: names come from the model's forward."""
    batches = stacks.classes()
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    with without_side_process(), watched:
        for batch in batches[:2]:
            logits = model(batch["input_ids"], batch["attention_mask"]).logits
            torch.nn.functional.cross_entropy(logits, batch["labels"]).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = kept(watched)
    assert set(found[1].truth.micro_batches[0].inputs) == {"input_ids", "attention_mask"}
    assert stamp(found[1]).status is VerificationStatus.VERIFIED


@pytest.mark.parametrize("stack", STACKS)
def test_training_is_the_same_with_and_without_the_audit(
    tmp_path: Path, stack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is the same to the bit, masks included.

    No random number is drawn, and nothing is added to the graph.
    """
    made: list[Any] = []

    def model() -> Any:
        made.append(tiny.bert(dropout=0.1))
        torch.manual_seed(5)
        return made[-1]

    case = Case(model=model, batches=stacks.classes(), clip=0.01, windows=2)
    STACKS[stack](tmp_path / "with", case)
    monkeypatch.setenv("LEAKAUDIT_DISABLED", "1")
    with pytest.raises(AssertionError):  # there is no folder of an audit to look into
        STACKS[stack](tmp_path / "without", case)
    with_it, without = (dict(m.named_parameters()) for m in made)
    assert all(torch.equal(with_it[name], without[name]) for name in without)
    assert not torch.equal(without["classifier.weight"], tiny.bert().classifier.weight)  # type: ignore[arg-type, union-attr]


def test_between_kept_steps_nothing_is_on_the_model(tmp_path: Path) -> None:
    """Hooks are there for the step that is recorded, and for no other."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = audit_config(tmp_path, every_n_steps=3, first_step=1)
    hooks = []
    with without_side_process(), watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config):
        for batch in stacks.classes(count=6):
            loss = model(**batch).loss
            hooks.append(bool(model._forward_pre_hooks or model._forward_hooks or loss._backward_hooks))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert hooks == [False, True, False, False, True, False]
