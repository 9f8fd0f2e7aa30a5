"""What is read from the accountant of a private optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.observing.accountant import RunAccount, power_of_ten_below
from leakaudit.capture.observing.private_sgd import PrivateSgd, private_sgd
from leakaudit.config.privacy import PrivacyConfig
from leakaudit.results.schema import Privacy
from leakaudit.storage.spool_files import read_totals
from tests.support import tiny
from tests.support.mini_trainer import config


@dataclass
class Ledger:
    """An accountant with a given history and epsilon."""

    history: Any = field(default_factory=list)
    epsilon: float = 3.0

    def get_epsilon(self, delta: float) -> float:
        """Return the epsilon."""
        return self.epsilon

    def hook(self) -> Callable[[Any], None]:
        """Return a step hook as Opacus makes it: a closure over the accountant."""

        def step(optimizer: Any) -> None:
            self.history = [*self.history, (optimizer.noise_multiplier, 0.01, 1)]

        return step


def optimizer(ledger: Ledger | None, noise: float = 1.0, **more: Any) -> Any:
    """Return what a private optimizer holds."""
    hook = None if ledger is None else ledger.hook()
    knobs = {"noise_multiplier": noise, "max_grad_norm": 0.5, "expected_batch_size": 600, "loss_reduction": "mean"}
    return SimpleNamespace(**(knobs | {"step_hook": hook} | more))


def stated(made: Any, steps: int, *, trained: int | None = None, asked: PrivacyConfig | None = None) -> Privacy:
    """Return what is said of a run of some steps of an optimizer."""
    account = RunAccount.of(PrivateSgd(made))
    assert account is not None
    for _ in range(steps):
        if made.step_hook is not None:
            made.step_hook(made)
    return account.stated(asked or PrivacyConfig(), steps if trained is None else trained, torch.nn.Linear(1, 1))


def test_epsilon_steps_and_rate_are_the_accountants() -> None:
    """Wrong: a number of the configuration, or a delta that is too large."""
    found = stated(optimizer(Ledger()), 4)
    assert (found.epsilon, found.delta, found.steps, found.sampling_rate) == (3.0, 1e-5, 4, 0.01)
    assert (found.noise_multiplier, found.max_grad_norm, found.origin) == (1.0, 0.5, "accountant")
    assert found.sampling == "unknown" and not found.why_not


def test_delta_is_below_one_by_the_number_of_examples() -> None:
    """Wrong: 1e-5 for ten million examples."""
    assert stated(optimizer(Ledger(), expected_batch_size=100_000), 4).delta == 1e-8
    assert stated(optimizer(Ledger()), 4, asked=PrivacyConfig(delta=1e-7)).delta == 1e-7


@pytest.mark.parametrize(("value", "power"), [(1 / 60_000, 1e-5), (0.01, 1e-3), (1e-5, 1e-6), (0.5, 0.1)])
def test_powers_of_ten_are_strictly_below(value: float, power: float) -> None:
    """Wrong: the number itself, by rounding of a logarithm."""
    assert power_of_ten_below(value) == power


def test_without_accountant_there_is_no_epsilon() -> None:
    """Wrong: an epsilon of zero."""
    found = stated(optimizer(None), 4)
    assert found.epsilon is None and found.why_not == "no accountant is attached to the optimizer"


@pytest.mark.parametrize(
    ("ledger", "noise", "why"),
    [
        (Ledger(), 0.0, "the noise multiplier was 0, so epsilon is infinite"),
        (Ledger(epsilon=math.inf), 1.0, "the accountant gave no finite epsilon"),
        (Ledger(epsilon=math.nan), 1.0, "the accountant gave no finite epsilon"),
        (Ledger(history=[(1.0, 0.0, 3)]), 1.0, "sampling rate of 0, outside of"),
        (Ledger(history=[(1.0, 1.5, 3)]), 1.0, "sampling rate of 1.5, outside of"),
        (Ledger(history=["private"]), 1.0, "the accountant's history has a form that is not known"),
    ],
)
def test_numbers_that_mean_nothing_give_no_epsilon(ledger: Ledger, noise: float, why: str) -> None:
    """Wrong: infinity in JSON, or an epsilon from a rate that no sampling has."""
    found = stated(optimizer(ledger, noise), 3)
    assert found.epsilon is None and why in found.why_not and "private" not in found.why_not


def test_a_run_without_steps_has_no_epsilon() -> None:
    """Wrong: epsilon 0, which Opacus gives for an empty history."""
    assert stated(optimizer(Ledger(epsilon=0.0)), 0).why_not == "the accountant counted no step"


def test_a_history_of_another_run_is_no_history_of_this_one() -> None:
    """Wrong: the epsilon of 400 earlier steps for a run that it did not see."""
    found = stated(optimizer(Ledger(history=[(1.0, 0.01, 400)]), step_hook=None), 0, trained=5)
    assert found.epsilon is None
    other = optimizer(Ledger(history=[(1.0, 0.01, 400)]))
    account = RunAccount.of(PrivateSgd(other))
    assert account is not None
    unseen = account.stated(PrivacyConfig(), 5, None)
    assert unseen.epsilon is None and "counted 0 of the 5 steps of this run" in unseen.why_not


def test_a_resumed_run_says_that_epsilon_covers_more_steps() -> None:
    """Wrong: an epsilon for 5 steps that is one for 405."""
    found = stated(optimizer(Ledger(history=[(1.0, 0.01, 400)])), 5)
    assert found.epsilon == 3.0 and found.steps == 405
    assert found.note == "The accountant counts 400 steps besides the 5 of this run."


def test_a_failing_accountant_says_nothing_private() -> None:
    """Wrong: an exception in training, or its message in the results."""

    class Broken(Ledger):
        def get_epsilon(self, delta: float) -> float:
            raise KeyError("private")

    found = stated(optimizer(Broken()), 2)
    assert found.why_not == "the accountant failed (KeyError)"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(("poisson", "sampling"), [(True, "poisson"), (False, "shuffled")])
def test_opacus_itself_is_read(poisson: bool, sampling: str) -> None:
    """Wrong: another epsilon than the engine prints, or shuffling called Poisson."""
    opacus = pytest.importorskip("opacus")
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.zeros(40, dtype=torch.long))
    plain = torch.nn.Linear(3, 2)
    engine = opacus.PrivacyEngine(accountant="rdp")
    model, private, loader = engine.make_private(
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=10),
        noise_multiplier=1.1,
        max_grad_norm=0.3,
        poisson_sampling=poisson,
    )
    account = RunAccount.of(private_sgd(private))
    assert account is not None
    for inputs, labels in loader:
        private.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        private.step()
    found = account.stated(PrivacyConfig(sampling="shuffled"), 4, model)
    assert found.epsilon == pytest.approx(engine.get_epsilon(1e-5))
    assert (found.accountant, found.steps, found.sampling_rate) == ("opacus rdp", 4, 0.25)
    assert (found.noise_multiplier, found.max_grad_norm, found.sampling) == (1.1, 0.3, sampling)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")
def test_an_accountant_that_would_take_minutes_is_not_asked() -> None:
    """Wrong: a training that waits 45 s at its end for a number."""
    accountants = pytest.importorskip("opacus.accountants")

    class Slow(accountants.PRVAccountant):  # type: ignore[misc, name-defined]
        def get_epsilon(self, delta: float, **more: Any) -> float:
            raise AssertionError("asked")

    slow = Slow()
    slow.history = [(0.01, 0.25, 4)]
    account = RunAccount(PrivateSgd(optimizer(Ledger(), 0.01)), slow, 0)
    found = account.stated(PrivacyConfig(delta=1e-5), 4, torch.nn.Linear(1, 1))
    assert found.epsilon is not None and found.epsilon > 1_000 and found.accountant == "opacus rdp"
    assert "was not asked" in found.note
    slow.history = [(2.0, 0.01, 4)]
    assert "the accountant failed" in account.stated(PrivacyConfig(delta=1e-5), 4, torch.nn.Linear(1, 1)).why_not


@pytest.mark.filterwarnings("ignore")
def test_the_end_of_a_private_training_tells_the_worker(tmp_path: Path) -> None:
    """Wrong: a number that never leaves the training process."""
    opacus = pytest.importorskip("opacus")
    plain: Any = tiny.bert().train()
    plain.bert.embeddings.position_embeddings.weight.requires_grad_(False)  # Opacus has no gradient per example for it
    row = dict(tiny.bert_tokenizer()("the old dog chased a cat .")) | {"labels": 1}
    data: Any = torch.utils.data.DataLoader(
        [{name: torch.tensor(value) for name, value in row.items()} for _ in range(8)],  # type: ignore[arg-type]
        batch_size=4,
    )
    engine = opacus.PrivacyEngine(accountant="rdp")
    model, private, loader = engine.make_private(
        module=plain,
        optimizer=torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1),
        data_loader=data,
        noise_multiplier=1.5,
        max_grad_norm=0.1,
        poisson_sampling=False,
    )
    audit = config(tmp_path, schedule="deferred", at_end="leave", privacy={"delta": 1e-6})
    with watch(model, private, tokenizer=tiny.bert_tokenizer(), config=audit):
        for batch in loader:
            private.zero_grad()
            model(**batch).loss.backward()
            private.step()
    totals = read_totals(audit.out_dir / "spool")
    assert totals is not None
    (told,) = totals.privacy
    assert told.epsilon == pytest.approx(engine.get_epsilon(1e-6))
    assert (told.delta, told.steps, told.sampling_rate, told.why_not) == (1e-6, 2, 0.5, "")
