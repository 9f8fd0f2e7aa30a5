"""Exact recovery: inputs of linear layers lie in the row space of the update.

For a linear layer y = W x the update is a sum of outer products dy_i x_i^T over the tokens i of the batch, so its row
space is the span of the inputs x_i (Petrov et al., DAGER, NeurIPS 2024, Sec. 4). The data flows through these steps:

1. `problem`: the observation, with the first attention block's parts and the span (`subspace`).
2. `recover`: picks the reader for this kind of update from `readers`; each reader runs the steps that it needs.
3. `candidates`: which (token, position) pairs lie in the span. With dropout: `mask_regression`, `unnormalised_inputs`;
   with fewer
rows than tokens: `matching_pursuit`; with noise: `soft_ranking`, `word_scores`.
4. `attribution`: which of these pairs are real. `factoring`: the gradient of each of them.
5. `grouping`: which pairs form one sequence, by attention (`attention_evidence`, `attention_identity`).
6. `completion`, `repair`: sequences that are incomplete or wrong. `deflation` removes each confirmed sequence from the
   update.
7. `leakaudit.algorithms.resimulation`: the guessed batch is simulated; if its update agrees, it is proved.

`sequence_assembly` runs steps 4 to 7 in turn. `reachability` answers which texts a reader could have recovered. The
package may import `plugins`, `models`, `algorithms` and the public half of `client` (`facts`, `observation`).
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
    "isolation",
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
