"""The replay on the rebuilt model gives the update that the optimizer got."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.audit.stamp import stamp_of
from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.step import ClientStep
from leakaudit.results.schema import VerificationStatus
from tests.support import stacks, tiny
from tests.support.other_runs import model_of
from tests.support.stacks import Batch
from tests.support.tiny_trainer import audit_config, distance, kept, without_side_process


def _falcon() -> nn.Module:
    return model_of("Falcon", "ForCausalLM", alibi=True)


def _llama() -> nn.Module:
    return model_of("Llama", "ForCausalLM", num_key_value_heads=1)


def _checkpointed() -> nn.Module:
    model: Any = model_of("GPT2", "LMHeadModel", resid_pdrop=0.1, embd_pdrop=0.1)
    model.activation_checkpointing_enable()
    return model  # type: ignore[no-any-return]


def _compiled() -> nn.Module:
    model = _llama()
    model.compile(backend="eager")
    return model


def _words(batch: Batch) -> Batch:
    return batch


def _left_padded(batch: Batch) -> Batch:
    return {name: tensor.flip(1) for name, tensor in batch.items()}


def _packed(batch: Batch) -> Batch:
    """Lay the rows one after the other; positions begin again with each."""
    lengths = batch["attention_mask"].sum(1)
    rows = [batch["input_ids"][row, : int(length)] for row, length in enumerate(lengths)]
    words = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    labels = words.masked_fill(positions == 0, -100)
    return {"input_ids": words, "position_ids": positions, "labels": labels}


class _Spy:
    """Notes the gradients that an optimizer is handed."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.model = model
        optimizer.register_step_pre_hook(self._note)

    def _note(self, *args: Any) -> None:
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.seen.append(found)


@pytest.mark.parametrize(
    ("make", "shape", "dtype"),
    [
        (_falcon, _words, torch.float32),
        (_falcon, _left_padded, torch.float32),
        (_llama, _words, torch.float64),
        (_llama, _left_padded, torch.float32),
        (_llama, _packed, torch.float32),
        (lambda: model_of("GPT2", "LMHeadModel"), _packed, torch.float32),
        (_checkpointed, _words, torch.float32),
        (lambda: model_of("Llama", "ForCausalLM", tie_word_embeddings=True), _words, torch.float32),
        (_compiled, _words, torch.float32),
    ],
    ids=["ALiBi", "ALiBi left", "float64", "left", "packed", "packed GPT-2", "checkpointing", "tied", "compiled"],
)
def test_the_replayed_update_is_the_one_that_the_optimizer_got(
    make: Callable[[], nn.Module], shape: Callable[[Batch], Batch], dtype: torch.dtype, tmp_path: Path
) -> None:
    """The rebuilt model computes what the live one did, for every step."""
    torch.manual_seed(0)
    model = make().to(dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spy = _Spy(model, optimizer)
    config = audit_config(tmp_path)
    with without_side_process(), watch(model, optimizer, tokenizer=tiny.gpt2_tokenizer(), config=config) as audit:
        for batch in stacks.texts(count=2):
            model(**shape(batch)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = kept(audit)
    assert len(found) == len(spy.seen) == 2
    for step, snapshot in found.items():
        client = ClientStep.of(snapshot)
        replayed = client.update()
        assert distance(replayed, {name: spy.seen[step][name] for name in replayed}) < 1e-6
        assert stamp_of(snapshot, client).status is VerificationStatus.VERIFIED
