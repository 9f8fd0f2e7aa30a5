"""Language models: n-gram counts, a small trained transformer, and likelihoods.

The package may import `plugins` and `models`.
"""

__all__ = ["kneser_ney", "likelihood_ratio", "replaced_words", "token_scorer", "training"]
