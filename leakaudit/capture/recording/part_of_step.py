"""The part of a large step that is kept, with sketches of the whole update.

Attacks on the first blocks read this part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from leakaudit.capture.recording.sketch import sketch
from leakaudit.models.first_blocks import Parts


@dataclass(frozen=True)
class PartOfStep:
    """Tensors of one step that are kept in place of its whole update."""

    update: Mapping[str, Tensor]
    """Parameter name -> update that is kept as a whole."""
    rows: str | None
    """Name of the parameter whose update is kept only in its non-zero rows; None if there is no such parameter."""
    index: Tensor | None
    """(N,) int64: positions of these rows."""
    values: Tensor | None
    """(N, D): these rows."""
    sketches: Mapping[str, Tensor]
    """Parameter name -> sketch of its update, for every parameter."""

    @classmethod
    def of(cls, parts: Parts, update: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> PartOfStep:
        """Take the part on the device where the update is.

        Args:
            parts: what to keep.
            update: parameter name -> whole update; not changed.
            scales: parameter name -> factor that is still in its update; no entry for 1.
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
        """Return this part without the sketches of some parameters."""
        left = {name: found for name, found in self.sketches.items() if name not in names}
        return PartOfStep(self.update, self.rows, self.index, self.values, left)


def _divided(tensor: Tensor, scale: Tensor | None) -> Tensor:
    return tensor if scale is None else tensor.float() / scale
