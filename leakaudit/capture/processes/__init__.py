"""The other processes of a distributed run: agreement on each step, time limits.

This package may import what `capture` may.
"""

__all__ = ["agreement", "distributed", "flat_shards", "process_group"]
