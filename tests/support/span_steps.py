"""Steps on small models with known attention inputs, for tests of `span`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakaudit.client.step import ClientStep
from leakaudit.models.structure import input_stage_of
from tests.support import tiny

TEXTS = ["the old dog chased a red cat", "one bird saw two fish today"]


def generator(seed: int = 0) -> torch.Generator:
    """Return a generator with a fixed seed."""
    return torch.Generator().manual_seed(seed)


def trained_looking(model: nn.Module) -> nn.Module:
    """Give every bias and gain a value of its own; 0 and 1 would hide mistakes."""
    draws = generator(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=draws))
    return model


def span_step(kind: str, count: int = 2) -> ClientStep:
    """Return a step of a small `BERT` or `GPT-2` classifier on the first texts."""
    if kind == "BERT":
        return tiny.client_step(trained_looking(tiny.bert()), tiny.bert_tokenizer(), TEXTS[:count])
    model = trained_looking(tiny.gpt2_classifier())
    return tiny.client_step(model, tiny.gpt2_tokenizer(), TEXTS[:count])


def true_inputs(step: ClientStep) -> Tensor:
    """Return the (n, D) attention inputs of all real tokens."""
    ids = [token for sequence in step.truth.sequences() for token in sequence]
    positions = [position for sequence in step.truth.sequences() for position in range(len(sequence))]
    stage = input_stage_of(step.model, tiny.POSITIONS)
    return stage.inputs(torch.tensor(ids), torch.tensor(positions))
