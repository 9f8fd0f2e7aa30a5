"""The client's step and its verification, against closed forms and autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.audit import accuracy
from leakaudit.audit.verification import verify
from leakaudit.client.batches import make_batch, public_facts, with_random_state
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.errors import DataError, NonFiniteUpdateError, SnapshotError
from leakaudit.results.schema import VerificationStatus
from tests.support import tiny

TEXTS = ["the old dog chased a cat .", "two birds saw the red house"]

Update = Mapping[str, Tensor]


def step(model: nn.Module | None = None, labels: list[int] | None = None, **more: Any) -> ClientStep:
    """Return a step of the tiny BERT on two texts of one class.

    Its update has a clear direction.
    """
    return tiny.client_step(model or tiny.bert(), tiny.bert_tokenizer(), TEXTS, labels or [1, 1], **more)


def declaring(one: ClientStep, name: str, **parameters: float) -> ClientStep:
    """Return the step with a declared defence."""
    declared = DeclaredDefense(name=name, parameters={**parameters})
    return replace(one, facts=one.facts.model_copy(update={"defenses": (declared,)}))


def scaled(update: Update, factor: float) -> dict[str, Tensor]:
    """Return every entry times a factor."""
    return {name: factor * value for name, value in update.items()}


def rms(update: Update) -> float:
    """Return the root mean square of all entries."""
    return float(torch.cat([value.double().flatten() for value in update.values()]).square().mean().sqrt())


def noisy(update: Update, sigma: float, seed: int = 1) -> dict[str, Tensor]:
    """Return the update with independent normal noise."""
    rng = torch.Generator().manual_seed(seed)
    return {name: value + sigma * torch.randn(value.shape, generator=rng) for name, value in update.items()}


def norm(update: Update) -> float:
    """Return the L2 norm of the whole update."""
    return float(torch.cat([value.double().flatten() for value in update.values()]).norm())


# ---------------------------------------------------------------------- the update


def test_the_head_bias_gets_softmax_minus_one_hot() -> None:
    """The closed form of cross-entropy: the mean over the batch of p - y."""
    one = step(labels=[1, 0])
    inputs = dict(one.truth.micro_batches[0].inputs)
    labels = inputs.pop("labels")
    with torch.no_grad():
        probabilities = one.model(**inputs).logits.softmax(dim=-1)  # (B, classes)
    expected = (probabilities - nn.functional.one_hot(labels, 2)).mean(dim=0)
    assert torch.allclose(one.update()["classifier.bias"], expected, atol=1e-6)


def test_the_update_is_autograds() -> None:
    """With nothing of ours in between."""
    one = step()
    found = one.update()
    model = tiny.bert()
    model(**one.truth.micro_batches[0].inputs).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(found[name], parameter.grad)


def test_micro_batches_add_up_and_are_divided() -> None:
    """Two micro-batches divided by two are the mean of both."""
    tokenizer = tiny.bert_tokenizer()
    singles = [tiny.client_step(tiny.bert(), tokenizer, [text], [1]) for text in TEXTS]
    both = Truth(tuple(single.truth.micro_batches[0] for single in singles))
    recipe = StepRecipe(training=False, loss_divisor=2.0)
    found = ClientStep(tiny.bert(), both, recipe, singles[0].facts).update()
    one, two = (single.update() for single in singles)
    assert all(torch.allclose(found[name], (one[name] + two[name]) / 2, atol=1e-7) for name in found)


def test_clipping_bounds_the_norm_of_the_whole_update() -> None:
    """And keeps its direction."""
    plain = step().update()
    clipped = step(max_grad_norm=norm(plain) / 10).update()
    assert norm(clipped) == pytest.approx(norm(plain) / 10, rel=1e-3)
    assert all(torch.allclose(clipped[name], plain[name] / 10, rtol=1e-3) for name in plain)


def test_frozen_parameters_are_not_in_the_update() -> None:
    """And the others are the same without them."""
    model = tiny.bert()
    frozen = frozenset({tiny.word_table(model)})
    found, everything = step(model, frozen=frozen).update(), step().update()
    assert set(everything) - set(found) == frozen
    assert all(torch.equal(found[name], everything[name]) for name in found)


def test_a_parameter_that_the_loss_does_not_reach_gets_zeros() -> None:
    """It is shared, so it is sent."""
    one = step()
    one.model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    facts = one.facts.model_copy(update={"shared": (*one.facts.shared, "unused")})
    assert torch.equal(replace(one, facts=facts).update()["unused"], torch.zeros(3))


def test_the_same_random_state_gives_the_same_dropout() -> None:
    """Another one gives another update, and the caller's own state stays as it was."""
    model = tiny.bert(dropout=0.3)
    one = step(model, training=True)

    def seeded(seed: int) -> dict[str, Tensor]:
        return replace(one, truth=Truth((with_random_state(one.truth.micro_batches[0], seed),))).update()

    before = torch.get_rng_state()
    first = seeded(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], value) for name, value in seeded(1).items())
    assert not torch.equal(first["classifier.weight"], seeded(2)["classifier.weight"])


