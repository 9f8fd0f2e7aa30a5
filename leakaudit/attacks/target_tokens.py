"""`target-tokens`: the tokens that a language model was trained to predict.

They are read from the output layer's update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from leakaudit.algorithms.above_noise import against_above_noise
from leakaudit.algorithms.bag.token_head import find_token_head
from leakaudit.algorithms.embedding_rows import holds_earlier_rounds
from leakaudit.algorithms.gradient_estimate import divisor_of, only_bounded, rounding_of_update
from leakaudit.algorithms.labels.output_layer import neutral_inputs, noise_in
from leakaudit.models.structure.trace import inputs_of
from leakaudit.plugins import (
    APPLIES,
    FALSE_EVENTS,
    AnatomyError,
    Applicability,
    Budget,
    Goal,
    Observation,
    Reads,
    Reconstruction,
    attack,
    not_applicable,
)

SHARED_DIRECTION = 0.5
"""Least share of the features' energy in their mean at which the sign along the mean is test enough.
Measured: 0.05 in an untrained GPT-2, where features have little in common, and 0.9 after 60 steps."""

LONGER = 3.0
"""Least ratio of a target row's length to the lower quartile of all lengths, if features share no direction.
Lengths are divided by the token's probability. Our choice: the ratio is 8 or more for targets and below 1.3 for other
rows."""

ROUNDINGS = 4.0
"""Standard deviations of the rounding that a row has to point backwards by, where weights were sent. Our choice: two of 100,000 rows do so by
chance."""


@attack("target-tokens")
@dataclass(frozen=True)
class TargetTokens:
    """Bag of tokens from a head with one class for each token of the vocabulary.

    Row v of the head's update is mean_t (p_t(v) - [v is the target at t]) a_t over all positions t. Probabilities are
    never negative, so along a direction m that all features a_t share, only a target's row can point backwards (LLG,
    Property 1, with m in place of the vector of ones). Features of an untrained model share no direction. But in such a
    model every row without a target is p(v) times about the same vector, and a target's row is much longer. Neutral
    inputs give m and p.

    If the head is tied to the word embedding, the rows of input tokens change, too. These tokens also belong to the
    batch. The first token of a text is no target, so it is found only with a tied head. The targets of a masked
    language model are its masked words.

    Steps of Adam keep the signs of a row's entries and hide its length, so after several such steps only the direction of a
    row counts. If the optimizer kept its moments, tokens of earlier rounds are named as well; the diagnostic
    `earlier_rounds` is then 1.

    Under noise half of all rows point backwards by chance. So a row counts only if it points backwards by more than
    noise explains (`leakaudit.algorithms.above_noise`).
    """

    false_rows: float = 1.0
    """Under noise: how many of the V tokens may be named by chance, if other tokens are above the noise.
    Our choice: one wrong word. With noise alone, 99 of 100 updates name no token."""

    label: ClassVar[str] = "target tokens"
    meaning: ClassVar[str] = (
        "Reads which tokens a language model was trained to predict from the rows of its output layer's gradient."
    )
    goal: ClassVar[Goal] = "words"
    reads: ClassVar[Reads] = "direction"
    source: ClassVar[str] = (
        "LLG (Wainakh et al. 2022), Property 1, for tokens; the label set from an output layer as in RLG (Dang et al. 2021)"
    )
    false_event_rate: ClassVar[float] = FALSE_EVENTS
    threat_model: ClassVar[str] = "Sees one client's update and knows the weights; a language model's head is trained."

    def __post_init__(self) -> None:
        """Refuse a number of tokens that is not positive: it has no quantile."""
        if self.false_rows <= 0:
            raise ValueError(f"false_rows must be above 0, got {self.false_rows}")

    def applies(self, seen: Observation) -> Applicability:
        """Say whether the model has a shared head over its vocabulary."""
        try:
            find_token_head(seen)
        except AnatomyError as error:
            return not_applicable(str(error))
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Return the tokens without special ones, in ascending order of ids.

        Raises:
            AnatomyError: there is no such head.
        """
        head, name = find_token_head(seen)
        features, probabilities = _neutral(seen, head, rng)
        rows = seen.update[name].double()  # (V, D)
        mean = features.mean(dim=0)  # (D,)
        shared = float(mean.square().sum() / features.square().sum(dim=1).mean())
        backwards = -(rows @ mean)  # (V,), positive for targets
        noise = noise_in(seen, name)
        named = backwards > ROUNDINGS * _rounding(seen, name, mean)
        if noise > 0.0:
            named = against_above_noise(backwards, rows, mean, noise, self.false_rows)
        elif shared < SHARED_DIRECTION and not seen.only_a_direction:
            length = rows.norm(dim=1) / probabilities  # (V,)
            named = named | (length > LONGER * length.quantile(0.25))
        around = seen.facts.vocabulary.wordless_ids
        ids = [token for token in named.nonzero().flatten().tolist() if token not in around]
        facts = {
            "rows": float(len(ids)),
            "shared_direction": shared,
            "earlier_rounds": float(holds_earlier_rounds(seen)),
        }
        return Reconstruction(tokens=tuple(ids), diagnostics=facts)


def _rounding(seen: Observation, name: str, direction: Tensor) -> Tensor:
    """Return (V,) the error of each row's inner product with a direction.

    It comes from the rounding of weights. Entries of which only a sign and a least size are known count without error: their signs are right.
    """
    error = seen.error.get(name)
    if error is None and seen.facts.view == "delta":
        weight = dict(seen.model.named_parameters())[name].detach()
        error = rounding_of_update(
            weight, seen.facts.learning_rate or 0.0, seen.facts.local_steps, divisor_of(seen.facts)
        )
    if error is None:
        return torch.zeros(len(seen.update[name]), dtype=torch.float64, device=direction.device)
    certain = error.double() * ~only_bounded(seen, name)
    return (certain.square() @ direction.square()).sqrt()


def _neutral(seen: Observation, head: nn.Linear, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return features and mean predictions of neutral inputs, float64.

    Returns:
        (N, D) features at all positions, and (V,) probabilities.
    """
    with inputs_of(head) as taken, torch.no_grad():
        logits: Tensor = seen.model(**neutral_inputs(seen, rng)).logits  # (B, T, V)
    return taken[-1].double().flatten(0, 1), logits.double().softmax(dim=2).flatten(0, 1).mean(dim=0)
