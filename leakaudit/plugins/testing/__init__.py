"""Checks of what every plugin promises, for authors of plugins.

    from leakaudit.plugins.testing import check_attack

    def test_my_attack_keeps_the_promises_of_every_attack() -> None:
        check_attack(MyAttack)

Each check builds small models itself. It raises AssertionError with a sentence that says what was asked and what was found. It needs
neither pytest nor the network.
"""

from leakaudit.plugins.testing.attacks import check_attack as check_attack
from leakaudit.plugins.testing.defenses import check_defense as check_defense
from leakaudit.plugins.testing.metrics import check_metric as check_metric
from leakaudit.plugins.testing.priors import check_prior as check_prior
from leakaudit.plugins.testing.small_models import client_step as client_step
from leakaudit.plugins.testing.steps import classifier_step as classifier_step
from leakaudit.plugins.testing.steps import language_model_step as language_model_step

__all__ = [
    "check_attack",
    "check_defense",
    "check_metric",
    "check_prior",
    "classifier_step",
    "client_step",
    "language_model_step",
]
