"""`tag`: gradient matching by the L2 and the L1 distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from leakaudit.algorithms.matching.objective import Objective
from leakaudit.algorithms.matching.options import check_knobs
from leakaudit.algorithms.matching.plain import PLAIN_PRESETS, PlainMatching, PlainPreset, PlainSettings
from leakaudit.algorithms.matching.run import reconstruct_by_matching
from leakaudit.plugins import Budget, Observation, Reconstruction, attack


@attack("tag")
@dataclass(frozen=True)
class Tag(PlainMatching):
    """Search for embeddings x with the observed gradient by L2 and L1 distance.

    Minimises sum_i ||G_i - g_i(x)||_2 + alpha ||G_i - g_i(x)||_1 over the shared parameters i by Adam, then
    takes the nearest tokens. `preset=released` and the default square the L2 norms, as DLG does (Zhu et al. 2019). The
    default is chosen on training sentences. The word embedding's own update is left out: it says nothing about a candidate that is given
    as embeddings. Gradients that are only rounding, such as a key's bias, are left out as well.

    The shape of the batch is guessed, unless it is granted (`batch_shape`): the number of sequences, their lengths,
    and the tokens that the tokenizer adds to every text, which stay fixed. Labels are optimised together with the
    embeddings or enumerated.

    Of a causal language model the labels are the text itself, one place earlier. Those of embeddings are optimised at every place
    in `preset=paper`, and follow the embeddings in the default (`next_tokens`).

    Unless `aware` is off, declared pruning is filled in, declared noise is removed, and under declared clipping both
    gradients are compared at the same length. Dropout is not modelled: against a step in training mode the gradient
    is only similar. A difference of weights over local steps is taken for the mean gradient of all their sequences
    (LAMP, Sec. 5, "Attacking FedAvg").
    """

    alpha: float = 0.01
    """Weight of the L1 term (LAMP, App. D)."""

    label: ClassVar[str] = "TAG"
    meaning: ClassVar[str] = "Searches for inputs whose gradient is near the observed one, by the L2 and L1 distances."
    presets: ClassVar[Mapping[PlainPreset, PlainSettings]] = {
        **PLAIN_PRESETS,
        "large": replace(PLAIN_PRESETS["large"], learning_rate=0.01, label_step=0.01),
    }
    source: ClassVar[str] = "TAG (Deng et al. 2021) as in LAMP (Balunovic et al. 2022), Sec. 4.2 and 5, App. D"

    def __post_init__(self) -> None:
        """Refuse options that are out of range."""
        super().__post_init__()
        check_knobs(self, not_negative=("alpha",))

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Match gradients until nothing improves, or the steps or the budget are used up."""
        return reconstruct_by_matching(seen, self.recipe(Objective("l2", l1=self.alpha)), rng, budget)
