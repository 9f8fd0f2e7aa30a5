"""An attack that ends only when its budget does."""

from __future__ import annotations

from leakaudit.config.audit import PluginSpec

ENDLESS = PluginSpec(name="tag", options={"steps": 10_000_000, "patience": 0})
"""TAG with more steps than any budget allows. Without `patience: 0` it also ends once its loss no longer falls, and on a tiny
model a quiet machine reaches that point in seconds."""
