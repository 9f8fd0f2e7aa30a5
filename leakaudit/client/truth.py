"""The truth: the private batch of one client's step.

Only scoring, verification and defences may see it; attacks never see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from leakaudit.client.facts import IGNORED_LABEL, PublicFacts
from leakaudit.client.sequences import PLAIN, Reading, Text, texts_of, texts_read


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of the step."""

    inputs: Mapping[str, Tensor]
    """Keyword arguments of the model's forward, labels included.

    `input_ids` is (B, T), or (B, choices, T) for multiple choice.
    """
    rng: Mapping[str, Tensor] = field(default_factory=dict)
    """Device type -> state of its random generator before the forward pass.

    Empty if it was not recorded.
    """
    num_items: Tensor | None = None
    """The trainer's `num_items_in_batch`; None if it passed none."""
    options: Mapping[str, bool | float] = field(default_factory=dict)
    """Arguments of the model's forward that are not tensors."""
    withheld_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the batch that the trainer did not pass to the model.

    An example is labels for a loss that the trainer computes.
    """
    output_gradients: Mapping[str, Tensor] = field(default_factory=dict)
    """Path of an output of the model -> gradient of the client's loss there.

    It includes the factors of accumulation and of loss weights. If the model computes the loss, the path is `loss` and the gradient is one
    number. Empty if no gradient was recorded.
    """
    repeated_pass: bool = False
    """Whether it repeats the tokens of another micro-batch (R-Drop).

    Such a pass is part of the step, but adds no texts to the batch.
    """

    entities: tuple[tuple[str, ...] | None, ...] = field(default=(), repr=False)
    """Named entities of each sequence, as the data spells them; None for a sequence of which nobody named any.

    Empty if the data names no entities. They are private, and no model gets them.
    """

    @property
    def labels(self) -> Tensor | None:
        """The labels, passed to the model or not; None if they are unknown."""
        return self.inputs.get("labels", self.withheld_inputs.get("labels"))

    @property
    def unlabelled(self) -> bool:
        """Whether the trainer had labels, but not for the texts of this pass."""
        kept = self.withheld_inputs.get("labels")
        rows = self.inputs["input_ids"].shape[:-1].numel()
        return "labels" not in self.inputs and kept is not None and len(kept) == 0 and rows > 0


@dataclass(frozen=True)
class Truth:
    """The private batch. Only scoring, verification and defences may see it."""

    micro_batches: tuple[MicroBatch, ...]
    reading: Reading = PLAIN
    """How texts are read from the tensors; this is public."""
    optimizer_state: Mapping[str, Tensor] = field(default_factory=dict)
    """`parameter/key` -> state of the client's optimizer before its local steps.

    Empty if it had none, and for an update that is no difference of weights. See `leakaudit.client.local_steps.state_tensors`.
    """
    trace: Mapping[str, Tensor] = field(default_factory=dict)
    """`moment/parameter` -> (K, n) float32, a few entries at the moments of `leakaudit.client.trace`; empty if none were noted."""

    def texts(self) -> list[Text]:
        """Return every text of the batch.

        Each micro-batch gives first the texts that the model read, then the texts that its decoder had to write.
        """
        return [text for batch in self._distinct() for text in texts_of(batch.inputs, batch.labels, self.reading)]

    def sequences(self) -> list[tuple[int, ...]]:
        """Return the token ids of every text of the batch without padding.

        Special tokens are included, and masked words are filled in. Each text of a multiple choice and each target of a decoder is a
        sequence.
        """
        return [text.ids for text in self.texts()]

    def entities(self) -> list[tuple[str, ...] | None]:
        """Return the named entities of every text of the batch.

        The order is that of `texts`. None for a text of which the data names no entities.
        """
        found: list[tuple[str, ...] | None] = []
        for batch in self._distinct():
            texts = len(texts_of(batch.inputs, batch.labels, self.reading))
            found += batch.entities if len(batch.entities) == texts else [None] * texts
        return found

    def examples(self) -> int:
        """Return the number of sequences that the model read.

        A bound on the batch size limits this number.
        """
        return sum(len(texts_read(batch.inputs, batch.labels, self.reading)) for batch in self._distinct())

    def labels(self) -> list[int] | None:
        """Return the class of every sequence, or None.

        None means that there is not exactly one class for each sequence.

        Sequences with `IGNORED_LABEL` and passes over texts for which the trainer had no labels (FixMatch) add no class.
        """
        found: list[int] = []
        known = False
        for batch in self._distinct():
            labels = batch.labels
            if labels is None or labels.dim() != 1 or labels.dtype.is_floating_point:
                return None
            if batch.unlabelled:
                continue
            if len(labels) != len(texts_read(batch.inputs, labels, self.reading)):
                return None  # such as one label for two texts that are compared
            known = True
            found += [int(label) for label in labels if label != IGNORED_LABEL]
        return found if known else None

    def _distinct(self) -> list[MicroBatch]:
        """Return the micro-batches that hold sequences of their own."""
        return [batch for batch in self.micro_batches if not batch.repeated_pass]

    def to(self, device: torch.device) -> Truth:
        """Return this batch on `device`.

        Random states stay on the CPU, because generators read them there.
        """

        def move(batch: MicroBatch) -> MicroBatch:
            items = None if batch.num_items is None else batch.num_items.to(device)
            moved: Any = {
                part: {name: value.to(device) for name, value in getattr(batch, part).items()}
                for part in ("inputs", "withheld_inputs", "output_gradients")
            }
            return replace(batch, **moved, num_items=items)

        state = {name: value.to(device) for name, value in self.optimizer_state.items()}
        trace = {name: value.to(device) for name, value in self.trace.items()}
        batches = tuple(move(batch) for batch in self.micro_batches)
        return replace(self, micro_batches=batches, optimizer_state=state, trace=trace)


def reading_of(facts: PublicFacts) -> Reading:
    """Return how the batches of a step are read as texts, given its facts."""
    special, after = facts.vocabulary.special, facts.vocabulary.ends_with
    pad = special.get("pad")
    return Reading(task=facts.task, pad=pad, pad_ends_texts=pad is not None and pad in (special.get("eos"), *after))
