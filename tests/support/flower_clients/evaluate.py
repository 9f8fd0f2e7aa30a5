"""Stands in for the package evaluate, which a client imports and does not use."""

from __future__ import annotations

from typing import Any


def load(name: str) -> Any:
    """Refuse: a metric would be downloaded."""
    raise NotImplementedError(name)
