"""Models: recipes, models rebuilt from recipes, and parts found by structure.

It may import `errors` and `files` only. It uses no hub and no network.

    from leakaudit.models import model_factory, rebuilt_by     # for a model that the audit cannot rebuild by itself
    from leakaudit.models import save_auxiliary                # for labelled examples that are granted to an attack
"""

from leakaudit.models.array_classifier import save_auxiliary
from leakaudit.models.factories import model_factory, rebuilt_by

__all__ = ["model_factory", "rebuilt_by", "save_auxiliary"]
