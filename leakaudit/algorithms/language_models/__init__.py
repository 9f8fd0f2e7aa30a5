"""Language models for priors: n-gram counts and a small trained transformer.

The package may import `plugins` and `models`.
"""

__all__ = ["kneser_ney", "token_scorer", "training"]
