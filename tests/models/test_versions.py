"""What differs between versions behaves the same for the callers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leakaudit import parts
from leakaudit.capture.refusals import refuse_versions
from leakaudit.errors import MissingPartError, SnapshotError
from leakaudit.models.versions import call_with


class Shared(nn.Module):
    """A module with two names, and a weight with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(4, 3)
        self.same = self.one
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.one.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.tied(self.one(ids) + self.same(ids))
        return found


@pytest.mark.parametrize("name", ["one.weight", "same.weight", "tied.weight"])
def test_a_weight_with_several_names_is_replaced_everywhere_and_put_back(name: str) -> None:
    """torch 2.4 leaves the other weight in a module with two names."""
    model, ids = Shared(), torch.tensor([1, 2])
    before = dict(model.named_parameters(remove_duplicate=False))
    other = torch.ones(4, 3)
    assert torch.equal(call_with(model, {name: other}, {"ids": ids}), torch.full((2, 4), 6.0))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[key] is before[key] and isinstance(after[key], nn.Parameter) for key in before)


def test_an_old_library_is_a_sentence_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the library, its version and the oldest one."""
    real = parts._version
    monkeypatch.setattr(parts, "floors", lambda: {"torch": "2.4", "peft": "0.15"})
    monkeypatch.setattr(parts, "_version", lambda name: "2.3.1+cu121" if name == "torch" else real(name))
    with pytest.raises(SnapshotError, match=r"torch 2\.3\.1\+cu121 \(at least 2\.4\)"):
        refuse_versions()
    with pytest.raises(MissingPartError, match="`leakaudit worker`: these libraries are older"):
        parts.require_supported("`leakaudit worker`")
    monkeypatch.setattr(parts, "_version", lambda name: "2.4.0+cu121" if name == "torch" else real(name))
    refuse_versions()


def test_floors_are_those_of_the_project() -> None:
    """They are read from what pip installed."""
    found = parts.floors()
    assert {"torch", "transformers", "peft", "pytorch-lightning", "click"} <= {*found}
    assert parts.too_old() == ""
