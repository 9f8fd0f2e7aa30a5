"""Simulation: client steps without a training loop.

They are made from a model, a data file and a seed.

It may import `client` and `models`.
"""

__all__ = ["arrays", "texts"]