def test_the_model_is_left_as_it_was() -> None:
    """Mode, gradients and what is trainable; also after an error."""
    one = step(training=True)
    one.model.get_input_embeddings().weight.requires_grad_(False)  # type: ignore[operator]
    flags = [p.requires_grad for p in one.model.parameters()]
    one.update()
    broken = replace(one, truth=Truth((MicroBatch({"input_ids": torch.tensor([[10**6]])}),)))
    with pytest.raises(IndexError, match="out of range"):
        broken.update()
    assert not one.model.training
    assert [p.requires_grad for p in one.model.parameters()] == flags
    assert all(p.grad is None for p in one.model.parameters())


def test_the_number_of_unaudited_parameters_keeps_its_name_on_disk() -> None:
    """Earlier versions wrote it, and read it, as `outside`."""
    assert StepRecipe(unaudited_parameters=2).model_dump(by_alias=True)["outside"] == 2


def test_a_loss_that_cannot_be_replayed_says_so() -> None:
    """With the reason that was noted when the step was kept."""
    one = replace(step(), recipe=StepRecipe(loss="unsupported", note="compute_loss_func is user code"))
    with pytest.raises(SnapshotError, match="cannot be replayed: compute_loss_func is user code"):
        one.update()


def test_a_step_that_is_not_finite_is_not_observed() -> None:
    """A model with infinite weights."""
    one = step()
    with torch.no_grad():
        one.model.get_parameter("classifier.weight").fill_(float("inf"))
    with pytest.raises(NonFiniteUpdateError, match="not finite"):
        one.observe()


def test_an_empty_batch_is_refused() -> None:
    """At least one text is needed."""
    with pytest.raises(DataError, match="an empty batch"):
        make_batch(tiny.bert_tokenizer(), [], [], "classification", 8)


def test_texts_that_are_too_long_are_cut_and_padding_has_no_label() -> None:
    """As trainers do; a language model's loss leaves padding out."""
    batch = make_batch(tiny.gpt2_tokenizer(), [TEXTS[0], "a cat"], None, "causal-lm", 5)
    assert batch.inputs["input_ids"].shape == (2, 5)
    assert batch.inputs["labels"][1].tolist() == [*batch.inputs["input_ids"][1, :2].tolist(), -100, -100, -100]


def test_public_facts_say_what_is_shared_and_what_drops_out() -> None:
    """And what is tied, and which classes there are."""
    model = tiny.bert(num_labels=3, dropout=0.1)
    table = tiny.word_table(model)
    facts = public_facts(model, tiny.bert_tokenizer(), task="classification", training=True, frozen=frozenset({table}))
    assert facts.frozen == (table,) and table not in facts.shared
    assert facts.num_labels == 3 and facts.training_mode
    assert set(facts.dropout.values()) == {0.1}
    lm = public_facts(tiny.gpt2_lm(), tiny.gpt2_tokenizer(), task="causal-lm", training=False)
    assert lm.tied == (("transformer.wte.weight", "lm_head.weight"),) and lm.num_labels is None


