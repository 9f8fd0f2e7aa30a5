"""The head of a language model over its vocabulary."""

from __future__ import annotations

from torch import nn

from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError


def find_token_head(seen: Observation) -> tuple[nn.Linear, str]:
    """Return the head (V, D) and the name under which its update is shared.

    Raises:
        AnatomyError: the task has no target tokens, there is no head, or it is frozen.
    """
    if seen.facts.task not in ("causal-lm", "masked-lm"):
        raise AnatomyError(f"target tokens are what a language model predicts; this task is {seen.facts.task}")
    size = seen.facts.vocabulary.size
    heads = [module for module in seen.model.modules() if isinstance(module, nn.Linear) and module.out_features == size]
    if not heads:
        raise AnatomyError(f"looked for a linear layer with {size} outputs, one for each token, and found none")
    names = {id(parameter): name for name, parameter in seen.model.named_parameters()}
    name = names[id(heads[-1].weight)]
    if name not in seen.update:
        raise AnatomyError(f"the head {name!r} is frozen or its update is not shared")
    return heads[-1], name
