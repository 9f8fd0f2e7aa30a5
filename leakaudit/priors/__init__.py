"""Priors: what an attacker knows about the language of a text. One file each, compared in README.md.

Importing this package registers them.
"""

from leakaudit.priors import causal_lm as causal_lm
from leakaudit.priors import ngram as ngram
from leakaudit.priors import victim as victim

__all__ = ["causal_lm", "ngram", "victim"]
