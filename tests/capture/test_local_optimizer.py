"""Which optimizers' local steps can be computed again, and what is said of others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.observing.local_optimizer import LocalOptimizer, algorithm_of, check_local_optimizer, has_stepped
from leakaudit.client.optimizer import ALGORITHMS
from leakaudit.errors import SnapshotError
from tests.support import stacks, tiny
from tests.support.own_optimizers import Plain, PrivateChild, Wrapper, muon_and_adamw
from tests.support.tiny_trainer import audit_config, kept, stamp, without_side_process


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2))]


class Renamed(torch.optim.AdamW):
    """A subclass that steps as its base class does."""

    def describe(self) -> str:
        return "mine"


class Noisy(torch.optim.AdamW):
    """A subclass that steps by a rule of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OtherState(torch.optim.Adam):
    """A subclass that begins with another state."""

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return torch.optim.Adam._init_group(self, *args, **kwargs)


class Quantised(torch.optim.AdamW):
    """AdamW with the attributes of an optimizer of bitsandbytes."""

    def __init__(self, parameters: Any, bits: int = 8, paged: bool = False) -> None:
        super().__init__(parameters, lr=1e-3)
        self.args, self.is_paged = SimpleNamespace(optim_bits=bits), paged


class InBlocks(torch.optim.AdamW):
    """AdamW with the attribute of a low-bit optimizer of torchao."""

    block_size = 256


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if "." not in name])
def test_every_optimizer_of_the_table_is_known_before_and_after_its_first_step(name: str) -> None:
    """The first step of a class changes its `step` to one that calls hooks."""
    optimizer = getattr(torch.optim, name)(weights(), lr=0.1)
    names = {id(optimizer.param_groups[0]["params"][0]): "w"}
    assert algorithm_of(optimizer) == name
    assert not has_stepped(optimizer, names)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 2)
    optimizer.step()
    check_local_optimizer(optimizer)
    assert algorithm_of(optimizer) == name
    assert has_stepped(optimizer, names) is (name != "SGD")


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapper, lambda optimizer: [optimizer]])
def test_subclasses_that_inherit_the_step_and_wrappers_count_as_what_is_inside(wrap: Any) -> None:
    """A subclass is asked for its functions, not for its name."""
    optimizer = Renamed(weights(), lr=0.1)
    check_local_optimizer(wrap(optimizer))
    assert algorithm_of(optimizer) == "AdamW"


def relative() -> Any:
    """Return an optimizer that chooses its own rate."""
    from transformers.optimization import Adafactor

    return Adafactor(weights(), lr=None)


def unreadable() -> Any:
    """Return an optimizer whose state holds more than tensors and numbers."""
    optimizer = torch.optim.AdamW(weights(), lr=0.1)
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"step": torch.tensor(1.0), "moments": ["a list"]}
    return optimizer


UNKNOWN_RULES: tuple[Any, ...] = (
    lambda: Quantised(weights()),
    lambda: Quantised(weights(), bits=32, paged=True),
    lambda: InBlocks(weights(), lr=0.1),
    lambda: Plain(weights()),
    lambda: torch.optim.Muon(weights()),
    lambda: Noisy(weights(), lr=0.1),
    lambda: PrivateChild(weights(), lr=0.1),
    lambda: OtherState(weights(), lr=0.1),
)


@pytest.mark.parametrize("make", UNKNOWN_RULES)
def test_an_optimizer_of_another_rule_or_state_is_taken_as_unknown(make: Any) -> None:
    """Its rounds are kept without its state."""
    check_local_optimizer(make())
    assert LocalOptimizer.of(make(), {}).algorithm == "unknown" and not LocalOptimizer.of(make(), {}).fresh


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.optim.AdamW(weights(), lr=0.1, capturable=True), "make it with `capturable=False`"),
        (lambda: torch.optim.SGD(weights(), lr=0.1, differentiable=True), "make it with `differentiable=False`"),
        (relative, "a group has no learning rate (`relative_step=True`)"),
        (unreadable, "the state of AdamW holds a list under 'moments', which cannot be kept"),
        (lambda: muon_and_adamw([*weights(), nn.Parameter(torch.ones(2))]), "is for one optimizer; 2 were given"),
    ],
)
def test_an_optimizer_that_cannot_be_computed_again_is_refused_by_a_property(make: Any, message: str) -> None:
    """The message says what was found and what to do."""
    with pytest.raises(SnapshotError) as found:
        check_local_optimizer(make())
    assert message in str(found.value)
    assert "observe='update'" in str(found.value) or "new optimizer" in str(found.value)


def test_a_private_optimizer_has_no_difference_that_can_be_computed_again() -> None:
    """Its noise in every local step is not kept."""
    from opacus.optimizers import DPOptimizer

    inside = torch.optim.SGD(weights(), lr=0.1)
    private = DPOptimizer(inside, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=2)
    with pytest.raises(SnapshotError, match="adds noise in every local step"):
        check_local_optimizer(private)


# ---------------------------------------------------------------------- in a loop


def rounds(folder: Path, change: Any, *, steps: int = 4, **options: Any) -> Any:
    """Train with AdamW; `change` gets the optimizer before each step."""
    model = tiny.bert().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    arguments: dict[str, Any] = {"observe": "delta", "local_steps": 2, "config": audit_config(folder), **options}
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), **arguments)
    with without_side_process(), watched:
        for number, batch in enumerate(stacks.classes(count=steps)):
            model(**batch).loss.backward()
            change(optimizer, number)
            optimizer.step()
            optimizer.zero_grad()
    return kept(watched)


def test_a_round_without_a_learning_rate_is_not_kept_and_the_next_one_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the first steps of a warm-up, although only every third round is due."""

    def warm_up(optimizer: Any, number: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.0 if number < 2 else 1e-3

    found = rounds(tmp_path, warm_up, steps=6, config=audit_config(tmp_path, every_n_steps=3))
    assert sorted(found) == [1]
    assert stamp(found[1]).relative_error == 0.0
    assert "the learning rate of its first parameter group was 0 in every local step" in caplog.text


def test_an_option_that_changes_within_a_round_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rates may change; the public facts hold one value of everything else."""

    def change(optimizer: Any, number: int) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.1 if number else 0.0

    found = rounds(tmp_path, change)
    assert sorted(found) == [1]
    assert "the option `weight_decay` of its optimizer changed between its local steps" in caplog.text


def test_moments_that_become_unreadable_lose_their_round_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are read before the first local step of a round."""

    def spoil(optimizer: Any, number: int) -> None:
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        if number == 2:
            state["note"] = "a word"
        elif number == 4:
            state.pop("note")

    assert sorted(rounds(tmp_path, spoil, steps=6)) == [0, 2]
    assert "holds a str under 'note', which cannot be kept" in caplog.text


def test_a_local_step_whose_forward_pass_was_not_seen_loses_its_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A gradient from elsewhere cannot be computed again."""
    found = rounds(tmp_path, lambda optimizer, number: optimizer.step() if number == 0 else None, steps=3)
    assert sorted(found) == [1]
    assert "in 1 of its 2 local steps the audit saw no forward pass" in caplog.text
