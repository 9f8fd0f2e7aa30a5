"""Keys of results.json that `scores` replaced in version 1.3, and short keys.

In versions up to 1.2 a sequence and a summary have one key for each of a few metrics. Since 1.3 `scores` holds every metric by its
name. The former keys are still written, for readers of earlier versions. If a file holds both, they must agree. Since 1.4 a summary
has such a key for four more metrics, which readers look for beside `token_recall`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

OF_SEQUENCES: Mapping[str, str] = MappingProxyType(
    {
        "r1": "rouge1",
        "r2": "rouge2",
        "rl": "rougeL",
        "exact": "exact",
        "token_recall": "token_recall",
        "token_precision": "token_precision",
        "longest_run_share": "longest_run",
    }
)
"""Key of a sequence's score -> metric."""

OF_SUMMARIES: Mapping[str, str] = MappingProxyType(
    {
        "exact_rate": "exact",
        "r1": "rouge1",
        "r2": "rouge2",
        "rl": "rougeL",
        "token_recall": "token_recall",
        "label_accuracy": "label_accuracy",
        "token_precision": "token_precision",
        "precision": "token_precision",
        "nerr": "nerr",
        "best_rl": "best_rl",
        "sentences_found": "sentences_found",
    }
)
"""Key of a summary -> metric."""


RENAMED_IN_SEQUENCES: Mapping[str, str] = MappingProxyType({"confidence": "own_score"})
"""Key of a sequence's score before 1.5 -> its key since then. The number is no probability."""


def renamed(data: Any, keys: Mapping[str, str]) -> Any:
    """Return the data of a model with new keys in place of former ones.

    A former key beside its new one stays, so that it is refused as unknown.
    """
    if not isinstance(data, Mapping):
        return data
    return {keys.get(key, key) if keys.get(key) not in data else key: value for key, value in data.items()}


def read_into_scores(data: Any, keys: Mapping[str, str]) -> Any:
    """Return the data of a model with `scores` in place of the former keys.

    Args:
        data: the data that the model is built from; anything but a mapping is returned unchanged.
        keys: former key -> metric.

    Raises:
        ValueError: a former key contradicts `scores`.
    """
    if not isinstance(data, Mapping):
        return data
    former = {key: _number(metric, data[key]) for key, metric in keys.items() if key in data}
    rest = {key: value for key, value in data.items() if key not in keys}
    scores = rest.setdefault("scores", {keys[key]: value for key, value in former.items() if value is not None})
    if isinstance(scores, Mapping):
        for key, value in former.items():
            if value != scores.get(keys[key]):
                raise ValueError(f"{key} contradicts the score of {keys[key]}")
    return rest


def written_from_scores(scores: Mapping[str, float], keys: Mapping[str, str]) -> dict[str, float | None]:
    """Return the former keys with their numbers; None for a metric without a number."""
    return {key: scores.get(metric) for key, metric in keys.items()}


def _number(metric: str, value: Any) -> Any:
    """Return `exact` as a number, because a sequence holds it as true or false."""
    return float(value) if metric == "exact" and isinstance(value, bool) else value
