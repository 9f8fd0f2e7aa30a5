"""The names of the moments at which a recorder notes a few entries of a step.

They are private, as the batch is. A trace maps `moment/parameter` to (K, n) float32: K optimizer steps, n entries of the parameter at equal distances. `END` has one row.
"""

from __future__ import annotations

WEIGHTS = "weights"
"""The weights at the first forward pass of an optimizer step."""
LATER = "later"
"""The weights at its last forward pass."""
BEFORE = "before"
"""The gradients before its first backward pass."""
AFTER = "after"
"""The gradients after its last backward pass."""
GIVEN = "given"
"""The gradients when the optimizer steps."""
MOVED = "moved"
"""The weights after the optimizer has stepped; of a round only."""
END = "end"
"""The weights when a round is over."""

MOMENTS = (WEIGHTS, LATER, BEFORE, AFTER, GIVEN, MOVED, END)
