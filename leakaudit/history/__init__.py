"""The history of nights, and what changed between two audits.

A night is one of the audits that repeat. The history has one small file for each; the other modules compute from these files and from results. Only
`nights` writes.
"""

from __future__ import annotations

__all__ = [
    "advice",
    "baseline",
    "compare",
    "export",
    "keys",
    "nights",
    "pooled",
    "rates",
    "record",
    "reference",
    "saved_trend",
    "trend",
]
