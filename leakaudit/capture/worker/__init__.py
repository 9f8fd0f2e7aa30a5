"""The side process: its start, its progress, its restarts and its end.

This package may import what `capture` may.
"""

__all__ = ["environment", "inline_attacks", "process", "progress", "restarts", "shared_process", "wait"]
