"""Scoring: a reconstruction compared with the true batch by every metric.

It may import `plugins`, `metrics`, `client` and `results`.
"""

__all__ = ["assignment", "patterns", "reachability", "score"]
