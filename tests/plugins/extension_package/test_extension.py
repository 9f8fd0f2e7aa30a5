"""The test that the author of an attack outside the repository writes."""

from leakaudit_extension import AlwaysOneToken  # type: ignore[import-not-found]  # found once it is installed

from leakaudit.plugins.testing import check_attack


def test_the_attack_keeps_its_promises() -> None:
    """Run by pytest, or alone: the check needs no test framework."""
    check_attack(AlwaysOneToken)
