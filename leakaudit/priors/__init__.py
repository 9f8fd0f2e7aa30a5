"""Priors: one file for each, compared in README.md.

The registry imports every module of this folder, and each registers exactly one plugin.
"""

__all__ = [
    "causal_lm",
    "ngram",
    "victim",
]
