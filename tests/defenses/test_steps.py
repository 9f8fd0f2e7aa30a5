"""Defences that are another recipe of the client's step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from leakaudit.attacks.idlg import Idlg
from leakaudit.attacks.span import Span
from leakaudit.audit.attempt import readable
from leakaudit.audit.own_words import of_own_words
from leakaudit.capture.describe import declared_defenses
from leakaudit.client.batches import with_random_state
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import PluginSpec
from leakaudit.defenses.dropout import Dropout
from leakaudit.defenses.ffa_lora import FfaLora
from leakaudit.defenses.freeze_layers import FreezeLayers
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.defenses.local_steps import LocalSteps
from leakaudit.defenses.lora import Lora
from leakaudit.defenses.substitute_tokens import SubstituteTokens
from leakaudit.errors import AnatomyError, ConfigError, SnapshotError
from leakaudit.plugins import Attack, Budget, Defense, Observation
from leakaudit.priors.ngram import build_ngram, write_ngram
from tests.support import tiny

TEXTS = ["the old dog chased a cat .", "never one horse"]


def classified(**more: Any) -> ClientStep:
    return tiny.client_step(tiny.bert(num_labels=3), tiny.bert_tokenizer(), TEXTS, [1, 2], **more)


def continued() -> ClientStep:
    return tiny.client_step(tiny.gpt2_lm(), tiny.gpt2_tokenizer(), TEXTS, task="causal-lm")


def sent(defense: Defense, step: ClientStep, seed: int = 0) -> Observation:
    return defense(step, step.observe(), tiny.generator(seed))


def gradients(model: nn.Module, step: ClientStep) -> dict[str, Tensor]:
    """Return the gradients of all trained parameters, as a training loop makes them."""
    model.zero_grad()
    model(**step.truth.micro_batches[0].inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_frozen_layers_are_those_of_a_run_that_does_not_train_them() -> None:
    """A clipped update must have the length that such a run gives it."""
    step = classified(max_grad_norm=0.1)
    seen = sent(FreezeLayers(first=1), step)
    model = tiny.bert(num_labels=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("bert.embeddings", "bert.encoder.layer.0.")))
    wanted = gradients(model, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert set(seen.update) == set(wanted) == set(seen.facts.shared)
    assert all(torch.equal(seen.update[name], wanted[name]) for name in wanted)


def test_a_tied_head_is_frozen_with_the_first_layers() -> None:
    """Its gradient would be that of the table that the defence withholds."""
    seen = sent(FreezeLayers(first=1), continued())
    assert {name.split(".")[2] for name in seen.update if ".h." in name} == {"1"}
    assert not [name for name in seen.update if "wte" in name or "wpe" in name or "lm_head" in name]


def test_all_blocks_frozen_leave_what_comes_after_them() -> None:
    """A number above the model's is no error and freezes no head."""
    assert set(sent(FreezeLayers(first=9), classified()).update) == {
        *("bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias")
    }


def test_dropout_is_that_of_a_model_with_this_rate() -> None:
    """The update must be that of training mode, and the facts must say the rate."""
    step = classified()
    seen = sent(Dropout(rate=0.3), step)
    model = tiny.bert(num_labels=3, dropout=0.3)
    drawn = int(torch.randint(2**62, (1,), generator=tiny.generator()))
    batch = with_random_state(step.truth.micro_batches[0], drawn)
    other = tiny.client_step(model, tiny.bert_tokenizer(), TEXTS, [1, 2], training=True)
    wanted = replace(other, truth=replace(other.truth, micro_batches=(batch,))).observe()
    assert seen.digest() == wanted.digest()
    assert seen.facts == wanted.facts and set(seen.facts.dropout.values()) == {0.3}
    assert seen.digest() != sent(Dropout(rate=0.3), step, seed=1).digest()
    assert step.facts.dropout == {} and not any(getattr(module, "p", 0.0) for module in step.model.modules())


