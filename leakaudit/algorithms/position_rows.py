"""Rows of the position embedding: the length of the longest text.

Position t enters the forward pass only if a text has more than t tokens, so the number of rows that are not zero is the length of the longest
text. In a causal language model the last token of a text predicts nothing and no other token reads it, so its position has no gradient:
the longest text is one token longer than the rows say.
"""

from __future__ import annotations

from torch import Tensor, nn

from leakaudit.client.observation import Observation


def longest_length(seen: Observation) -> int | None:
    """Return the number of tokens of the longest text, with special tokens.

    It is exact without noise, weight decay and pruning; pruning can only make it smaller. None if positions have no shared table of their
    own, or all of its rows or none of them moved.
    """
    rows = position_rows(seen)
    count = touched_positions(seen)
    if rows is None or count in (0, len(rows)):
        return None
    return count + int(seen.facts.task == "causal-lm")


def touched_positions(seen: Observation) -> int:
    """Return the number of positions with an update; 0 without a shared table."""
    rows = position_rows(seen)
    return 0 if rows is None else int((rows != 0).any(dim=1).sum())


def position_rows(seen: Observation) -> Tensor | None:
    """Return the position table's update (P, D); None if there is no such table.

    A position table is an embedding with at least one row for each position and no row for each token.
    """
    words = seen.model.get_input_embeddings()  # type: ignore[operator]
    names = {id(parameter): name for name, parameter in seen.model.named_parameters()}
    for module in seen.model.modules():
        if not isinstance(module, nn.Embedding) or module is words:
            continue
        name = names.get(id(module.weight), "")
        if name in seen.update and module.num_embeddings >= seen.facts.vocabulary.max_length:
            return seen.update[name]
    return None
