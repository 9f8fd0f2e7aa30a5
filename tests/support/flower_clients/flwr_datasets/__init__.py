"""Stands in for Flower's package of data sets, which downloads them."""

from __future__ import annotations

from typing import Any

from invented import columns


class FederatedDataset:
    """A data set whose one partition holds the invented rows."""

    def __init__(self, *, dataset: str, partitioners: dict[str, Any] | None = None, **_: Any) -> None:
        from datasets import Dataset

        self.rows = Dataset.from_dict(columns(dataset))
        self.partitioners = partitioners or {}
        for one in self.partitioners.values():
            one.dataset = self.rows

    def load_partition(self, partition_id: int, split: str | None = None) -> Any:
        """Return the rows of a partition: all of them but sounds of background."""
        if "speaker_id" in self.rows.column_names:
            return self.rows.select(range(20))
        return self.rows
