"""The span attack on adapters of a language model after a step of Adam."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from leakaudit.algorithms.span.adapter_gradients import AdapterAgreement
from leakaudit.algorithms.span.row_denoising import repaired_rows
from leakaudit.algorithms.span.row_evidence import Explained, RowEvidence
from leakaudit.attacks.span import Span
from leakaudit.client.observation import Observation
from leakaudit.client.optimizer import ClientOptimizer, ParameterGroup
from leakaudit.models.lora import add_lora, is_adapter
from leakaudit.models.structure import adapter_groups
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.testing.small_models import client_step
from tests.support import tiny

TEXT = "the old dog chased a small cat near the river ."


def _model() -> Any:
    """Return a GPT-2 with adapters, as far from zero as after some rounds."""
    pytest.importorskip("peft")
    config = tiny.gpt2_config(initializer_range=0.1)
    config.n_embd, config.n_head = tiny.WIDE, 6
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny.hf.GPT2LMHeadModel(config).eval()
    add_lora(model, 8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=1e-3, generator=torch.Generator().manual_seed(1))
    return model


def _observed(model: Any, rate: float | None = 1e-3, text: str = TEXT) -> tuple[Observation, tuple[int, ...]]:
    """Return what a client with a fresh AdamW sends after one step, and the ids."""
    shared = tuple(name for name, _ in model.named_parameters() if is_adapter(name))
    frozen = frozenset(name for name, _ in model.named_parameters()) - set(shared)
    facts: dict[str, Any] = {}
    if rate is not None:
        group = ParameterGroup(
            parameters=shared,
            learning_rates=(rate,),
            options={"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False},
        )
        optimizer = ClientOptimizer(algorithm="AdamW", groups=(group,))
        facts = {"view": "delta", "local_steps": 1, "learning_rate": rate, "optimizer": optimizer}
    step = client_step(model, tiny.gpt2_tokenizer(), [text], task="causal-lm", frozen=frozen, **facts)
    return step.observe(), step.truth.sequences()[0]


def test_one_sentence_is_read_and_proved() -> None:
    seen, ids = _observed(_model())
    found = Span()(seen, tiny.generator(), Budget(120))
    assert [(s.token_ids, s.proved) for s in found.sequences or ()] == [(ids, True)]


def test_every_word_is_in_reach_and_no_test_is_claimed() -> None:
    seen, ids = _observed(_model())
    reach = Span()(seen, tiny.generator(), Budget(120)).reach
    assert reach is not None
    assert all(reach.tokens(ids))
    assert reach.passes(ids) is None


def test_an_update_of_other_signs_proves_nothing() -> None:
    seen, _ = _observed(_model())
    random = {
        name: u * torch.randint(0, 2, u.shape, generator=tiny.generator(1)).mul(2).sub(1)
        for name, u in seen.update.items()
    }
    found = Span()(replace(seen, update=random), tiny.generator(), Budget(10))
    assert not any(sequence.proved for sequence in found.sequences or ())


def test_gradients_of_sequences_are_those_of_autograd() -> None:
    model = _model()
    seen, ids = _observed(model, rate=None)
    adapters = [adapter for group in adapter_groups(model) for adapter in group]
    agreement = AdapterAgreement(seen, adapters)
    other = ids[::-1]
    gradients = agreement.gradients([ids, other[:5]])
    assert float(agreement(gradients)[0]) == pytest.approx(1.0, abs=1e-5)
    assert float(agreement(gradients)[1]) < 0.9


def test_adapters_are_found_in_every_layer() -> None:
    groups = adapter_groups(_model())
    assert [[a.down.module.split(".")[2] for a in group] for group in groups] == [["0"], ["1"]]


def test_imprecise_entries_are_repaired_by_the_other_rows() -> None:
    rng = tiny.generator(3)
    true = torch.randn(12, 4, generator=rng, dtype=torch.float64) @ torch.randn(4, 200, generator=rng).double()
    error = torch.where(torch.rand(12, 200, generator=rng) < 0.2, 1.0, 1e-4).double()
    noisy = true + error * torch.randn(12, 200, generator=rng).double()
    repaired = repaired_rows(noisy, error, torch.ones(200).double()).rows
    unit = true * (repaired.norm(dim=1) / true.norm(dim=1))[:, None]
    before = float((noisy - true).norm() / true.norm())
    assert float((repaired - unit).norm() / unit.norm()) < 0.05 * before


def _exact(rows: Tensor) -> RowEvidence:
    width = rows.shape[1]
    found = repaired_rows(rows, torch.full_like(rows, 1e-6), torch.ones(width).double())
    return RowEvidence(found, torch.randn(2000, width, generator=tiny.generator(5)))


def test_true_inputs_add_more_evidence_than_chance_and_wrong_ones_do_not() -> None:
    rng = tiny.generator(4)
    inputs = torch.randn(20, 128, generator=rng, dtype=torch.float64)
    layer = _exact(torch.randn(8, 20, generator=rng, dtype=torch.float64) @ inputs)
    known = Explained.nothing([layer])
    for given in inputs[:14]:
        known = known.with_inputs([given])
    wrong = torch.randn(500, 128, generator=rng, dtype=torch.float64)
    chance = known.chance(0, 500)
    assert float(known.gain(0, layer.whitened(inputs[14:])).min()) > chance
    assert float(known.gain(0, layer.whitened(wrong)).max()) < chance
    assert not known.gain(0, layer.whitened(inputs[:14])).any()  # what is known adds nothing
