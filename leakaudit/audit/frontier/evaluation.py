"""How well a model does on held-out examples, measured example by example."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from leakaudit.audit.frontier.statistics import Values, pseudo_values
from leakaudit.client.facts import IGNORED_LABEL
from leakaudit.client.truth import MicroBatch
from leakaudit.models.loading import Task

Classes = NDArray[np.int64]

HIGHER_IS_BETTER = {"accuracy": True, "mcc": True, "f1": True, "loss": False, "perplexity": False}
"""Name of a metric -> whether a larger number means a better model."""


@dataclass(frozen=True)
class Measured:
    """One metric of one trained model."""

    value: float
    by_example: Values = field(repr=False)
    """(n,) the metric of each example, or the jackknife's pseudo-values if it is no mean over examples."""


@dataclass(frozen=True)
class Outcomes:
    """What a model does on n examples, in their order."""

    losses: Values
    """(n,) sum of the losses of an example's tokens, or the loss of its class; nats."""
    tokens: Values
    """(n,) number of those tokens; 1 for a class."""
    labels: Classes | None
    """(n,) true classes; None for a language model."""
    predicted: Classes | None

    @property
    def is_finite(self) -> bool:
        """Whether every loss is finite."""
        return bool(np.isfinite(self.losses).all())


def outcomes_of(model: nn.Module, batches: Sequence[MicroBatch], task: Task) -> Outcomes:
    """Run a model, in eval mode, over batches of examples.

    Examples without a token to predict are left out.
    """
    model.eval()
    losses: list[float] = []
    tokens: list[float] = []
    labels: list[int] = []
    predicted: list[int] = []
    with torch.inference_mode():
        for batch in batches:
            inputs: dict[str, Any] = {name: value for name, value in batch.inputs.items() if name != "labels"}
            logits = model(**inputs).logits.float()
            wanted = batch.inputs["labels"]
            if task == "classification":
                losses += functional.cross_entropy(logits, wanted, reduction="none").tolist()
                tokens += [1.0] * len(wanted)
                labels += wanted.tolist()
                predicted += logits.argmax(dim=1).tolist()
                continue
            nexts = wanted[:, 1:]
            each = functional.cross_entropy(
                logits[:, :-1].transpose(1, 2), nexts, reduction="none", ignore_index=IGNORED_LABEL
            )
            counts = (nexts != IGNORED_LABEL).sum(dim=1)  # (B,)
            losses += each.sum(dim=1)[counts > 0].tolist()
            tokens += counts[counts > 0].double().tolist()
    has_classes = task == "classification"
    return Outcomes(
        losses=np.array(losses, dtype=np.float64),
        tokens=np.array(tokens, dtype=np.float64),
        labels=np.array(labels, dtype=np.int64) if has_classes else None,
        predicted=np.array(predicted, dtype=np.int64) if has_classes else None,
    )


def metrics_of(outcomes: Outcomes) -> dict[str, Measured]:
    """Return the metrics of a model; a metric that is not defined is absent.

    For classes: `loss`, `accuracy`, `mcc` (Matthews correlation, with several classes as in Gorodkin 2004) and `f1` (mean of the F1 of the
    classes that occur). For language models: `loss` and `perplexity` over all tokens.
    """
    if outcomes.labels is None or outcomes.predicted is None:
        return _of_tokens(outcomes)
    right = (outcomes.labels == outcomes.predicted).astype(np.float64)
    found = {
        "loss": Measured(float(outcomes.losses.mean()), outcomes.losses),
        "accuracy": Measured(float(right.mean()), right),
    }
    table = _table(outcomes.labels, outcomes.predicted)
    for name, metric in (("mcc", matthews), ("f1", macro_f1)):
        if (measured := _of_table(table, outcomes.labels, outcomes.predicted, metric)) is not None:
            found[name] = measured
    return found


def _of_tokens(outcomes: Outcomes) -> dict[str, Measured]:
    """Return the metrics of a language model, means over tokens."""
    total, count = float(outcomes.losses.sum()), float(outcomes.tokens.sum())
    if not count:
        return {}
    rest = np.maximum(count - outcomes.tokens, 1.0)
    loss = total / count
    found = {"loss": Measured(loss, pseudo_values(loss, lambda: (total - outcomes.losses) / rest))}
    if loss < math.log(np.finfo(np.float64).max) / 2:
        value = math.exp(loss)
        each = pseudo_values(value, lambda: np.exp((total - outcomes.losses) / rest))
        found["perplexity"] = Measured(value, each)
    return found


def _table(labels: Classes, predicted: Classes) -> Values:
    """Return the table of true class and predicted class, (C, C)."""
    classes = int(max(labels.max(), predicted.max())) + 1
    table = np.zeros((classes, classes))
    np.add.at(table, (labels, predicted), 1.0)
    return table


def _of_table(
    table: Values, labels: Classes, predicted: Classes, metric: Callable[[Values], float | None]
) -> Measured | None:
    """Return a metric of the table of classes; None if it is not defined."""
    value = metric(table)
    if value is None:
        return None
    without: dict[tuple[int, int], float] = {}
    for true, guess in zip(*np.nonzero(table), strict=True):
        table[true, guess] -= 1
        left = metric(table)
        table[true, guess] += 1
        without[int(true), int(guess)] = value if left is None else left
    pairs = zip(labels.tolist(), predicted.tolist(), strict=True)
    return Measured(value, pseudo_values(value, lambda: np.array([without[pair] for pair in pairs])))


def matthews(table: Values) -> float | None:
    """Return the Matthews correlation of a table of classes.

    Gorodkin 2004, in the form of the table: (c n - sum of t_k p_k) / sqrt((n^2 - sum of p_k^2)(n^2 - sum of t_k^2)), with n examples, c right
    ones, t_k with class k, and p_k that got class k. If the model gives one class to all examples it is 0, the limit (Chicco and Jurman
    2020). It is None if all examples have the same class, because there is then nothing to correlate with.
    """
    n, right = table.sum(), np.trace(table)
    true, guessed = table.sum(axis=1), table.sum(axis=0)
    of_true, of_guessed = n**2 - (true**2).sum(), n**2 - (guessed**2).sum()
    if of_true <= 0:
        return None
    return 0.0 if of_guessed <= 0 else float((right * n - true @ guessed) / math.sqrt(of_true * of_guessed))


def macro_f1(table: Values) -> float | None:
    """Return the mean of the F1 of the classes that occur in labels or guesses."""
    both = table.sum(axis=1) + table.sum(axis=0)
    there = both > 0
    return float((2 * np.diag(table)[there] / both[there]).mean()) if there.any() else None
