"""What an attack on replaced words says of the client's own words."""

from __future__ import annotations

from dataclasses import replace

from leakaudit.algorithms.language_models.replaced_words import origins_of, restored
from leakaudit.audit.perplexity import first_loaded
from leakaudit.client.observation import Observation
from leakaudit.models.structure.embeddings import require_word_embedding
from leakaudit.plugins.attack_protocol import Reconstruction
from leakaudit.plugins.budget import Budget


def of_own_words(guess: Reconstruction, seen: Observation, prior: object, budget: Budget) -> Reconstruction:
    """Turn a guess of changed texts into one of the client's own texts.

    An attacker who knows how words are replaced restores the most probable text behind each text that was read. One who does not know
    leaves it. Either way nothing is proved: that the update of the guess is the observed one says which text the client trained on. What was
    in reach is unknown, because the attack can tell it of the changed texts only. A bag of words stays as it is: without an order a
    language model says little.

    Args:
        guess: what an attack returned on an update of changed texts.
        seen: what the attack saw; `facts.replaced` is None for an attacker who does not know.
        prior: the prior of the attack, as `load_prior` takes it; anything else means that it has none.
        budget: what the attack left of its time.
    """
    texts = guess.sequences and tuple(replace(text, proved=False) for text in guess.sequences)
    guess = replace(guess, sequences=texts, reach=None)
    if not texts or seen.facts.replaced is None or budget.exhausted():
        return guess
    language = first_loaded((prior, "victim", "ngram"), seen)
    if language is None:
        return guess
    replaced = seen.facts.replaced
    table = seen.model.get_parameter(require_word_embedding(seen.model))
    read = [token for text in texts for token in text.token_ids]
    origins = origins_of(table, read, sorted(seen.facts.vocabulary.wordless_ids), replaced.nearest)
    found = [restored(text.token_ids, origins, replaced, language, budget=budget) for text in texts]
    changed = sum(
        one != other
        for text, ids in zip(texts, found, strict=True)
        for one, other in zip(text.token_ids, ids, strict=True)
    )
    return replace(
        guess,
        sequences=tuple(replace(text, token_ids=ids) for text, ids in zip(texts, found, strict=True)),
        diagnostics={**guess.diagnostics, "words_restored": float(changed)},
    )
