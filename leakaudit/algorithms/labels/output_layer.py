"""The gradient of the logits, read from the output layer's update.

The output layer is found by its structure, not by its name.

Letters: B sequences, T tokens, H inputs (features) of the output layer, C classes.

For a linear output layer `z = W a + b` with mean cross-entropy over B sequences, the gradient of class c's logit is

    d_c = mean_k p_c(k) - n_c / B          (LLG, Wainakh et al. 2022, Eq. 9; n_c sequences of class c)

and the update of the layer is dW_c = mean_k d_c(k) a(k) (Eq. 12) and db_c = d_c. LLG and iDLG use row sums of dW,
which have the sign of d_c only if the features a are non-negative (LLG, Property 1). In transformers they are not: the sum of a tanh
pooler's features has either sign, and the features of a new LayerNorm add up to exactly 0. So the bias's update is read if it is shared,
because it is d_c itself. Without it, the rows are not projected on the vector of ones, but on the mean feature of neutral inputs, which the
public model gives. An attack that uses no model projects the rows on their own main direction, which the features have in common.

Under declared noise, a bias entry is one noisy number, and its row of the weight's update holds H more. The two estimates are weighed by
their errors. If a declared defence set a bias entry to zero, it is computed from the others, because all entries add up to 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from leakaudit.algorithms.gradient_estimate import only_bounded
from leakaudit.algorithms.labels.head_loss import head_loss
from leakaudit.algorithms.labels.logit_regression import EXAMPLES, regressed_gradient
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.array_classifier import ArrayClassifier
from leakaudit.models.structure import find_output_head, head_outputs

NEUTRAL_SEQUENCES = 32
"""Number of random sequences whose mean estimates the model's output for any input. Our choice: the error of a mean of 32 is within a
fifth of one sequence's deviation, and they cost one forward pass."""

NEUTRAL_TOKENS = 12
"""Random tokens in each of these sequences, without special tokens. Our choice: a short sentence."""

ROUNDED = 0.02
"""Largest column sums of an output layer's update that count as rounding, as a share of the update. Our choice: bf16 gives 0.004, and
noise as large as the update gives 1."""


@dataclass(frozen=True)
class OutputLayer:
    """The last linear layer of a classifier."""

    module: nn.Linear
    weight: str
    """Parameter name of the weight, (C, H); its update is shared."""
    bias: str | None
    """Parameter name of the bias, (C,); None if the layer has no bias, or its update is not shared."""


@dataclass(frozen=True)
class Neutral:
    """Outputs of the public model for inputs that have nothing to do with the batch."""

    features: Tensor
    """(N, H) inputs of the output layer, one row for each neutral input."""
    probabilities: Tensor
    """(C,) mean predicted probability of each class."""

    @property
    def positive(self) -> bool:
        """Whether no feature is negative, as LLG's Property 1 requires."""
        return bool((self.features >= 0).all())


NeutralInputs = Literal["random", "zeros", "ones"]
"""Neutral inputs of a white-box adversary: random words or pixels, or black or white pictures (LLG, Sec. 6.1)."""


def find_output_layer(seen: Observation, *, frozen: bool = False) -> OutputLayer:
    """Find the last `nn.Linear` with one output for each class.

    Args:
        seen: the observation.
        frozen: also accept a layer whose update is not shared.

    Raises:
        AnatomyError: the task has no classes, the loss is not one cross-entropy for each sequence, there is no such layer, or
            its update is not shared.
    """
    classes = number_of_classes(seen)
    head = find_output_head(seen.model, classes)
    names = {id(parameter): name for name, parameter in seen.model.named_parameters()}
    weight = names[id(head.weight)]
    bias = names.get(id(head.bias))
    if weight not in seen.update and not frozen:
        raise AnatomyError(f"the output layer {weight!r} is frozen or its update is not shared")
    return OutputLayer(head, weight, bias if bias in seen.update else None)


