"""Frontier: what each defence costs in utility, time and traffic.

Every defence trains from the same start on the same batches. The leak is measured by the simulated audit of the same defences.

It may import `client`, `models` and `simulation`.
"""

__all__ = ["evaluation", "own_script", "plan", "prices", "rows", "statistics", "store", "training", "work"]
