"""Keeps a part of a large step, and a sketch of everything.

The part is what attacks on the first blocks read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from leakaudit.capture.sketch import sketch
from leakaudit.models.first_blocks import Parts


@dataclass(frozen=True)
class PartOfStep:
    """Tensors of one step that take the place of its whole update."""

    update: Mapping[str, Tensor]
    """Parameters whose update is kept whole."""
    rows: str | None
    """Parameter whose update is kept as the rows that are not zero."""
    index: Tensor | None
    """(R,) int64: which rows."""
    values: Tensor | None
    """(R, D): these rows."""
    sketches: Mapping[str, Tensor]
    """Of the whole update, by parameter name."""

    @classmethod
    def of(cls, parts: Parts, update: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> PartOfStep:
        """Take the part on the device where the update is.

        Args:
            parts: what to keep.
            update: the whole one; left as it is.
            scales: name -> what it is still multiplied by, where that is not 1.
        """
        dense = {name: g.to_dense() if g.is_sparse else g for name, g in update.items()}
        sketches = {name: _divided(sketch(name, g), scales.get(name)) for name, g in dense.items()}
        index = values = None
        if parts.rows in dense:
            table = dense[str(parts.rows)]
            index = (table != 0).any(dim=1).nonzero().flatten()
            values = _divided(table[index], scales.get(str(parts.rows)))
        kept = {name: g for name, g in dense.items() if name in parts.updates}
        return cls(kept, parts.rows if index is not None else None, index, values, sketches)

    def without(self, names: frozenset[str]) -> PartOfStep:
        """Return this part without some parameters."""
        left = {name: found for name, found in self.sketches.items() if name not in names}
        return PartOfStep(self.update, self.rows, self.index, self.values, left)


def _divided(tensor: Tensor, scale: Tensor | None) -> Tensor:
    return tensor if scale is None else tensor.float() / scale
