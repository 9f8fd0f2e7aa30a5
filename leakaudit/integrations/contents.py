"""Copies of what leaves a client, made of nothing but what is allowed to leave.

A filter that looks for private content has to know all its disguises. These functions go the other way: they copy the kinds that are
allowed, and everything else is an error. What leaves is the copy, so nothing can hide in an attribute, in memory behind a view, in the
order of a dictionary, or come later from another thread.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leakaudit.errors import SnapshotError

MOST_NUMBERS = 32
"""Most single numbers in one transmission. Our choice: FedAvg sends four, and a report of metrics ten to twenty."""

DIGITS = 6
"""Significant decimal digits of a single number that leave. Our choice: more than a metric is known to; the 16 digits of a Python number
hold six letters of a text."""

LARGEST = 2**31
"""Bound of whole numbers. Our choice: counts of steps and examples are smaller."""

_WORDS = """
acc accuracy aggregation auc auroc average avg balanced batch batches best bleu chosen count current dev dice entropy epoch epochs err error
eval evaluation examples f1 flag flos global grad history initial iou iteration iterations kl learning local logits logps loss lr macro mae
map margins mean metric metrics micro model mse n ndcg nll norm num number of pearson per perplexity ppl precision preparation quantized
rate recall rejected rewards rmse roc rouge round rounds run runtime samples score second seconds size spearman start std step steps sum
test time to token tokens top total train trained training val valid validation weight weighted
"""

WORDS = frozenset(_WORDS.split())
"""Words of which the name of a number consists, so that no name is a text. Our choice: those of NVFlare, Flower, the
Trainers of transformers and TRL, and common metrics."""

SHORT_NUMBER = re.compile(r"[0-9]{1,2}")
"""A number in a name, such as that of `top5`."""

LONGEST_NAME = 60
"""Most characters of the name of a number. Our choice."""

DTYPES = frozenset({"float32", "float16", "bfloat16", "float64"})
"""Names of types that may leave as a string."""

_PARTS = re.compile(r"[fF]1|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_NUMBERS = (bool, int, float, np.bool_, np.int32, np.int64, np.float16, np.float32, np.float64)


@dataclass
class Numbers:
    """The single numbers of one transmission."""

    names: frozenset[str] = frozenset()
    """Names of numbers that may leave besides those made of `WORDS`."""
    count: int = field(default=0, init=False)

    def copied(self, name: object, value: object, where: str) -> tuple[str, bool | int | float]:
        """Return the name and the value of a number as they may leave.

        Args:
            name: key of the number.
            value: a number of Python or NumPy.
            where: place in the transmission, for an error.

        Raises:
            SnapshotError: it is no number, has a name that nobody declared, or is one too many.
        """
        if type(name) is not str or not (name in self.names or made_of_words(name)):
            raise SnapshotError(
                f"{where} holds an entry whose name nobody allowed; `numbers` of the filter takes the names of more numbers"
            )
        if type(value) not in _NUMBERS:
            raise SnapshotError(
                f"{where} holds a {type(value).__name__} under {name!r}; only single numbers may be there"
            )
        self.count += 1
        if self.count > MOST_NUMBERS:
            raise SnapshotError(f"it holds more than {MOST_NUMBERS} single numbers")
        return name, _rounded(value, name)


def made_of_words(name: str) -> bool:
    """Return whether the name of a number has only known words.

    >>> made_of_words("NUM_STEPS_CURRENT_ROUND"), made_of_words("val/top5_accuracy"), made_of_words("bWVkaWNhbA")
    (True, True, False)
    """
    if len(name) > LONGEST_NAME or not re.fullmatch(r"[A-Za-z0-9_./ @-]+", name):
        return False
    return all(part.lower() in WORDS or SHORT_NUMBER.fullmatch(part) for part in _PARTS.findall(name))


def _rounded(value: Any, name: str) -> bool | int | float:
    """Return a number with `DIGITS` significant digits.

    Raises:
        SnapshotError: a whole number is too large.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        if abs(int(value)) >= LARGEST:
            raise SnapshotError(f"the whole number {name!r} is {LARGEST} or more, or that far below zero")
        return int(value)
    number = float(value)
    return float(f"{number:.{DIGITS}g}") + 0.0 if math.isfinite(number) else math.nan


def plain_dict(value: object, where: str) -> Mapping[Any, Any]:
    """Return a dictionary that is none of a class of its own.

    Raises:
        SnapshotError: it is something else.
    """
    if type(value) not in (dict, OrderedDict):
        raise SnapshotError(f"{where} is a {type(value).__name__}, expected a dict")
    return value  # type: ignore[return-value]


def copied_array(value: object, where: str) -> Tensor:
    """Return a copy of an array that has nothing but its numbers.

    Zeros lose their sign, which no audit of a difference would see.

    Args:
        value: a NumPy array or a tensor.
        where: place in the transmission, for an error.

    Raises:
        SnapshotError: it is something else, or an array of something else than numbers.
    """
    if type(value) is np.ndarray and value.dtype.kind in "fiub" and value.dtype.isnative:
        copy = torch.from_numpy(np.array(value, order="C").view(np.ndarray))
    elif isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter) and _is_plain(value):
        copy = value.detach().to("cpu").clone(memory_format=torch.contiguous_format)
    else:
        kind = f"{type(value).__name__} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise SnapshotError(f"{where} holds a {kind}; only plain arrays of numbers may be there")
    return copy + 0 if copy.is_floating_point() else copy


def _is_plain(value: Tensor) -> bool:
    return bool(value.layout == torch.strided and not value.is_quantized and not value.is_complex())


def like(copy: Tensor, value: object) -> Any:
    """Return a copied array as the kind that it was: NumPy for NumPy."""
    return copy.numpy() if isinstance(value, np.ndarray) else copy
