"""A module of a user's with a counter of its own, which a forward pass may change."""

COUNT = 0


def count() -> None:
    """Add one."""
    global COUNT
    COUNT += 1
