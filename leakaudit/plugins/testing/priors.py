"""Checks of what every prior promises."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import torch
from torch import nn

from leakaudit.errors import PriorError
from leakaudit.models.vocabulary import Vocabulary, vocabulary_of
from leakaudit.plugins.prior_protocol import Prior, Scorer
from leakaudit.plugins.testing.promises import ModelState, describes_itself, instance, promise
from leakaudit.plugins.testing.small_models import gpt2_lm, gpt2_tokenizer
from leakaudit.plugins.testing.steps import TEXT


def check_prior(prior: Any) -> None:
    """Check a prior against what every prior promises.

    The victim is the small language model `gpt2_lm()`; its tokens are those of `gpt2_tokenizer()`.

    Args:
        prior: the class, or an instance if a knob has to be set, such as the path of a file that was made for these tokens.

    Raises:
        AssertionError: a promise is broken. The message says what was asked and what was found.
    """
    prior = instance(prior)
    describes_itself(prior, "knows")
    promise(isinstance(prior, Prior), prior, "a prior has all that `leakaudit.plugins.Prior` lists")
    hints = {name: kind for name, kind in get_type_hints(type(prior).load).items() if name not in ("self", "return")}
    wanted = {"vocabulary": Vocabulary, "victim": nn.Module | None}
    promise(hints == wanted, prior, "`load` takes the vocabulary and the public model, and nothing else", hints)
    victim, tokenizer = gpt2_lm(), gpt2_tokenizer()
    before, state = ModelState.of(victim), torch.get_rng_state()
    try:
        scorer = prior.load(vocabulary_of(tokenizer, victim), victim)
    except PriorError as error:
        raise AssertionError(
            f"{prior.name}: the prior can be loaded for the tokens of `gpt2_tokenizer()`; found {error}. "
            f"Hand over an instance that knows them, such as {type(prior).__name__}(path=...)"
        ) from error
    _scores(prior, scorer, tokenizer(TEXT)["input_ids"], len(tokenizer))
    changed = before.changed(victim)
    promise(not changed, prior, "a prior leaves the victim as it was", f"other {', '.join(changed)}")
    promise(torch.equal(torch.get_rng_state(), state), prior, "a prior draws no random numbers", "another random state")


def _scores(prior: Any, scorer: Any, text: list[int], size: int) -> None:
    """Check that a sequence scores the same alone, among others and again."""
    promise(isinstance(scorer, Scorer), prior, "`load` returns a `leakaudit.plugins.Scorer`", type(scorer).__name__)
    sequences: list[list[int]] = [[*text], [7], [9, 8, 7], []]
    values = scorer.nll(sequences)
    promise(
        all(value > 0 and math.isfinite(value) for value in values), prior, "`nll` returns finite nats above 0", values
    )
    promise(scorer.nll(sequences) == values, prior, "the same question gets the same answer", scorer.nll(sequences))
    alone = [scorer.nll([sequence])[0] for sequence in sequences]
    close = all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(values, alone, strict=True))
    promise(close, prior, "a sequence scores alone what it scores among others", f"{values} and {alone}")
    following = scorer.next_token_nll([[7], [9, 8]])
    shaped = following is None or following.shape == (2, size)
    promise(shaped, prior, f"`next_token_nll` returns None or (2, {size}) nats", getattr(following, "shape", None))
