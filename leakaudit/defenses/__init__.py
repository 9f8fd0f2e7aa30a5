"""Defences: one file for each, compared in README.md.

The registry imports every module of this folder, and each registers exactly one plugin.
"""

__all__ = [
    "dp_sgd",
    "freeze_embeddings",
    "gaussian_noise",
    "laplace_noise",
    "none",
    "prune",
    "quantize",
    "rounding",
    "sign",
    "undefended",
]
