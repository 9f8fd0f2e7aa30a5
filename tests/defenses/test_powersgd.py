"""`powersgd` sends what torch's own hook sends, and small batches exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

from leakaudit.client.observation import Update
from leakaudit.defenses.powersgd import PowerSgd, low_rank
from leakaudit.plugins.error_feedback import SentInOrder
from leakaudit.plugins.testing import check_defense
from leakaudit.plugins.testing.attacks import ticking
from leakaudit.registry import attacks
from tests.support import tiny

ROWS, COLUMNS, RANK, STEPS = 12, 10, 2, 4


@pytest.fixture
def one_process() -> Iterator[None]:
    """Make this process the only one of a group; torch's hooks need a group."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _gradients() -> list[Tensor]:
    return [torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]


def _sent_by_torch(*, error_feedback: bool) -> list[Tensor]:
    """Return the gradients that torch's hook leaves, without a start of its own."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(COLUMNS, ROWS, bias=False))
    state = hooks.PowerSGDState(
        None,
        matrix_approximation_rank=RANK,
        start_powerSGD_iter=2,
        min_compression_rate=1,
        use_error_feedback=error_feedback,
        warm_start=False,
        random_seed=0,
    )
    state.iter = 2  # the hook sends the first steps whole
    model.register_comm_hook(state, hooks.powerSGD_hook)
    sent = []
    for gradient in _gradients():
        model.zero_grad()
        (model(torch.eye(COLUMNS)).T * gradient).sum().backward()
        sent.append(model.module.weight.grad.clone())
    return sent


@dataclass
class _WithTorchsStarts:
    """The same approximation from the starts that torch's hook draws."""

    error_feedback: bool
    drawn: Any
    name: ClassVar[str] = "powersgd"

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the approximation from the next start."""
        torch.manual_seed(self.drawn.randint(1_000_000_000))
        start = torch.randn(COLUMNS, RANK)
        return {name: low_rank(g, start) for name, g in update.items()}


@pytest.mark.parametrize("error_feedback", [False, True])
def test_every_step_is_what_torchs_hook_sends(one_process: None, error_feedback: bool) -> None:
    """From the same starts, with and without what earlier steps dropped."""
    theirs = _sent_by_torch(error_feedback=error_feedback)
    run = SentInOrder(_WithTorchsStarts(error_feedback, np.random.RandomState(0)))  # type: ignore[arg-type]
    ours = [run.send({"w": g}, torch.Generator())["w"] for g in _gradients()]
    for one, other, raw in zip(ours, theirs, _gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert (one - raw).norm() > 0.1 * raw.norm()  # otherwise the test says nothing


def test_matrices_of_low_rank_and_vectors_are_sent_exactly() -> None:
    """A larger rank keeps R directions of the row space, and adds none."""
    rng = torch.Generator().manual_seed(0)
    low = torch.randn(30, 3, generator=rng) @ torch.randn(3, 20, generator=rng)
    update = {"low": low, "full": torch.randn(30, 20, generator=rng), "bias": torch.randn(30, generator=rng)}
    sent = PowerSgd(rank=4).changed(update, torch.Generator())
    torch.testing.assert_close(sent["low"], low)
    assert torch.equal(sent["bias"], update["bias"])
    rank = int(torch.linalg.matrix_rank(sent["full"].double(), rtol=1e-5))
    assert rank == 4
    both = torch.cat([update["full"], sent["full"]]).double()
    assert int(torch.linalg.matrix_rank(both, rtol=1e-5)) == 20


def test_rows_of_zeros_stay_rows_of_zeros() -> None:
    """Rounding in them would name words that are not in the batch."""
    table = torch.zeros(300, 20)
    table[::37] = torch.randn(9, 20, generator=torch.Generator().manual_seed(0))
    sent = PowerSgd(rank=4).changed({"table": table}, torch.Generator())["table"]
    assert torch.equal(sent.any(dim=1), table.any(dim=1))


def test_a_matrix_that_gets_no_shorter_is_sent_whole() -> None:
    """Rank 4 of 6 x 6 would take 48 numbers for 36."""
    update = {"w": torch.randn(6, 6)}
    assert PowerSgd(rank=4).changed(update, torch.Generator()) is update
    assert PowerSgd(rank=2).changed(update, torch.Generator()) is not update


def test_the_start_depends_on_the_seed_alone() -> None:
    """The generator draws nothing, so an adversary computes the same matrices."""
    update = {"w": torch.randn(20, 30, generator=torch.Generator().manual_seed(0))}
    one, two = (PowerSgd(rank=2).changed(update, torch.Generator().manual_seed(i))["w"] for i in (0, 1))
    other = PowerSgd(rank=2, seed=1).changed(update, torch.Generator())["w"]
    assert torch.equal(one, two) and not torch.allclose(one, other)


@pytest.mark.parametrize(("rank", "read"), [(2, False), (4, True)])
def test_a_text_of_three_times_the_rank_is_read_through_it(rank: int, read: bool) -> None:
    """Query, key and value show R directions each of the space of all inputs.

    A text of 12 tokens is therefore hidden by rank 2 and not by rank 4.
    """
    step = tiny.client_step(tiny.wide_bert(), tiny.bert_tokenizer(), ["the old dog chased a cat . a small bird"], [1])
    (text,) = step.truth.sequences()
    assert len(text) == 12
    seen = PowerSgd(rank=rank)(step, step.observe(), torch.Generator())
    guess = attacks.create("span")(seen, torch.Generator().manual_seed(0), ticking(30))
    assert (list(text) in [list(one.token_ids) for one in guess.sequences]) == read


@pytest.mark.parametrize("rank", [1, 4])
def test_the_contract_holds(rank: int) -> None:
    """No step that declares it would be called a mismatch."""
    check_defense(PowerSgd(rank=rank))


def test_knobs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="rank must be 1 or more, or 0 for none, got -1"):
        PowerSgd(rank=-1)
    with pytest.raises(ValueError, match="seed must be 0 or more"):
        PowerSgd(seed=-1)
