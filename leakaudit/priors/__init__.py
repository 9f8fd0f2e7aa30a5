"""Priors: what an attacker knows about the language of a text. One file each, compared in README.md.

The registry imports every module of this folder, and each registers exactly one plugin.
"""

__all__ = [
    "causal_lm",
    "ngram",
    "victim",
]
