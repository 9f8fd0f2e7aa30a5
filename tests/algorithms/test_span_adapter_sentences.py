"""Several sentences of a decoder with adapters; nothing is granted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from leakaudit.algorithms.span.adapter_inputs import AdapterInputs
from leakaudit.algorithms.span.adapter_rows import GradientRows
from leakaudit.algorithms.span.prefix_ends import PrefixEnds
from leakaudit.attacks.span import Span
from leakaudit.models.lora import add_lora, is_adapter
from leakaudit.models.structure import adapter_groups, find_tail
from leakaudit.plugins.attack_protocol import Reconstruction
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.testing.small_models import client_step
from tests.support import tiny

TEXTS = (
    "the old dog chased a small cat near the river .",
    "never saw three big horse under blue tree",
    "the old cat saw a river",
)


def _model(shape: str) -> Any:
    """Return a decoder with adapters, as far from zero as after some rounds."""
    pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = {"gpt2": _gpt2, "llama": _llama}[shape]().eval()
    _adapt(model)
    return model


def _adapt(model: Any) -> None:
    add_lora(model, 8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(1))


def _gpt2() -> Any:
    config = tiny.gpt2_config(initializer_range=0.1)
    config.n_embd, config.n_head = tiny.WIDE, 6
    return tiny.hf.GPT2LMHeadModel(config)


def _llama() -> Any:
    config = tiny.hf.LlamaConfig(
        vocab_size=len(tiny.gpt2_tokenizer()), hidden_size=tiny.WIDE, intermediate_size=2 * tiny.WIDE, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=tiny.POSITIONS, initializer_range=0.1,
    )  # fmt: skip
    return tiny.hf.LlamaForCausalLM(config)


def _step(model: Any, texts: tuple[str, ...]) -> Any:
    frozen = frozenset(name for name, _ in model.named_parameters() if not is_adapter(name))
    return client_step(model, tiny.gpt2_tokenizer(), list(texts), task="causal-lm", frozen=frozen)


def _attack(step: Any) -> Reconstruction:
    return Span()(step.observe(), tiny.generator(), Budget(120))


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "texts",
    [TEXTS[:1], TEXTS, (TEXTS[0], TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[1][:20]), (TEXTS[2], TEXTS[2] + " tree")],
    ids=["one", "three", "an equal pair", "one inside another", "one token more"],
)
def test_every_sentence_is_read_and_proved(shape: str, texts: tuple[str, ...]) -> None:
    """From adapters of two layers and more, with fewer rows than tokens."""
    step = _step(_model(shape), texts)
    found = _attack(step).sequences or ()
    assert sorted(s.token_ids for s in found) == sorted(step.truth.sequences())
    assert all(s.proved for s in found)


def test_the_sentences_of_a_classifier_are_read_and_proved() -> None:
    """A GPT-2 with a head of its own, which is trained beside the adapters."""
    pytest.importorskip("peft")
    config = tiny.gpt2_config(initializer_range=0.1, num_labels=2)
    config.n_embd, config.n_head = tiny.WIDE, 6
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny.hf.GPT2ForSequenceClassification(config).eval()
    _adapt(model)
    frozen = frozenset(
        name for name, _ in model.named_parameters() if not (is_adapter(name) or name.startswith("score"))
    )
    step = client_step(model, tiny.gpt2_tokenizer(), list(TEXTS[:2]), [0, 1], frozen=frozen)
    found = _attack(step)
    assert sorted(s.token_ids for s in found.sequences or ()) == sorted(step.truth.sequences())
    assert all(s.proved for s in found.sequences or ()) and found.label_counts == (1, 1)


def test_rows_that_no_sentence_makes_prove_nothing() -> None:
    """The first layer's update is the client's, and those of other layers are random."""
    seen = _step(_model("gpt2"), TEXTS).observe()
    other = {
        name: u if ".h.0." in name else torch.randn(u.shape, generator=tiny.generator(3)) * u.std()
        for name, u in seen.update.items()
    }
    found = Span()(replace(seen, update=other), tiny.generator(), Budget(60))
    assert not any(sequence.proved for sequence in found.sequences or ())


def test_without_the_later_layers_the_words_are_left() -> None:
    step = _step(_model("gpt2"), TEXTS)
    seen = step.observe()
    first = {name: u for name, u in seen.update.items() if ".h.0." in name}
    found = Span()(replace(seen, update=first), tiny.generator(), Budget(60))
    assert set(found.tokens or ()) == {token for ids in step.truth.sequences() for token in ids[:-1]}


def test_the_gradient_of_a_last_token_is_that_of_autograd() -> None:
    """At sentence ends only the true last token explains the gradient."""
    step = _step(_model("llama"), TEXTS)
    seen, truth = step.observe(), step.truth.sequences()
    groups = adapter_groups(seen.model)
    inputs = AdapterInputs(seen.model, groups)
    prefixes = dict.fromkeys(ids[:length] for ids in truth for length in range(1, len(ids)))
    rows = [GradientRows.of(seen, group) for group in groups]
    ends = PrefixEnds(seen, inputs, rows, find_tail(seen.model), tuple(prefixes)).sentences(Budget(60))
    assert sorted(ends.sentences) == sorted(truth)
    assert ends.cosine == pytest.approx(1.0, abs=1e-6)


def test_prefixes_that_are_not_in_the_batch_are_dropped() -> None:
    step = _step(_model("llama"), TEXTS)
    seen, truth = step.observe(), step.truth.sequences()
    groups = adapter_groups(seen.model)
    prefixes = dict.fromkeys(ids[:length] for ids in truth for length in range(1, len(ids)))
    wrong = (truth[0][:3] + truth[1][2:3], truth[1][:4] + truth[0][:1])
    rows = [GradientRows.of(seen, group) for group in groups]
    inputs = AdapterInputs(seen.model, groups)
    ends = PrefixEnds(seen, inputs, rows, find_tail(seen.model), (*prefixes, *wrong))
    assert not set(wrong) & set(ends.leaves)
    assert set(ends.leaves) == {ids[:-1] for ids in truth}
