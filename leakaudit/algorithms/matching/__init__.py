"""Gradient matching: search for inputs whose gradient is the observed one (DLG, TAG, LAMP, GRAB).

It may import `plugins`, `models`, `algorithms.labels` and the public half of `client` (`facts`, `observation`).
"""

__all__ = [
    "batch_shape",
    "candidate_gradients",
    "comparison",
    "dropout_masks",
    "feature_refinement",
    "hybrid_search",
    "lamp",
    "low_rank_completion",
    "matcher",
    "permutations",
    "pooler_moments",
    "position_assignment",
    "run",
    "search",
    "singular_value_shrinkage",
    "target_factors",
    "token_refinement",
    "whitening",
]
