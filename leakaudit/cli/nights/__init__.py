"""`leakaudit nightly`: one command that audits, compares, judges and reports."""

from __future__ import annotations

__all__ = ["command", "night", "notify", "starter", "steps", "training"]
