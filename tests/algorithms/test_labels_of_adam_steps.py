"""Label attacks on differences of weights of other optimizers than SGD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.algorithms.gradient_estimate import as_gradient, only_bounded
from leakaudit.algorithms.labels.counts import expected_sizes
from leakaudit.algorithms.labels.output_layer import find_output_layer, logit_gradient, neutral_outputs
from leakaudit.audit.attempt import readable
from leakaudit.client.observation import Observation
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attacks
from tests.support import tiny
from tests.support.optimizer_steps import difference_step

TEXTS = ["the dog saw a bird", "a cat", "the old tree", "a fish ate one"]
LABELS = [0, 1, 1, 1]


def _classifier() -> torch.nn.Module:
    return tiny.bert(num_labels=3)


def _counts(name: str, seen: Observation, **knobs: Any) -> tuple[int, ...] | None:
    read, fits = readable(attacks.create(name, knobs), seen)
    assert fits, fits.reason
    found: tuple[int, ...] | None = attacks.create(name, knobs)(
        read, torch.Generator().manual_seed(0), Budget(60)
    ).label_counts
    return found


def test_the_head_of_a_first_step_of_adam_tells_signs_and_no_sizes() -> None:
    """A gradient of 0.3 is far above what float32 can hold of a bounded step."""
    seen, _ = as_gradient(difference_step("AdamW", [TEXTS], [LABELS], model=_classifier()).observe())
    assert bool(only_bounded(seen, "classifier.bias").all())


def test_other_biases_tell_the_gradient_of_the_logits() -> None:
    """The same step without an optimizer shows it in the bias."""
    model = _classifier()
    true = tiny.observe(TEXTS, LABELS, model=model).update["classifier.bias"].double()
    seen, _ = as_gradient(difference_step("AdamW", [TEXTS], [LABELS], model=model).observe())
    layer = find_output_layer(seen)
    found = logit_gradient(seen, layer, neutral_outputs(seen, layer, torch.Generator().manual_seed(0)))
    assert float((found - true).abs().max()) < 0.25 / len(TEXTS)  # half a sequence is 0.5 / B
    assert abs(float(found.sum())) < 1e-3


@pytest.mark.parametrize("rate", [5e-5, 1e-3])
@pytest.mark.parametrize("name", ["llg-star", "ilrg", "rlu"])
def test_counts_are_right_after_one_step_of_adam(name: str, rate: float) -> None:
    """Four sequences of three classes, one of them absent."""
    step = difference_step("AdamW", [TEXTS], [LABELS], model=_classifier(), rate=rate, batch_size_bound=4)
    assert _counts(name, step.observe()) == (1, 3, 0)


def test_idlg_names_the_label_of_one_sequence_after_one_step_of_adam() -> None:
    """The sign of a step of Adam is the sign of the gradient."""
    assert _counts("idlg", difference_step("AdamW", [TEXTS[:1]], [[2]], model=_classifier()).observe()) == (0, 0, 1)


@pytest.mark.parametrize("name", ["llg", "llg-star", "ilrg", "rlu"])
@pytest.mark.parametrize("steps", [1, 3])
def test_counts_are_right_after_steps_with_momentum(name: str, steps: int) -> None:
    """Equal batches, so that a weighted mean is their mean."""
    batches, labels = [TEXTS] * steps, [LABELS] * steps
    step = difference_step("momentum", batches, labels, model=_classifier(), batch_size_bound=4)
    assert _counts(name, step.observe()) == (steps, 3 * steps, 0)


def test_several_steps_of_adam_are_counted_by_simulation() -> None:
    """The counts of twelve sequences are right within two."""
    batches, labels = [TEXTS] * 3, [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    step = difference_step("AdamW", batches, labels, model=_classifier(), batch_size_bound=4)
    counts = _counts("rlu", step.observe())
    assert counts is not None and sum(counts) == 12
    assert all(abs(found - true) <= 2 for found, true in zip(counts, (3, 9, 0), strict=True))


@pytest.mark.parametrize("name", ["idlg", "llg", "llg-star", "ilrg"])
def test_attacks_on_gradients_refuse_several_steps_of_adam(name: str) -> None:
    """The reason names the optimizer and the number of steps."""
    seen = difference_step("AdamW", [TEXTS] * 3, [LABELS] * 3, model=_classifier()).observe()
    _, fits = readable(attacks.create(name, {}), seen)
    assert not fits and "3 steps of AdamW leave no gradient" in fits.reason


def test_rlu_refuses_moments_of_earlier_rounds() -> None:
    """They move the bias as labels do."""
    seen = difference_step("AdamW", [TEXTS], [LABELS], model=_classifier(), kept=["one two"]).observe()
    _, fits = readable(attacks.create("rlu", {}), seen)
    assert not fits and "earlier rounds" in fits.reason


def test_gradient_mixture_counts_after_one_step_of_adam(tmp_path: Path) -> None:
    """The known examples are the client's, so one mixture explains the update."""
    from leakaudit.client.batches import make_batch
    from leakaudit.models.array_classifier import save_auxiliary

    batch = make_batch(tiny.bert_tokenizer(), TEXTS * 3, [c for c in range(3) for _ in TEXTS], "classification", 32)
    path = tmp_path / "auxiliary.safetensors"
    save_auxiliary(path, {key: batch.inputs[key] for key in ("input_ids", "attention_mask")}, batch.inputs["labels"])
    step = difference_step("AdamW", [TEXTS], [LABELS], model=_classifier(), batch_size_bound=4)
    counts = _counts("gradient-mixture", step.observe(), auxiliary=str(path))
    assert counts is not None and abs(counts[1] - 3) <= 1


def test_a_sign_stands_for_the_mean_of_the_counts_that_it_allows() -> None:
    """Three or four of four labels, with weights 4 and 1: 3.2 on average."""
    sizes = expected_sizes(torch.tensor([-0.04, 0.04]).double(), torch.tensor([True, True]), 4)
    assert sizes.tolist() == pytest.approx([0.5 - 0.8, 0.5 - 0.2])
