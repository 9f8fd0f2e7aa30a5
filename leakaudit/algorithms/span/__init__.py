"""Exact recovery: inputs that lie in the span of an update of linear layers.

It may import `plugins`, `models`, `algorithms` and the public half of `client` (`facts`, `observation`).
"""

__all__ = [
    "attention_identity",
    "attribution",
    "candidates",
    "completion",
    "deflation",
    "grouping",
    "hypothesis_search",
    "last_tokens",
    "mask_regression",
    "matching_pursuit",
    "order_refinement",
    "problem",
    "rank_reduction",
    "reachability",
    "readers",
    "recover",
    "repair",
    "residuals",
    "sequence_gradient",
    "soft_ranking",
    "sparse_regression",
    "subspace",
]
