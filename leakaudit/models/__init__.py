"""Models: described as a recipe, rebuilt from it, and taken apart by structure.

It may import `errors` only. No hub, no network.

    from leakaudit.models import model_factory, rebuilt_by     # for a model that the audit cannot rebuild by itself
    from leakaudit.models import save_auxiliary                # for labelled examples that an attack is granted
"""

from leakaudit.models.array_classifier import save_auxiliary
from leakaudit.models.factories import model_factory, rebuilt_by

__all__ = ["model_factory", "rebuilt_by", "save_auxiliary"]
