"""Which attacks run on which kind of update.

It is docs/attacks_by_update.md without torch.

`tests/preflight/test_attack_table.py` holds the table to that page, which the tests make from the attacks themselves.
"""

from __future__ import annotations

_GRADIENT_TEXT = ("dlg", "film", "grab", "lamp-cos", "lamp-l1l2", "rare-rows", "span", "tag", "update-difference")
_GRADIENT_LABELS = ("gradient-mixture", "idlg", "ilrg", "llg", "llg-plus", "llg-star", "rlu")
_ADAPTERS = ("dlg", "grab", "lamp-cos", "lamp-l1l2", "span", "tag", "update-difference", *_GRADIENT_LABELS)
_FIRST_STEP = (*_GRADIENT_TEXT, "embedding-rows", "target-tokens", *_GRADIENT_LABELS)
_DIFFERENCE = ("embedding-rows", "film", "span", "update-difference")

RUNS_ON: dict[str, frozenset[str]] = {
    "gradient": frozenset((*_FIRST_STEP, "feature-labels", "pooler-features")),
    "SGD, K = 1": frozenset((*_FIRST_STEP, "feature-labels")),
    "SGD, K = 4": frozenset(_FIRST_STEP),
    "momentum, K = 4": frozenset(_FIRST_STEP),
    "AdamW, K = 1": frozenset((*_FIRST_STEP, "feature-labels")),
    "AdamW, K = 4": frozenset(_DIFFERENCE),
    "AdamW, moments kept": frozenset(_DIFFERENCE),
    "Adafactor, K = 1": frozenset(_DIFFERENCE),
    "adapters, gradient": frozenset(_ADAPTERS),
    "adapters, AdamW, K = 1": frozenset(_ADAPTERS),
    "adapters, AdamW, K = 10": frozenset(("span", "update-difference")),
}
"""Column of the page -> attacks whose cell is `yes`; `random-labels`, a guess for comparison, is left out."""

READ_SENTENCES = frozenset(_GRADIENT_TEXT)
"""Attacks that return texts in their order; all others return words or labels."""
READ_WORDS = frozenset(("embedding-rows", "target-tokens"))
