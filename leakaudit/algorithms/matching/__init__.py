"""Gradient matching: search for a batch with the observed gradient.

The attacks `dlg`, `tag`, `lamp-cos`, `lamp-l1l2`, `grab` and `pooler-features` use it. Data flows through these steps:

1. `run`: from an observation to a reconstruction, with the settings of DLG and TAG (`plain`), of LAMP (`lamp`) and of all (`options`). `batch_shape` gives the number and lengths of the sequences.
2. `starts`: the first `candidates`, made by `candidate_maker`; `known_tokens` are fixed; `learned_masks` can be unknowns, too.
3. `candidate_gradients`: gradients of many candidates in one pass, as pairs of inputs and output gradients (`layers`). Their
   loss compares the model's answer with `guessed_labels`: classes, or the next tokens of a causal language model.
4. `comparison`: their distance (`objective`) to the observed gradient, by `target_factors`, `pruned_blocks` and
   `vector_target`. `restoration` first fills in pruned entries (`low_rank_completion`) and removes noise
   (`singular_value_shrinkage`); `whitening` gives a metric for cosines. `matcher` combines steps 2 to 4.
5. `search` (LAMP: `descent` and `permutation_rounds`) or `hybrid_search` (GRAB: descent and beam search over tokens).
6. `position_assignment` corrects positions, and `token_refinement` corrects words. `feature_matcher` and
   `feature_refinement` also use features that an active server reads (`pooler_moments`).
7. `leakaudit.algorithms.resimulation`: the guessed batch is simulated; if its update agrees, it is proved.

The package may import `plugins`, `models`, `algorithms` and the public half of `client` (`facts`, `observation`).
"""

from pkgutil import iter_modules

__all__ = [found.name for found in iter_modules(__path__)]