# ---------------------------------------------------------------------- the stamp


def test_the_same_update_is_verified() -> None:
    """With no error at all."""
    found = verify(step(), step().update())
    assert (found.status, found.relative_error, found.scale) == (VerificationStatus.VERIFIED, 0.0, 1.0)


@pytest.mark.parametrize("factor", [0.25, 2.0, 4.0])
def test_a_multiple_is_scaled_by_that_much(factor: float) -> None:
    """Accumulation, world size and clipping show as a factor."""
    found = verify(step(), scaled(step().update(), factor))
    assert found.status is VerificationStatus.SCALED
    assert found.scale == pytest.approx(factor, rel=1e-6)


def secretly(update: Update, seed: int = 0) -> dict[str, Tensor]:
    """Return every tensor times a factor of its own.

    Factors have either sign and spread over six powers of ten.
    """
    rng = torch.Generator().manual_seed(seed)
    sizes = 10 ** (6 * torch.rand(len(update), generator=rng) - 3)
    signs = (torch.rand(len(update), generator=rng) < 0.5).float() * 2 - 1
    return {
        name: value * float(size * sign) for (name, value), size, sign in zip(update.items(), sizes, signs, strict=True)
    }


@pytest.mark.parametrize("change", [secretly, lambda update: scaled(update, -1.0)], ids=["secret factors", "negated"])
def test_tensors_with_factors_of_their_own_are_rescaled_and_of_another_batch_a_mismatch(
    change: Callable[[Update], Update],
) -> None:
    """A client cannot escape by factors that the server could undo.

    A factor fits no other batch, whatever it is.
    """
    found = verify(step(), change(step().update()))
    assert found.status is VerificationStatus.RESCALED and found.status.attacked and not found.status.bounds
    assert found.relative_error is not None and found.relative_error < 1e-6
    assert "times a factor" in found.note
    other = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["a fish and a horse", "never"], [1, 0])
    assert verify(step(), change(other.update())).status is VerificationStatus.MISMATCH


def test_few_entries_fit_any_batch_and_are_no_evidence_of_this_one() -> None:
    """The bias of two classes is (a, -a) for every batch."""
    every = frozenset(name for name, _ in tiny.bert().named_parameters())
    one = step(frozen=every - {"classifier.bias"})
    assert verify(one, scaled(one.update(), -1.0)).status is VerificationStatus.MISMATCH


def test_another_batch_is_a_mismatch() -> None:
    """Other words with the same labels; the note says how far off."""
    other = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["a fish and a horse", "never"], [1, 0])
    found = verify(step(), other.update())
    assert found.status is VerificationStatus.MISMATCH
    assert "cosine" in found.note


def test_nothing_is_a_mismatch() -> None:
    """An update of zeros comes from no batch."""
    found = verify(step(), scaled(step().update(), 0.0))
    assert found.status is VerificationStatus.MISMATCH and "all zero" in found.note


def test_a_loss_that_cannot_be_replayed_is_unverifiable() -> None:
    """With its reason; nothing is recomputed."""
    one = replace(step(), recipe=StepRecipe(loss="unsupported", note="label smoothing without attach(trainer)"))
    found = verify(one, {})
    assert found.status is VerificationStatus.UNVERIFIABLE
    assert found.note.startswith("not recomputed: ") and found.note.endswith("label smoothing without attach(trainer)")


def dropped_out(**recipe: Any) -> tuple[ClientStep, Update]:
    """Return a step with dropout that has its random state, and its update."""
    one = step(tiny.bert(dropout=0.1), training=True)
    kept = replace(
        one,
        truth=Truth((with_random_state(one.truth.micro_batches[0], 3),)),
        recipe=one.recipe.model_copy(update=recipe),
    )
    return kept, kept.update()


def test_dropout_without_its_random_state_is_unverifiable() -> None:
    """Verified with it."""
    one, update = dropped_out()
    assert verify(one, update).status is VerificationStatus.VERIFIED
    forgot = replace(one, truth=Truth((replace(one.truth.micro_batches[0], rng={}),)))
    found = verify(forgot, update)
    assert found.status is VerificationStatus.UNVERIFIABLE
    assert "the dropout masks cannot be drawn again" in found.note


