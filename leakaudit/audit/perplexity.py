"""The perplexity of guessed texts, by a language model that the attacker has."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean

from leakaudit.client.observation import Observation
from leakaudit.errors import ConfigError, PriorError, type_and_place
from leakaudit.plugins.attack_protocol import Reconstruction
from leakaudit.plugins.prior_loading import load_prior
from leakaudit.plugins.prior_protocol import Scorer
from leakaudit.results.schema import Missing

NO_JUDGE = Missing(
    missing="the model does not predict next tokens, and the attack uses no prior that could judge a text"
)


def guess_perplexity(guess: Reconstruction, prior: object, seen: Observation) -> float | Missing | None:
    """Return the perplexity of the guessed texts, None if there are none.

    It is the exponential of the mean over the texts of the negative log-likelihood per token. The judge is the client's model before
    the step if it predicts next tokens, else the prior of the attack. Both are known to the attacker.

    Args:
        guess: what the attack returned.
        prior: the prior of the attack, as `load_prior` takes it; anything else means that it has none.
        seen: what the attack saw.
    """
    texts = [sequence.token_ids for sequence in guess.sequences or () if sequence.token_ids]
    if not texts:
        return None
    try:
        judge = first_loaded(("victim", prior), seen)
        if judge is None:
            return NO_JUDGE
        perplexity = math.exp(fmean(judge.nll(texts)))
    except Exception as error:  # any exception of a language model's own code
        return Missing(missing=f"the judge of the guessed texts failed: {type_and_place(error)}")
    return perplexity if math.isfinite(perplexity) else Missing(missing="the judge finds the guessed texts impossible")


def first_loaded(names: Iterable[object], seen: Observation) -> Scorer | None:
    """Return the first language model that can be loaded, None if none can.

    Args:
        names: priors, as `load_prior` takes them; anything else means no prior.
        seen: holds the vocabulary and the client's model.
    """
    for name in names:
        try:
            if isinstance(name, str) and name:
                return load_prior(name, vocabulary=seen.facts.vocabulary, victim=seen.model)
        except (ConfigError, PriorError):
            continue
    return None
