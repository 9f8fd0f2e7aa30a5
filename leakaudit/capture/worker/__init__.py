"""The side process: started, watched, waited for and ended.

It may import what `capture` may.
"""

__all__ = ["environment", "process", "progress", "restarts", "wait"]