@pytest.mark.parametrize("change", ["compiled", "another device"])
def test_a_random_state_that_does_not_repeat_the_dropout_is_no_mismatch(change: str) -> None:
    """Compiled dropout has its own generator, and a CPU cannot draw a GPU's masks."""
    _, update = dropped_out()
    one, _ = dropped_out(kept_rng=change != "compiled")
    rng = with_random_state(one.truth.micro_batches[0], 4).rng
    rng = {**rng, "cuda": torch.zeros(16, dtype=torch.uint8)} if change == "another device" else rng
    one = replace(one, truth=Truth((replace(one.truth.micro_batches[0], rng=rng),)))
    assert verify(one, update).status is VerificationStatus.UNVERIFIABLE


def test_another_dropout_mask_than_the_kept_one_is_a_mismatch() -> None:
    """A state was kept, and it does not explain the update."""
    one, update = dropped_out()
    other = replace(one, truth=Truth((with_random_state(one.truth.micro_batches[0], 4),)))
    assert verify(other, update).status is VerificationStatus.MISMATCH


@pytest.mark.parametrize("scale", [0.05, 1.0, 8.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("by", ["scale", "sigma"])
def test_noise_as_declared_is_noised(scale: float, frozen: bool, by: str) -> None:
    """The noise is declared in the update's units or relative to its RMS.

    Also with frozen embeddings.
    """
    model = tiny.bert()
    one = step(model, frozen=frozenset({tiny.word_table(model)}) if frozen else frozenset())
    update = one.update()
    sigma = scale * rms(update)
    declared = declaring(one, "gaussian-noise", **({"scale": scale} if by == "scale" else {"sigma": sigma}))
    found = verify(declared, noisy(update, sigma))
    assert found.status is VerificationStatus.NOISED
    assert found.sigma == pytest.approx(sigma, rel=0.05)


@pytest.mark.parametrize("scale", [0.05, 1.0, 8.0])
def test_noise_that_nobody_declared_is_a_mismatch(scale: float) -> None:
    """An attack that does not know it would be judged unfairly."""
    update = step().update()
    assert verify(step(), noisy(update, scale * rms(update))).status is VerificationStatus.MISMATCH


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25, 2.0])
def test_more_or_less_noise_than_declared_is_a_mismatch(factor: float) -> None:
    """A tenth is allowed."""
    one = step()
    update = one.update()
    found = verify(declaring(one, "gaussian-noise", scale=1.0), noisy(update, factor * rms(update)))
    assert found.status is VerificationStatus.MISMATCH


def test_noise_does_not_hide_another_batch() -> None:
    """Noise of the right size that removes the recomputed update is a mismatch."""
    one = step()
    update = one.update()
    other = scaled(update, -1.0)
    found = verify(declaring(one, "gaussian-noise", scale=8.0), noisy(other, 8.0 * rms(update)))
    assert found.status is VerificationStatus.MISMATCH


def test_declared_noise_that_is_not_there_is_said() -> None:
    """The update comes from the batch, and the defence does not work."""
    one = step()
    found = verify(declaring(one, "gaussian-noise", scale=1.0), one.update())
    assert found.status is VerificationStatus.VERIFIED
    assert found.note == "the declared gaussian-noise is not in the update: it was sent undefended"


def test_only_what_a_declared_pruning_left_is_compared() -> None:
    """Undeclared, the same update is a mismatch."""
    one = step()
    update = one.update()
    cut = torch.cat([value.abs().flatten() for value in update.values()]).quantile(0.9)
    pruned = {name: value * (value.abs() > cut) for name, value in update.items()}
    assert verify(declaring(one, "prune", share=0.9), pruned).status is VerificationStatus.VERIFIED
    assert verify(one, pruned).status is VerificationStatus.MISMATCH


# ---------------------------------------------------------------------- rounding is measured


def in_bf16(one: ClientStep) -> ClientStep:
    """Return the step under autocast."""
    return replace(one, recipe=one.recipe.model_copy(update={"autocast": "bf16"}))


