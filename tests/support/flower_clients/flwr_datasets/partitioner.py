"""Stands in for the partitioners of Flower's package of data sets."""

from __future__ import annotations

from typing import Any


class IidPartitioner:
    """Divides nothing."""

    def __init__(self, num_partitions: int | None = None, **_: Any) -> None:
        self.num_partitions = num_partitions


class GroupedNaturalIdPartitioner:
    """Divides nothing."""

    def __init__(self, **_: Any) -> None:
        self.dataset: Any = None
