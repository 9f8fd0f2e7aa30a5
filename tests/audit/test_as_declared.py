"""What was sent is the produced update under the declared defences, or it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from leakaudit.audit.as_declared import is_as_declared
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import Observation, Update
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import PluginSpec
from leakaudit.registry import defenses
from tests.support import tiny

TEXTS = ["the old dog chased a cat ."]
RANDOM = (
    "gaussian-noise(scale=5)",
    "laplace-noise(scale=5)",
    "prune(share=0.9, choose=random)",
    "quantize(bits=8)",
    "qsgd",
    "random-mask",
)
COMPUTED = (
    "prune(share=0.9)",
    "clip-noise(bound=0.5)",
    "round(dtype=fp16)",
    "sign",
    "top-k",
    "powersgd(rank=2)",
    "quantize(rounding=nearest)",
)


@pytest.fixture(scope="module")
def step() -> ClientStep:
    return tiny.client_step(tiny.bert(initializer_range=0.1), tiny.bert_tokenizer(), TEXTS, [1])


@pytest.fixture(scope="module")
def produced(step: ClientStep) -> Observation:
    return step.observe()


def plugin(declared: str) -> Any:
    spec = PluginSpec.parse(declared)
    return defenses.create(spec.name, spec.options)


def drawn(step: ClientStep, produced: Observation, declared: str, seed: int) -> Update:
    """Return what a client with the defence sends."""
    sent: Update = plugin(declared)(step, produced, torch.Generator().manual_seed(seed)).update
    return sent


def accepted(step: ClientStep, produced: Observation, declared: str, sent: Update, **more: Any) -> bool:
    found: list[DeclaredDefense] = [plugin(declared).declared()] if declared else []
    return is_as_declared(step, produced, sent, found, differences=True, **more)


@pytest.mark.parametrize("declared", [*RANDOM, *COMPUTED])
def test_an_honest_client_is_accepted(step: ClientStep, produced: Observation, declared: str) -> None:
    """With whatever random numbers it drew."""
    assert all(accepted(step, produced, declared, drawn(step, produced, declared, seed)) for seed in range(1, 11))


def changed(sent: Update, change: Callable[[Tensor], Tensor]) -> Update:
    return {name: change(tensor) for name, tensor in sent.items()}


@pytest.mark.parametrize("declared", ["", "prune(share=0.9)"])
def test_one_changed_digit_is_not_accepted(step: ClientStep, produced: Observation, declared: str) -> None:
    """Where nothing computes with the numbers."""
    honest = drawn(step, produced, declared, 1) if declared else produced.update
    assert accepted(step, produced, declared, honest)
    name = max(honest, key=lambda name: int((honest[name] != 0).sum()))
    last = torch.where(honest[name] != 0, torch.nextafter(honest[name], torch.tensor(torch.inf)), honest[name])
    assert not accepted(step, produced, declared, {**honest, name: last})


def test_a_factor_for_all_numbers_is_accepted(step: ClientStep, produced: Observation) -> None:
    """It is one number; more of them are not."""
    sent = changed(produced.update, lambda g: 3 * g)
    assert accepted(step, produced, "", sent, factor=3.0)
    name = next(iter(sent))
    assert not accepted(step, produced, "", {**sent, name: 1.01 * sent[name]}, factor=3.0)


@pytest.mark.parametrize("declared", RANDOM[:2])
def test_the_update_of_another_batch_is_no_noise(step: ClientStep, produced: Observation, declared: str) -> None:
    """Even if it has the size of the noise."""
    other = replace(step, truth=tiny.client_step(step.model, tiny.bert_tokenizer(), ["one horse ate ."], [0]).truth)
    hidden = other.observe().update
    sizes = [torch.cat([g.flatten() for g in u.values()]).square().mean().sqrt() for u in (produced.update, hidden)]
    sent = {n: g + 5 * sizes[0] / sizes[1] * hidden[n] for n, g in produced.update.items()}
    assert not accepted(step, produced, declared, sent)


def test_another_kind_of_noise_is_not_the_declared_one(step: ClientStep, produced: Observation) -> None:
    """Laplace noise for Gaussian noise of one strength."""
    assert not accepted(step, produced, RANDOM[0], drawn(step, produced, RANDOM[1], 1))


def test_a_random_choice_of_another_share_is_not_the_declared_one(step: ClientStep, produced: Observation) -> None:
    """The zeros of an update may spell something."""
    assert not accepted(step, produced, RANDOM[2], drawn(step, produced, "prune(share=0.5, choose=random)", 1))
