"""Plugins: what an attack, a defence, a metric and a prior are, and how they are found.

It may import `client`, `models`, `config`, `results` and `files`.
"""

__all__ = [
    "attack",
    "budget",
    "defense",
    "entry_uncertainty",
    "metric",
    "names",
    "noise_scale",
    "prior",
    "prior_loading",
]
