"""Plugins: what an attack, a defence, a metric and a prior are, and how they are found.

It may import `client`, `models`, `config`, `results` and `files`.
"""

__all__ = [
    "attack_protocol",
    "budget",
    "catalogue",
    "defense_protocol",
    "entry_uncertainty",
    "metric_protocol",
    "names",
    "noise_scale",
    "prior_loading",
    "prior_protocol",
]
