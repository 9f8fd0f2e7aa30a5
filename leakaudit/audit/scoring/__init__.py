"""Scoring: compare a reconstruction with the true batch by every registered metric.

It may import `plugins`, `metrics`, `client` and `results`.
"""

__all__ = ["assignment", "patterns", "reachability", "score"]
