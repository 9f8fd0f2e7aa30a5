"""What the author of a plugin outside the repository tests: that it keeps the promises of every attack."""

from leakaudit_extension import AlwaysOneToken  # type: ignore[import-not-found]  # found once it is installed

from leakaudit.plugins.testing import check_attack


def test_the_attack_keeps_its_promises() -> None:
    """Run by pytest, or alone: the check needs no test framework."""
    check_attack(AlwaysOneToken)
