"""Exact recovery: inputs of linear layers lie in the row space of the update.

For a linear layer y = W x the update is a sum of outer products dy_i x_i^T over the tokens i of the batch, so its row
space is the span of the inputs x_i (Petrov et al., DAGER, NeurIPS 2024, Sec. 4). The data flows through these steps:

1. `problem`: the observation with its parts and the span (`subspace`). `recover` picks the reader that fits, from
   `readers`.
2. `candidates`: which (token, position) pairs lie in the span.
3. `attribution`: which of these pairs are real, and the gradient of each.
4. `grouping`: which pairs form one sequence, by attention (`factoring`, `attention_evidence`, `attention_identity`).
5. `completion`, `repair`: correct sequences that are incomplete or wrong.
6. `deflation`: each confirmed sequence is subtracted from the update, and steps 3 to 5 repeat (`sequence_assembly`).
7. `leakaudit.algorithms.resimulation`: the guessed batch is simulated; if its update agrees, it is proved.

In special cases another module replaces step 2: `mask_regression` with dropout, `matching_pursuit` if the update has
fewer rows than the batch has tokens, `soft_ranking` with noise. `reachability` says which texts a reader could have
recovered.

The package may import `plugins`, `models`, `algorithms` and the public half of `client` (`facts`, `observation`).
"""

from pkgutil import iter_modules

__all__ = [found.name for found in iter_modules(__path__)]
