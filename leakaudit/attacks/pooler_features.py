"""`pooler-features`: an active server reads features at a wide pooler.

A search then matches these features and the gradient.

Letters: N candidates, B sequences, T tokens, D hidden size, F features compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from leakaudit.algorithms.labels.output_layer import check_gradient, neutral_inputs, number_of_classes
from leakaudit.algorithms.matching.batch_shape import guess_shape
from leakaudit.algorithms.matching.feature_matcher import FeatureMatcher, Phase
from leakaudit.algorithms.matching.lamp import COSINE_PRESETS, Lamp, Preset, Settings
from leakaudit.algorithms.matching.objective import Objective
from leakaudit.algorithms.matching.options import check_knobs, with_knobs
from leakaudit.algorithms.matching.pooler_moments import (
    Features,
    PoolerUpdate,
    features_by_tensor,
    features_in_span,
    features_solved,
    signed,
)
from leakaudit.algorithms.matching.run import Recipe, reconstruct
from leakaudit.algorithms.matching.search import Found, search
from leakaudit.algorithms.precision import in_single_precision
from leakaudit.models.structure import find_pooler
from leakaudit.models.structure.trace import inputs_of
from leakaudit.plugins import AnatomyError, Applicability, Budget, Observation, Reconstruction, attack, not_applicable

Read = Literal["solve", "span", "paper"]


SERVER = "wide-pooler"
"""Name of the active server that this attack needs."""


LENGTHS = (1.0, 0.8, 1.25)
"""Lengths of the features from which the equations are solved, relative to the mean length for random texts. Our choice."""


@dataclass(frozen=True)
class Reading:
    """How features are read and used."""

    read: Read
    phase: Phase
    feature_words: int
    attempts: int


OWN = Reading(read="solve", phase="words", feature_words=32, attempts=3)
"""How our own presets read and use features."""


PUBLISHED = Reading(read="paper", phase="continuous", feature_words=0, attempts=1)
"""How `preset=paper` and `large` read and use features.
Source: Beyond Gradient and Priors (2023), Sec. 4.2 and 4.3 ("in the optimization stage"), App. B."""


@attack("pooler-features")
@dataclass(frozen=True)
class PoolerFeatures(Lamp):
    """LAMP that matches the pooler's inputs as well as the gradient.

    The server widened the pooler (`wide-pooler`), so the third moment of the pooler's update separates the features of
    the sequences. A candidate has to agree with the gradient, by LAMP's cosine distance, and with the features, one to
    one, by cosine.

    Features have no order and, read as in the paper, no sign. The paper takes the order from the true features. Here
    every candidate gets the order that fits it best, and the sign is that of the public model's mean feature of random
    texts. If an option is None, the preset decides it: `paper` and `large` read and use features as the paper does,
    with its LAMP.
    """

    read: Read | None = None
    """How features are read: `paper` decomposes the moment; `span` does so within the known span of the update; `solve`
    starts from the result of `span` and solves equations for the features (`pooler_moments`). If solving fails, as under
    dropout, `solve` is the same as `span`."""
    phase: Phase | None = None
    """Where features count: `continuous` moves embeddings by them, `discrete` chooses starts and orders by them (Beyond
    Gradient and Priors, Table 2), `both` does both; `words` (ours) searches by the gradient alone and completes the
    result by features; `none` is LAMP."""
    feature_weight: float = 1.0
    """Weight of one minus the features' mean cosine, beside a gradient distance between 0 and 2. The paper gives no
    figure; our choice."""
    feature_words: int | None = None
    """Words per position that are tried after the search, by features alone and for each sequence separately
    (`feature_refinement`). 0 tries no words, as in the paper. Not used with `phase=none`."""
    attempts: int | None = None
    """Most searches. A sequence that reproduces its feature is right and stays fixed. While other sequences are left,
    another search begins from a random start. Used only if the features were solved for and complete the result of a
    search. Not in the paper."""

    presets: ClassVar[Mapping[Preset, Settings]] = COSINE_PRESETS
    label: ClassVar[str] = "pooler features"
    meaning: ClassVar[str] = (
        "Reads each sequence's features from the gradient of a pooler that the server has widened, and searches for inputs with these features."
    )
    source: ClassVar[str] = (
        "Beyond Gradient and Priors (2023), Sec. 4.2, 4.3, App. B, on LAMP (Balunovic et al. 2022); `span` and `solve` are ours"
    )
    threat_model: ClassVar[str] = (
        "An active server widened the pooler and exchanged its activation before it sent the model out, and sees one client's update."
    )

    def __post_init__(self) -> None:
        """Refuse options that are out of range."""
        super().__post_init__()
        check_knobs(self, at_least_one=("attempts",), not_negative=("feature_weight", "feature_words"))

    def reading(self) -> Reading:
        """Return how features are read and used, with the options that were set."""
        return with_knobs(PUBLISHED if self.preset in ("paper", "large") else OWN, self)

    def applies(self, seen: Observation) -> Applicability:
        """Return whether the server widened the pooler and its update is shared.

        LAMP has to apply as well.
        """
        server = seen.facts.server
        if server is None or server.name != SERVER:
            found = "an honest one" if server is None else repr(server.name)
            return not_applicable(
                f"needs an active server that sent out a model with a wide pooler (`--server {SERVER}`); this audit's is {found}"
            )
        try:
            check_gradient(seen)
            pooler = find_pooler(in_single_precision(seen).model, number_of_classes(seen))
        except AnatomyError as error:
            return not_applicable(str(error))
        if f"{pooler.dense}.weight" not in seen.update:
            return not_applicable(f"the pooler {pooler.dense!r} is frozen or its update is not shared")
        return super().applies(seen)

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Read the features, then search.

        Raises:
            AnatomyError: the batch's shape cannot be guessed, or no parameter can be matched.
        """
        recipe = self.recipe(seen, Objective("cosine"))
        single = in_single_precision(seen)
        shape = guess_shape(single)
        reading = self.reading()
        features = read_features(single, len(shape.lengths), reading.read, rng)
        matcher = FeatureMatcher(single, shape.lengths, recipe, features.rows, reading.phase, self.feature_weight)
        if reading.feature_words and reading.phase != "none" and matcher.features:
            attempts = reading.attempts if features.solved else 1  # no words reproduce a feature with an error
            found = self._completed(matcher, recipe, attempts, rng, budget)
        else:
            found = search(matcher, recipe.descent, recipe.start, recipe.rounds, rng, budget)
        guess = reconstruct(seen, matcher, shape, found, budget)
        facts = {
            "features": float(len(features.rows)),
            # The last digits of a product depend on the matrix's place in memory; the rounded value is the same in every run.
            "features_explain": round(features.explained, 9),
            "features_solved": float(features.solved),
        } | self.prior_facts
        return replace(guess, diagnostics={**guess.diagnostics, **facts})

    def _completed(
        self, matcher: FeatureMatcher, recipe: Recipe, attempts: int, rng: torch.Generator, budget: Budget
    ) -> Found:
        """Return the best result of several searches, each completed by features."""
        ends: list[tuple[tuple[int, float], Found]] = []
        steps = 0.0
        while len(ends) < attempts:
            found = search(matcher, recipe.descent, recipe.start, recipe.rounds, rng, budget)
            steps += found.facts["steps"]
            logits = found.best.label_logits[0]
            tokens, right = matcher.completed(found.tokens, logits, self.reading().feature_words, rng, budget)
            changed = sum(new != old for new, old in zip(tokens, found.tokens, strict=True))
            facts = found.facts | {"completed": float(changed), "reproduced": float(len(right))}
            (loss,) = matcher.token_losses([tokens], logits)
            ends.append(((-len(right), loss), found._replace(tokens=tokens, facts=facts)))
            if len(right) == matcher.features or budget.exhausted():
                break
            matcher.known.hold({row: tokens[row] for row in right})
        _, best = min(ends, key=lambda end: end[0])
        return best._replace(facts=best.facts | {"attempts": float(len(ends)), "steps": steps})


