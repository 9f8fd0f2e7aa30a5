"""The raw view: what the run's own defence keeps off the wire."""

from __future__ import annotations

import dataclasses

import torch

from leakaudit.client.facts import DeclaredDefense
from leakaudit.defenses.dp_sgd import DpSgd
from leakaudit.defenses.undefended import Undefended
from tests.support import tiny
from tests.support.tiny_trainer import distance

TEXTS = ["the old dog chased a cat .", "a small bird saw the red fish ."]


def test_a_noised_update_is_shown_without_its_noise() -> None:
    """As the same step without the defence gives it, and nothing is declared any more."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), TEXTS, [0, 1])
    clean = step.observe()
    noise = DeclaredDefense(name="gaussian-noise", parameters={"sigma": 1.0})
    noised = clean.under(noise, {name: g + torch.randn_like(g) for name, g in clean.update.items()})
    raw = Undefended()(dataclasses.replace(step, facts=noised.facts), noised, torch.Generator())
    assert distance(raw.update, clean.update) < 1e-6
    assert raw.facts.defenses == ()
    assert noised.facts.defenses == (noise,)


def test_private_sgd_is_shown_without_clipping() -> None:
    """The mean gradient, not the mean of the clipped ones."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), TEXTS, [0, 1])
    clean = step.observe()
    seen = DpSgd(noise_multiplier=0.0, max_grad_norm=1e-4)(step, clean, torch.Generator())
    clipped = dataclasses.replace(step, facts=seen.facts)
    assert distance(seen.update, clean.update) > 0.5
    assert distance(Undefended()(clipped, seen, torch.Generator()).update, clean.update) < 1e-6


def test_a_step_without_a_defence_is_shown_as_it_is() -> None:
    """Bit by bit: there is nothing to take off."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), TEXTS, [0, 1])
    seen = step.observe()
    assert Undefended()(step, seen, torch.Generator()) is seen
