"""The part of a large step that is kept, with sketches of the whole update.

Attacks on the first blocks read this part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from leakaudit.capture.recording.sketch import sketch
from leakaudit.models.first_blocks import Parts
from leakaudit.models.tensors import in_rows


@dataclass(frozen=True)
class PartOfStep:
    """Tensors of one step that are kept in place of its whole update."""

    update: Mapping[str, Tensor]
    """Parameter name -> update that is kept; that of `rows` is sparse if most of its rows are zero."""
    rows: str | None
    """Name of the table of tokens, of whose update only the rows that are not zero are kept; None if it has no update."""
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
        kept = {name: g for name, g in dense.items() if name in parts.updates}
        if parts.rows in dense:
            kept[str(parts.rows)] = in_rows(dense[str(parts.rows)])
        return cls(kept, parts.rows if parts.rows in kept else None, sketches)

    def without(self, names: frozenset[str]) -> PartOfStep:
        """Return this part without the sketches of some parameters."""
        left = {name: found for name, found in self.sketches.items() if name not in names}
        return replace(self, sketches=left)


def _divided(tensor: Tensor, scale: Tensor | None) -> Tensor:
    return tensor if scale is None else tensor.float() / scale