def read_features(seen: Observation, sequences: int, read: Read, rng: torch.Generator) -> Features:
    """Return the features at the input of the wide pooler.

    If their equations are not solved, their signs are those of the public model's mean feature.

    Args:
        seen: of a step on an active server's model.
        sequences: B.
        read: as `PoolerFeatures.read`.
        rng: draws contractions of the moment and random texts.

    Raises:
        AnatomyError: there is no pooler, or no such server.
    """
    if seen.facts.server is None:
        raise AnatomyError("no active server has widened the pooler")
    knobs = seen.facts.server.parameters
    pooler = find_pooler(seen.model, seen.facts.num_labels or 0)
    activation = seen.model.get_submodule(pooler.activation)
    weight = seen.model.get_parameter(f"{pooler.dense}.weight").detach()
    new, dimension = int(knobs["kept"]), int(knobs["dimension"])
    update = PoolerUpdate(
        gradients=seen.update[f"{pooler.dense}.weight"][new:].double().cpu(),
        weights=weight[new:, :dimension].double().cpu(),
        deviation=float(knobs["deviation"]),
    )
    usual = _usual_features(seen, pooler.dense, rng)  # (n, D)
    mean = usual.mean(dim=0)
    found = (features_by_tensor if read == "paper" else features_in_span)(update, sequences, rng)
    if read == "solve":
        lengths = usual.norm(dim=1).mean() * torch.tensor(LENGTHS)
        found = features_solved(update, found, lambda z: _slope(activation, z), lengths, mean) or found
    if not found.solved:
        found = Features(signed(found.rows, mean[: found.rows.shape[1]]), found.explained)
    # A sequence whose label is certain has no gradient. If all are certain, the update is zero and says nothing.
    return replace(found, rows=found.rows[found.rows.norm(dim=1) > 0])


def _usual_features(seen: Observation, dense: str, rng: torch.Generator) -> Tensor:
    """Return (n, D) float64 the pooler's inputs for random texts."""
    with inputs_of(seen.model.get_submodule(dense)) as taken, torch.no_grad():
        seen.model(**neutral_inputs(seen, rng))
    return taken[0].double().cpu()


def _slope(activation: nn.Module, z: Tensor) -> Tensor:
    """Return the activation's derivative, elementwise."""
    with torch.enable_grad():
        live = z.detach().requires_grad_()
        (slope,) = torch.autograd.grad(activation(live).sum(), live)
    return slope