def number_of_classes(seen: Observation) -> int:
    """Return C, the number of classes; each sequence has one class.

    Raises:
        AnatomyError: it is another task, such as regression or multi-label classification.
    """
    facts, config = seen.facts, getattr(seen.model, "config", None)
    if facts.task != "classification" or facts.num_labels is None:
        raise AnatomyError(f"labels are one class a sequence in classification only; this task is {facts.task}")
    if facts.num_labels < 2 or getattr(config, "problem_type", None) == "regression":
        raise AnatomyError("this is a regression, or has one class only: its labels are not classes")
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise AnatomyError("this is multi-label classification: a sequence has no single class")
    head_loss(seen)
    return facts.num_labels


def check_gradient(seen: Observation) -> None:
    """Refuse updates whose sign and size are not those of a gradient.

    Raises:
        AnatomyError: the update is a difference of weights after one or more optimizer steps, or an estimate of a gradient in which only
            signs and least sizes of some entries are known.
    """
    if any(bool(only_bounded(seen, name).any()) for name in seen.error):
        raise AnatomyError(
            "the gradient was computed from a bounded step of the optimizer, which tells only the signs of its large entries"
        )
    if seen.facts.view == "delta" or seen.facts.local_steps > 1:
        raise AnatomyError(
            "the update is a difference of weights and not a gradient; its sign and size are the optimizer's"
        )


def logit_gradient(seen: Observation, layer: OutputLayer, neutral: Neutral) -> Tensor:
    """Return the gradient of the logits d, (C,) in float64.

    With a shared bias and no noise it is exact. If the update is an estimate in which its entries are only bounded, those of other parameters tell d (see
    `logit_regression`). Otherwise d_c is estimated by dW_c . m / |m|^2, where m is the mean neutral feature. The
    sign of the estimate is right if a sequence's feature has a positive inner product with m. Its size is too small by their cosine.
    """
    if _sizes_are_lost(seen, layer):
        found = regressed_gradient(
            seen, layer.bias, neutral_inputs(seen, torch.Generator().manual_seed(0), examples=EXAMPLES)
        )
        if found is not None:
            return found
    mean = neutral.features.double().mean(dim=0)  # (H,)
    length = mean.square().sum().clamp_min(1e-30)
    projected = seen.update[layer.weight].double() @ mean / length  # (C,)
    bias = bias_gradient(seen, layer)
    if bias is None:
        return projected
    noise, below = seen.noise_level.of(layer.bias), seen.noise_level.of(layer.weight)
    if noise == 0.0:
        return bias
    # Both estimate d_c. The bias has the error of the noise; the projection has less noise, and the error of the features' spread.
    spread = (neutral.features.double() @ mean / length).std() * bias.square().mean().sqrt()
    weight = noise**2 / (noise**2 + below**2 / length + spread**2)
    return (1 - weight) * bias + weight * projected


def logits_told_by(seen: Observation, layer: OutputLayer) -> dict[str, float]:
    """Return the parameter from which `logit_gradient` reads, with the share 1.

    Empty if it reads several.
    """
    if _sizes_are_lost(seen, layer):
        return {}
    if layer.bias is None or bias_gradient(seen, layer) is None:
        return {layer.weight: 1.0}
    return {layer.bias: 1.0} if seen.noise_level.of(layer.bias) == 0.0 else {}


def _sizes_are_lost(seen: Observation, layer: OutputLayer) -> bool:
    """Return whether the output layer's own entries do not tell the gradient's size."""
    own = layer.weight if layer.bias is None else layer.bias
    return bool(only_bounded(seen, own).any())


def bias_gradient(seen: Observation, layer: OutputLayer) -> Tensor | None:
    """Return (C,) the bias's update in float64; None if it was not sent.

    All entries add up to 0. If a declared defence set entries to zero, they share minus the sum of the others equally.
    """
    if layer.bias is None or not bool(seen.update[layer.bias].any()):
        return None
    gradient = seen.update[layer.bias].double()
    pruned = gradient == 0
    if seen.zeroed and bool(pruned.any()):
        gradient = torch.where(pruned, -gradient.sum() / pruned.sum(), gradient)
    return gradient


