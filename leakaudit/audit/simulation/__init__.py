"""Simulation: client steps without a training loop.

A model, a data file and a seed determine the steps.

It may import `client` and `models`.
"""

__all__ = ["arrays", "clients", "entities", "examples", "tables", "texts"]
