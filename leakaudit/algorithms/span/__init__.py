"""Exact recovery: inputs that lie in the span of an update of linear layers.

It may import `plugins`, `models`, `algorithms` and the public half of `client` (`facts`, `observation`).
"""

__all__ = [
    "attention_evidence",
    "attention_identity",
    "attribution",
    "candidates",
    "completion",
    "deflation",
    "explained_signal",
    "factoring",
    "grouping",
    "hypothesis_search",
    "last_tokens",
    "length_selection",
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
    "sentence_frame",
    "sentence_moves",
    "sequence_assembly",
    "sequence_gradient",
    "soft_ranking",
    "sparse_regression",
    "subspace",
    "target_gradients",
    "unnormalised_inputs",
    "word_scores",
]
