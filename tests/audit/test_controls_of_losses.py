"""Controls of a client whose model returns no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.audit.audit import Audit
from leakaudit.audit.controls import NOT_COMPUTED, fitted
from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.snapshot import Snapshot
from leakaudit.config.audit import AuditConfig
from leakaudit.gate.controls import judge_controls
from leakaudit.gate.policy import default_policy
from tests.support import stacks, tiny
from tests.support.tiny_trainer import audit_config, kept, without_side_process


def contrastive(folder: Path) -> Snapshot:
    """Keep one step of a sentence encoder: mean pooling and pairs."""
    torch.manual_seed(0)
    model: Any = tiny.hf.BertModel(tiny.bert().config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(folder))
    one, two = ({k: v for k, v in batch.items() if k != "labels"} for batch in stacks.classes(count=2))
    with without_side_process(), watched:
        a, b = (model(**batch).last_hidden_state.mean(dim=1) for batch in (one, two))
        nn.functional.cross_entropy(a @ b.T, torch.arange(2)).backward()
        optimizer.step()
    return kept(watched)[0]


def test_the_control_of_a_sentence_encoder_has_the_clients_loss(tmp_path: Path) -> None:
    """The canary's outputs get the gradients of a real text's outputs."""
    snapshot = contrastive(tmp_path / "kept")
    config = AuditConfig.model_validate(
        {"out_dir": tmp_path / "run", "attacks": ["embedding-rows", "span"], "controls": 1}
    )
    audit = Audit(tmp_path / "run", config, tiny.bert_tokenizer())
    audit.step(snapshot)
    controls = audit.finish().controls
    assert (controls.positive.n, controls.negative.n, controls.negative.k) == (1, 1, 0)
    assert controls.kinds["words"].by["embedding-rows"].k == 1


def test_a_control_that_cannot_be_computed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the results and in the sentence of the gate."""
    monkeypatch.setattr("leakaudit.audit.controls._observed", lambda *_: None)
    snapshot = contrastive(tmp_path / "kept")
    config = AuditConfig.model_validate({"out_dir": tmp_path / "run", "attacks": ["embedding-rows"], "controls": 1})
    audit = Audit(tmp_path / "run", config, tiny.bert_tokenizer())
    audit.step(snapshot)
    sentences = [control.sentence for control in judge_controls(audit.finish(), default_policy())]
    assert any(f"ran on 0 steps: {NOT_COMPUTED}; the policy asks for" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("positions", "wanted"),
    [(2, [1.0, 2.0]), (3, [1.0, 2.0, 0.0]), (5, [1.0, 2.0, 1.0, 2.0, 1.0])],
    ids=["shorter", "equal", "longer"],
)
def test_a_gradient_is_cut_or_repeated_without_its_padding(positions: int, wanted: list[float]) -> None:
    """The third position is padding."""
    gradient = torch.tensor([[[1.0], [2.0], [0.0]]])
    found: Tensor = fitted(gradient, torch.Size((1, positions, 1)))
    assert found.flatten().tolist() == wanted


def test_an_output_of_another_width_is_not_filled() -> None:
    """Then no control runs."""
    with pytest.raises(LookupError):
        fitted(torch.ones(1, 3, 4), torch.Size((1, 3, 5)))
    with pytest.raises(LookupError):
        fitted(torch.ones(1, 4), torch.Size((1, 5)))