def with_other_attention(one: ClientStep) -> ClientStep:
    """Return the step on a model with eager instead of fused attention."""
    model: Any = copy.deepcopy(one.model)
    model.set_attn_implementation("eager")
    return replace(one, model=model, recipe=one.recipe.model_copy(update={"attention": "eager"}))


@pytest.mark.parametrize(
    ("size", "change"), [(2e-5, lambda one: one), (5e-4, lambda one: one), (1e-2, in_bf16), (2e-2, in_bf16)]
)
def test_a_change_larger_than_measured_rounding_is_not_verified(
    size: float, change: Callable[[ClientStep], ClientStep]
) -> None:
    """Though another machine may round by so much."""
    one = change(step())
    update = one.update()
    found = verify(one, noisy(update, size * rms(update)))
    assert found.status is VerificationStatus.UNVERIFIABLE
    assert "another order of additions" in found.note


@pytest.mark.parametrize("change", [lambda one: one, in_bf16])
def test_another_attention_kernel_is_within_measured_rounding(
    change: Callable[[ClientStep], ClientStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if nothing is accepted without a measurement."""
    one = change(step())
    one = replace(one, recipe=one.recipe.model_copy(update={"attention": "sdpa"}))
    monkeypatch.setattr(accuracy, "TIGHT", {"bf16": 0.0})
    monkeypatch.setattr(accuracy, "FLOAT32_TIGHT", 0.0)
    found = verify(one, with_other_attention(one).update())
    assert found.relative_error
    assert (found.status, found.note) == (VerificationStatus.VERIFIED, "")


def test_a_small_secret_factor_is_said() -> None:
    """It was once taken for rounding."""
    found = verify(step(), scaled(step().update(), 1.0005))
    assert found.status is VerificationStatus.SCALED
    assert found.scale == pytest.approx(1.0005, abs=1e-6)


@pytest.mark.parametrize(
    ("factor", "size", "computed"), [(1.0, 0.0, 1), (0.5, 0.0, 1), (-1.0, 0.0, 1), (1.0, 5e-4, 2), (1.0, 0.1, 1)]
)
def test_the_second_order_is_computed_only_where_it_decides(
    factor: float, size: float, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs as much as the first one."""
    one = step()
    sent = noisy(scaled(one.update(), factor), size * rms(one.update()))
    update, calls = ClientStep.update, []

    def counted(self: ClientStep) -> Update:
        calls.append(self)
        return update(self)

    monkeypatch.setattr(ClientStep, "update", counted)
    verify(one, sent)
    assert len(calls) == computed


def test_a_gpus_step_on_a_cpu_keeps_the_wide_tolerance() -> None:
    """No order of additions on a CPU shows how a GPU rounds, and the note says so."""
    one = step()
    batch = with_random_state(one.truth.micro_batches[0], 3)
    batch = replace(batch, rng={**batch.rng, "cuda": torch.zeros(16, dtype=torch.uint8)})
    one = replace(one, truth=Truth((batch,)))
    update = one.update()
    found = verify(one, noisy(update, 5e-4 * rms(update)))
    assert found.status is VerificationStatus.VERIFIED
    assert found.note == "it was trained on cuda and is verified on cpu, so an error of up to 0.001 counts as rounding"
    assert verify(one, update).note == ""
    assert verify(one, noisy(update, 2e-3 * rms(update))).status is VerificationStatus.MISMATCH


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.03), ("tf32", 0.01)])
def test_a_precision_that_is_not_repeated_keeps_its_tolerance(dtype: str, tolerance: float) -> None:
    """The float32 model shows nothing of it, and the note says so."""
    one = step()
    update = one.update()
    off = noisy(update, 0.3 * tolerance * rms(update))
    assert verify(one, off).status is not VerificationStatus.VERIFIED
    found = verify(replace(one, facts=one.facts.model_copy(update={"dtype": dtype})), off)
    assert found.status is VerificationStatus.VERIFIED
    assert found.note.startswith(f"it was computed in {dtype}, which is not repeated here")
