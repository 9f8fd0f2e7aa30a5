"""Finds a classifier's output layer by structure, and reads the gradient of the logits out of its update.

Letters: B sequences, T tokens, H features going into the output layer, C classes.

For a linear output layer `z = W a + b` with mean cross-entropy over B sequences, the gradient of class c's logit is

    d_c = mean_k p_c(k) - n_c / B          (LLG, Wainakh et al. 2022, Eq. 9; n_c sequences of class c)

and the update of the layer is dW_c = mean_k d_c(k) a(k) (Eq. 12) and db_c = d_c. LLG and iDLG look at row sums of dW,
which have the sign of d_c only if the features a are non-negative (LLG, Property 1). In transformers they are not: a tanh
pooler's features have a sum of either sign, and those of a fresh LayerNorm sum to exactly 0. So the bias is read where it
is shared, because it is d_c itself; without one, the rows are projected on the mean feature of neutral inputs, which the
public model gives, instead of on the vector of ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.snapshot import Observation, PublicFacts

NEUTRAL_SEQUENCES = 32
"""Random sequences whose mean stands for what the model says about any input. Our choice: the mean of 32 is within a fifth of
one sequence's deviation, and they cost one forward pass."""

NEUTRAL_TOKENS = 12
"""Random tokens in each of them, special tokens aside. Our choice: a short sentence."""


@dataclass(frozen=True)
class OutputLayer:
    """The last linear layer of a classifier."""

    module: nn.Linear
    weight: str
    """Parameter name of the weight, (C, H); its update is shared."""
    bias: str | None
    """Parameter name of the bias, (C,); None where there is none or its update is not shared."""


@dataclass(frozen=True)
class Neutral:
    """What the public model does with inputs that have nothing to do with the batch."""

    features: Tensor
    """(N, H) what goes into the output layer, one row for each random sequence."""
    probabilities: Tensor
    """(C,) mean predicted probability of each class."""


def find_output_layer(seen: Observation) -> OutputLayer:
    """Find the last `nn.Linear` of the module tree that has one output for each class.

    Raises:
        AnatomyError: the task has no classes, the loss is not one cross-entropy a sequence, there is no such layer, or
            its update is not shared.
    """
    classes = number_of_classes(seen)
    layers = [m for m in seen.model.modules() if isinstance(m, nn.Linear) and m.out_features == classes]
    if not layers:
        raise AnatomyError(
            f"looked for a linear layer with {classes} outputs, one for each class, and found none; "
            "give the model's number of labels as it was trained"
        )
    names = {id(parameter): name for name, parameter in seen.model.named_parameters()}
    weight = names[id(layers[-1].weight)]
    bias = names.get(id(layers[-1].bias))
    if weight not in seen.update:
        raise AnatomyError(f"the output layer {weight!r} is frozen or its update is not shared")
    return OutputLayer(layers[-1], weight, bias if bias in seen.update else None)


def number_of_classes(seen: Observation) -> int:
    """Return C where every sequence has one class.

    Raises:
        AnatomyError: the task is another, or it is regression or multi-label classification.
    """
    facts, config = seen.facts, getattr(seen.model, "config", None)
    if facts.task != "classification" or facts.num_labels is None:
        raise AnatomyError(f"labels are one class a sequence in classification only; this task is {facts.task}")
    if facts.num_labels < 2 or getattr(config, "problem_type", None) == "regression":
        raise AnatomyError("this is a regression: its labels are no classes")
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise AnatomyError("this is multi-label classification: a sequence has no single class")
    return facts.num_labels


def check_gradient(facts: PublicFacts) -> None:
    """Refuse updates whose sign and size are not those of a gradient.

    Raises:
        AnatomyError: the update is a difference of weights after one or more optimizer steps.
    """
    if facts.view == "delta":
        raise AnatomyError(
            "the update is a difference of weights and not a gradient; its sign and size are the optimizer's"
        )


def logit_gradient(seen: Observation, layer: OutputLayer, neutral: Neutral) -> Tensor:
    """Return the gradient of the logits d, (C,) in float64, up to the error that the module's docstring explains.

    With a shared bias it is exact. Otherwise d_c is estimated by dW_c . m / |m|^2 with m the mean neutral feature: exact in
    sign where a sequence's feature has a positive inner product with m, and too small by their cosine.
    """
    if layer.bias is not None and bool(seen.update[layer.bias].any()):
        return seen.update[layer.bias].double()
    mean = neutral.features.double().mean(dim=0)  # (H,)
    return seen.update[layer.weight].double() @ mean / mean.square().sum().clamp_min(1e-30)  # (C,)


def neutral_outputs(seen: Observation, layer: OutputLayer, rng: torch.Generator) -> Neutral:
    """Run the public model on sequences of random tokens.

    Args:
        seen: gives model and vocabulary.
        layer: whose inputs are wanted.
        rng: draws the tokens; a CPU generator.
    """
    ids = _random_ids(seen, rng)
    inputs: list[Tensor] = []
    handle = layer.module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].detach()))
    try:
        with torch.no_grad():
            logits: Tensor = seen.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits  # (N, C)
            features = inputs[-1]
            if features.dim() == 3:  # a decoder's head runs on every token, and the model then picks one of them
                every = layer.module(features)  # (N, T, C)
                picked = (every - logits[:, None]).abs().sum(dim=2).argmin(dim=1)  # (N,)
                features = features[torch.arange(len(ids), device=ids.device), picked]
    finally:
        handle.remove()
    return Neutral(features=features, probabilities=logits.double().softmax(dim=1).mean(dim=0))


def _random_ids(seen: Observation, rng: torch.Generator) -> Tensor:
    """Return (N, T) token ids: random words between the tokens that the tokenizer puts around every text."""
    vocabulary = seen.facts.vocabulary
    words = torch.tensor([i for i in range(vocabulary.size) if i not in vocabulary.special_ids])
    room = vocabulary.max_length - len(vocabulary.starts_with) - len(vocabulary.ends_with)
    drawn = torch.randint(len(words), (NEUTRAL_SEQUENCES, max(1, min(NEUTRAL_TOKENS, room))), generator=rng)
    start, end = (
        torch.tensor(ids, dtype=torch.long).expand(NEUTRAL_SEQUENCES, -1)
        for ids in (vocabulary.starts_with, vocabulary.ends_with)
    )
    device = next(seen.model.parameters()).device
    return torch.cat([start, words[drawn], end], dim=1).to(device)
