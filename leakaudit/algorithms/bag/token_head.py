"""The head of a language model over its vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure.trace import inputs_of

SAMPLED_TEXTS, SAMPLED_TOKENS = 32, 16
"""Texts, and tokens of each, that the public model makes up.
Our choice: 500 features show the directions that features have in common, and cost 16 forward passes of short texts."""


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


def sampled_features(seen: Observation, head: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return the head's inputs on texts that the public model itself makes up.

    Each text begins with a random word and goes on with samples of the model. The generator is seeded, so equal observations give equal texts.

    Returns:
        (N, D) float64 features at all positions, and (N, V) float32 probabilities of the next token there.
    """
    if "features" not in seen.memo:
        seen.memo["features"] = _sampled(seen, head)
    found: tuple[Tensor, Tensor] = seen.memo["features"]
    return found


def _sampled(seen: Observation, head: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return features and probabilities at the positions of made-up texts."""
    rng, device = torch.Generator().manual_seed(0), next(seen.model.parameters()).device
    ids = _first_words(seen, rng).to(device)
    with inputs_of(head) as taken, torch.no_grad():
        for _ in range(min(SAMPLED_TOKENS, seen.facts.vocabulary.max_length - ids.shape[1])):
            logits = seen.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1].float()
            drawn = torch.multinomial(logits.softmax(dim=1).cpu(), 1, generator=rng)
            ids = torch.cat([ids, drawn.to(device)], dim=1)
        features = taken[-1].flatten(0, 1)
        return features.double(), head(features).float().softmax(dim=1)


def _first_words(seen: Observation, rng: torch.Generator) -> Tensor:
    """Return (N, T) ids: what the tokenizer puts before a text, and a random word."""
    vocabulary = seen.facts.vocabulary
    words = torch.tensor([i for i in range(vocabulary.size) if i not in vocabulary.wordless_ids])
    drawn = words[torch.randint(len(words), (SAMPLED_TEXTS, 1), generator=rng)]
    start = torch.tensor(vocabulary.starts_with, dtype=torch.long).expand(SAMPLED_TEXTS, -1)
    return torch.cat([start, drawn], dim=1)
