"""The tensors of a model before a round, to tell which of the sent ones changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.capture.observing.optimizers import base_optimizers, parameters_of
from leakaudit.client.facts import DeclaredDefense
from leakaudit.models.array_classifier import ArrayClassifier
from leakaudit.models.wrappers import plain_name
from leakaudit.storage.frozen_weights import FrozenWeights
from leakaudit.storage.round_tensors import RoundTensors, UnmovedTensor

PEFT_PREFIX = "base_model.model."
"""Prefix that a `PeftModel` adds to the names of the model inside it."""
ARRAY_PREFIX = "net."
"""Prefix that an `ArrayClassifier` adds to the names of the classifier inside it."""


@dataclass(frozen=True)
class BeforeRound:
    """What the optimizer moves in a round, and everything else as it was before it."""

    trained: Mapping[str, torch.Size]
    """Name -> shape of each parameter that the optimizer moves; tied ones once."""
    frozen: FrozenWeights
    """All other parameters: references, with fingerprints from before the round."""
    buffers: Mapping[str, Tensor]
    """Name -> copy of each buffer."""
    known: Mapping[str, str]
    """Name that a client may use -> name in `trained`, `frozen` or `buffers`."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any) -> BeforeRound:
        """Look at a model whose round begins.

        Args:
            model: without wrappers.
            optimizer: of the training, with any wrappers.
        """
        moved = {id(p) for mover in base_optimizers(optimizer) for p in parameters_of(mover) if p.requires_grad}
        parameters = {plain_name(name): p for name, p in model.named_parameters()}
        return cls(
            trained={name: p.shape for name, p in parameters.items() if id(p) in moved},
            frozen=FrozenWeights.of((name, p) for name, p in parameters.items() if id(p) not in moved),
            buffers={plain_name(name): b.detach().clone() for name, b in model.named_buffers()},
            known=dict(_known(model)),
        )

    def listed(self, own: tuple[DeclaredDefense, ...], declared: tuple[DeclaredDefense, ...]) -> RoundTensors:
        """Return the list of these tensors, for another process; it reads all their bytes.

        Frozen parameters that changed since are left out.

        Args:
            own: declared defences that are in the produced update already.
            declared: declared defences that the sent update goes through after that.
        """
        frozen = {n: t for n, t in self.frozen.tensors.items() if self.frozen.is_unchanged(n)}
        return RoundTensors(
            trained={name: tuple(shape) for name, shape in self.trained.items()},
            unmoved={name: UnmovedTensor.of(tensor) for name, tensor in (frozen | dict(self.buffers)).items()},
            known=dict(self.known),
            own=own,
            declared=declared,
        )

    def as_before(self, name: str, sent: Tensor, *, differences: bool) -> bool:
        """Return whether a sent tensor is one that the round left as it was.

        Args:
            name: of a frozen parameter or a buffer, as `known` says.
            sent: its value, or its difference from the one before the round.
            differences: which of both.
        """
        if name in self.buffers:
            before = self.buffers[name]
        elif name in self.frozen.tensors:
            before = self.frozen.tensors[name]
            if not self.frozen.is_unchanged(name):
                return False
        else:
            return False
        if sent.shape != before.shape:
            return False
        return not bool(sent.any()) if differences else torch.equal(sent.to("cpu"), before.to("cpu", sent.dtype))


def _known(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each name that a client may use, with the first name of its tensor."""
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for given, tensor in tensors:
        name = first.setdefault(id(tensor), plain_name(given))
        for alias in aliases(plain_name(given)):
            yield alias, name
    if isinstance(model, ArrayClassifier):  # the client knows its own classifier; its names come last, so they hold
        for given, tensor in tensors:
            if given.startswith(ARRAY_PREFIX):
                for alias in aliases(plain_name(given.removeprefix(ARRAY_PREFIX))):
                    yield alias, first[id(tensor)]


def aliases(name: str) -> list[str]:
    """Return the names that a parameter has in the state dicts of a client.

    `peft` saves adapters, and modules that are trained as a whole beside them, without their name, and adds a prefix.

    >>> aliases("h.0.lora_A.default.weight")[-1]
    'base_model.model.h.0.lora_A.weight'
    >>> aliases("lm_head.modules_to_save.default.weight")[-1]
    'base_model.model.lm_head.weight'
    """
    short = name.replace(".modules_to_save.default.", ".").replace(".default.", ".").removesuffix(".default")
    return [name, PEFT_PREFIX + name, short, PEFT_PREFIX + short]