def test_local_steps_are_those_of_plain_sgd() -> None:
    """The difference must be of all steps, divided by their learning rates."""
    step = classified()
    seen = sent(LocalSteps(steps=3, learning_rate=0.1), step)
    model = tiny.bert(num_labels=3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    mover = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        gradients(model, step)
        mover.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(seen.update[name], (before[name] - parameter.detach()) / 0.3, rtol=1e-4, atol=1e-6)
    assert (seen.facts.view, seen.facts.local_steps, seen.facts.update_kind) == ("delta", 3, "sgd")


def test_local_steps_with_dropout_draw_new_masks() -> None:
    """The same masks in every step would be easier to read than a real client's."""
    step = classified(training=True)
    batch = with_random_state(step.truth.micro_batches[0], 3)
    step = replace(step, truth=replace(step.truth, micro_batches=(batch,)))
    changed = LocalSteps(steps=3).changed_step(step, tiny.generator())
    states = [bytes(one.rng["cpu"].numpy().data) for one in changed.truth.micro_batches]
    assert len(set(states)) == 3 and changed.truth.sequences() == step.truth.sequences()


def peft_model(weights: Observation) -> nn.Module:
    """Return peft's own model with the adapters of an observation."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    model: Any = peft.get_peft_model(tiny.bert(num_labels=3), config).eval()
    given = dict(weights.model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(given[name.removeprefix("base_model.model.")])
    found: nn.Module = model
    return found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_adapters_have_the_gradient_of_peft(spread: float) -> None:
    """In the first round and later; the recorded model must stay as it was."""
    step = classified()
    names = [name for name, _ in step.model.named_parameters()]
    seen = sent(Lora(rank=4, alpha=8.0, targets="query+value", spread=spread), step)
    made = gradients(peft_model(seen), step)
    wanted = {
        name.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): gradient
        for name, gradient in made.items()
    }
    assert set(seen.update) == set(seen.facts.shared) == set(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(seen.update[name], gradient, rtol=1e-5, atol=1e-7)
    assert [name for name, _ in step.model.named_parameters()] == names
    assert all(parameter.requires_grad for parameter in step.model.parameters())


def test_the_first_round_of_adapters_follows_from_the_matrix() -> None:
    """The gradient of B is s dW A^T and that of A is zero."""
    step = classified()
    raw, seen = step.update(), sent(Lora(rank=4, alpha=8.0, targets="query", spread=0.0), step)
    for block in (0, 1):
        matrix = f"bert.encoder.layer.{block}.attention.self.query"
        down = seen.model.get_parameter(f"{matrix}.lora_A.default.weight").detach()
        up = seen.update[f"{matrix}.lora_B.default.weight"]
        torch.testing.assert_close(up, 2.0 * raw[f"{matrix}.weight"] @ down.T, rtol=1e-4, atol=1e-7)
        assert not seen.update[f"{matrix}.lora_A.default.weight"].any()


def test_ffa_lora_sends_the_second_matrices_and_the_head() -> None:
    """A gradient of A would name what a layer reads."""
    seen = sent(FfaLora(rank=4, targets="query+value"), classified())
    assert {"classifier.weight", "classifier.bias"} < set(seen.update)
    assert not [name for name in seen.update if "lora_A" in name]
    both = sent(Lora(rank=4, targets="query+value"), classified())
    assert all(torch.equal(seen.update[name], both.update[name]) for name in seen.update)


def test_adapters_of_a_language_model_send_no_head() -> None:
    """Rows of a head would name the words, which no run with adapters sends."""
    untied = tiny.client_step(tiny.gpt2_lm(tied=False), tiny.gpt2_tokenizer(), TEXTS, task="causal-lm")
    assert all("lora_" in name for name in sent(Lora(), untied).update)


def test_substituted_tokens_are_the_nearest_ones() -> None:
    """The update must be that of the changed texts, with special tokens kept."""
    step = classified()
    changed = SubstituteTokens(share=1.0, nearest=1).changed_step(step, tiny.generator())
    table = step.model.get_parameter(tiny.word_table(step.model)).detach()
    special = set(step.facts.vocabulary.special.values())
    for old, new in zip(step.truth.sequences(), changed.truth.sequences(), strict=True):
        for one, other in zip(old, new, strict=True):
            words = [word for word in range(len(table)) if word not in special | {one}]
            nearest = max(words, key=lambda word: tiny.cosine(table[word], table[one]))
            assert other == (one if one in special else nearest)
    assert SubstituteTokens(share=1.0, nearest=1)(step, step.observe(), tiny.generator()).digest() == (
        changed.observe().digest()
    )


@pytest.mark.parametrize("knows", [True, False])
def test_an_attacker_who_knows_the_replacement_restores_the_words(tmp_path: Path, knows: bool) -> None:
    """It reads the changed text exactly; a language model of such texts does the rest."""
    tokenizer = tiny.bert_tokenizer()
    write_ngram(tmp_path / "ngram", build_ngram(TEXTS, tokenizer, 3), tokenizer)
    step = tiny.client_step(tiny.wide_bert(), tokenizer, TEXTS[:1], [1])
    seen = sent(SubstituteTokens(share=0.5, nearest=3), step)
    changed = SubstituteTokens(share=0.5, nearest=3).changed_step(step, tiny.generator()).truth.sequences()
    seen = seen if knows else seen.unaware()
    budget = Budget(20)
    read = Span()(seen, tiny.generator(), budget)
    assert (
        read.sequences is not None and [text.token_ids for text in read.sequences] == changed != step.truth.sequences()
    )
    found = of_own_words(read, seen, str(tmp_path / "ngram"), budget)
    assert found.sequences is not None and not any(text.proved for text in found.sequences) and found.reach is None
    assert ([text.token_ids for text in found.sequences] == step.truth.sequences()) is knows
    assert found.diagnostics.get("words_restored", 0) == knows * sum(
        one != other for one, other in zip(changed[0], step.truth.sequences()[0], strict=True)
    )


def test_the_labels_of_a_language_model_are_substituted_with_its_words() -> None:
    """Else the output layer's update would name the words that were replaced."""
    changed = SubstituteTokens(share=0.5, nearest=3).changed_step(step := continued(), tiny.generator())
    inputs, before = changed.truth.micro_batches[0].inputs, step.truth.micro_batches[0].inputs
    padding = before["attention_mask"] == 0
    assert torch.equal(inputs["labels"], inputs["input_ids"].masked_fill(padding, -100))
    share = float((inputs["input_ids"] != before["input_ids"])[~padding].float().mean())
    assert 0.1 < share < 0.9


def test_what_does_not_fit_is_said() -> None:
    """No attempt may count as protected where the defence could not be tried."""
    step, raw = classified(), classified().observe()
    with pytest.raises(SnapshotError, match="the run ships gaussian-noise"):
        Dropout()(step, GaussianNoise()(step, raw, tiny.generator()), tiny.generator())
    with pytest.raises(AnatomyError, match="looked for dropout modules"):
        Dropout()(replace(step, model=nn.Linear(2, 2)), raw, tiny.generator())
    with pytest.raises(AnatomyError, match="peft cannot place adapters"):
        Lora(targets="nowhere")(step, raw, tiny.generator())
    adapters = Lora().changed_step(step, tiny.generator())
    with pytest.raises(AnatomyError, match="trains adapters already"):
        Lora()(adapters, adapters.observe(), tiny.generator())
    local = LocalSteps().changed_step(step, tiny.generator())
    with pytest.raises(SnapshotError, match="local steps already"):
        LocalSteps()(local, local.observe(), tiny.generator())
    with pytest.raises(ConfigError, match="dropout says how the client trains"):
        declared_defenses(PluginSpec.parse("dropout(rate=0.2)"), None)


READ_THROUGH = [
    Dropout(rate=0.1),
    LocalSteps(steps=4, learning_rate=0.001),
    Lora(rank=4),
    Lora(rank=32, spread=0.0),
    FfaLora(rank=32),
]


@pytest.mark.parametrize("defense", READ_THROUGH, ids=repr)
def test_an_attack_reads_through_a_weak_setting(defense: Defense) -> None:
    """It must get the model, the rates and the adapters of the changed step."""
    step = tiny.client_step(tiny.wide_bert(), tiny.bert_tokenizer(), TEXTS[:1], [1])
    seen, _ = readable(cast(Attack, Span()), sent(defense, step))
    assert Span().applies(seen)
    guess = Span()(seen, tiny.generator(), Budget(20))
    assert [found.token_ids for found in guess.sequences or ()] == step.truth.sequences()


def test_frozen_first_layers_leave_the_class_in_the_update() -> None:
    """Where no text can be read, labels still can: the attack must not be refused."""
    step = tiny.client_step(tiny.bert(num_labels=3), tiny.bert_tokenizer(), TEXTS[:1], [1])
    seen = sent(FreezeLayers(first=2), step)
    assert not Span().applies(seen)
    guess = Idlg()(seen, tiny.generator(), Budget(5))
    assert guess.label_counts is not None and list(guess.label_counts) == [0, 1, 0]


def test_a_loss_outside_the_model_is_not_sent_through_other_outputs() -> None:
    """Its recorded gradients belong to the outputs of the recorded weights and masks."""
    step = classified()
    batch = replace(step.truth.micro_batches[0], output_gradients={"logits": torch.ones(2, 3)})
    recipe = step.recipe.model_copy(update={"loss": "pulls"})
    outside = replace(step, recipe=recipe, truth=replace(step.truth, micro_batches=(batch,)))
    for defense in (Dropout(), LocalSteps(), Lora()):
        with pytest.raises(SnapshotError, match="known at the recorded outputs only"):
            sent(defense, outside)
    assert sent(FreezeLayers(), outside).update and sent(Lora(spread=0.0), outside).update