def noise_in(seen: Observation, weight: str, bias: str | None = None) -> float:
    """Return the standard deviation of the noise on an output layer's update.

    The gradient of a softmax's logits adds up to 0 over the classes, and so does every column of the weight's update. A sum that is not 0
    shows rounding, or noise that was not declared. Declared defences and tied weights may also change the sum, so the
    declared noise is then returned.

    Args:
        seen: the observation.
        weight: name of the layer's weight (C, H), which has an update; the layer has no other use.
        bias: name of its bias, if that is read as well.
    """
    declared = seen.noise_level.of(weight, bias)
    if declared > 0.0 or seen.facts.defenses or seen.facts.tied or seen.sent is not None:
        return declared  # columns of an estimate need not add up to 0
    rows = seen.update[weight]
    left = float(rows.double().sum(dim=0).square().mean().sqrt()) / math.sqrt(len(rows))
    return left if left > ROUNDED * float(rows.double().square().mean().sqrt()) else 0.0


def own_direction(seen: Observation, layer: OutputLayer) -> Tensor:
    """Return (C,) the logits' gradient up to a positive factor, without the model.

    dW = sum_k d(k) a(k)^T has nearly rank one if the features have a common part, and d is its main left direction. This leaves the sign
    open. A label makes one entry clearly negative and many entries slightly positive, so we assume that the largest entry is negative.
    """
    left, strength, _ = torch.linalg.svd(seen.update[layer.weight].double(), full_matrices=False)
    main = left[:, 0] * strength[0]
    flipped: Tensor = -main
    return flipped if bool(main[main.abs().argmax()] > 0) else main


def neutral_outputs(
    seen: Observation, layer: OutputLayer, rng: torch.Generator, dummy: NeutralInputs = "random"
) -> Neutral:
    """Run the public model on random tokens, or on dummy pictures.

    Args:
        seen: gives model and vocabulary.
        layer: the layer whose inputs are returned as features.
        rng: draws the inputs; a CPU generator.
        dummy: kind of pictures. Text is always random.
    """
    features, logits = head_outputs(seen.model, layer.module, neutral_inputs(seen, rng, dummy))
    return Neutral(features=features, probabilities=logits.double().softmax(dim=1).mean(dim=0))


def neutral_inputs(
    seen: Observation, rng: torch.Generator, dummy: NeutralInputs = "random", examples: int = NEUTRAL_SEQUENCES
) -> dict[str, Tensor]:
    """Return neutral inputs as keyword arguments of the model's forward.

    They lie on the model's device.
    """
    device = next(seen.model.parameters()).device
    if isinstance(seen.model, ArrayClassifier):
        shape = (examples, *(seen.facts.input_shape or ()))
        drawn = torch.rand(shape, generator=rng) if dummy == "random" else torch.full(shape, float(dummy == "ones"))
        return {"inputs": drawn.to(device)}
    ids = _random_ids(seen, rng, examples).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _random_ids(seen: Observation, rng: torch.Generator, examples: int) -> Tensor:
    """Return (N, T) ids of random words between a tokenizer's special tokens."""
    vocabulary = seen.facts.vocabulary
    words = torch.tensor([i for i in range(vocabulary.size) if i not in vocabulary.special_ids])
    room = vocabulary.max_length - len(vocabulary.starts_with) - len(vocabulary.ends_with)
    drawn = torch.randint(len(words), (examples, max(1, min(NEUTRAL_TOKENS, room))), generator=rng)
    start, end = (
        torch.tensor(ids, dtype=torch.long).expand(examples, -1)
        for ids in (vocabulary.starts_with, vocabulary.ends_with)
    )
    return torch.cat([start, words[drawn], end], dim=1)
