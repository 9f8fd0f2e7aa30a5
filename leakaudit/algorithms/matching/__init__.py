"""Gradient matching: search for a batch with the observed gradient.

Used by `dlg`, `tag`, `lamp-cos`, `lamp-l1l2`, `grab` and `pooler-features`. Data flows through these steps:

1. `run`: from an observation to a reconstruction. `batch_shape` gives the number and lengths of the sequences.
2. `candidate_gradients`: gradients of many candidates in one pass, as pairs; `dropout_masks` may be unknowns, too.
3. `target_factors`, `comparison`: their distance to the observed gradient, after `low_rank_completion` (pruning) and
   `singular_value_shrinkage` (noise), in the metric of `whitening` if asked for.
4. `matcher`: the losses and derivatives by embeddings, labels and masks that these give.
5. `search` (LAMP: Adam and `permutations`) or `hybrid_search` (GRAB: Adam and beam search over tokens).
6. `position_assignment`, `token_refinement`: correct positions, and correct words; `pooler_moments`,
   `feature_refinement` for features that an active server reads.
7. `leakaudit.algorithms.resimulation`: the guessed batch is simulated; if its update agrees, it is proved.

The package may import `plugins`, `models`, `algorithms` and the public half of `client` (`facts`, `observation`).
"""

__all__ = [
    "batch_shape",
    "candidate_gradients",
    "candidate_maker",
    "candidates",
    "chunks",
    "comparison",
    "descent",
    "dropout_distance",
    "dropout_masks",
    "feature_matcher",
    "feature_refinement",
    "hybrid_search",
    "known_tokens",
    "lamp",
    "layers",
    "learned_masks",
    "low_rank_completion",
    "matcher",
    "objective",
    "permutation_rounds",
    "permutations",
    "pooler_moments",
    "position_assignment",
    "pruned_blocks",
    "restoration",
    "run",
    "search",
    "singular_value_shrinkage",
    "starts",
    "target_factors",
    "token_refinement",
    "vector_target",
    "whitening",
    "word_table",
]
