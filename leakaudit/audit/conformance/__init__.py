"""Conformance: does a run do what the accountant of its privacy assumes?"""

__all__ = ["again", "assumptions", "causes", "draws", "judge", "log", "measure", "measured", "record", "signal"]
