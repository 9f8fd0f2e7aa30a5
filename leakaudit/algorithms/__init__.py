"""Algorithms that several attacks share: one package a family.

An algorithm works on an `Observation` and on public models. It never sees `Truth`, a client's step, stored
snapshots or another attack.
"""

__all__ = [
    "above_noise",
    "embedding_rows",
    "labels",
    "language_models",
    "matching",
    "padding",
    "precision",
    "resimulation",
    "span",
]
