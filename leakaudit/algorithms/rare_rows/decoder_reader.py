"""Reader of causal language models' batches, without a limit at the hidden size.

The head's rows say which token follows a prefix (`next_token_rows`), so sentences are grown from their starts (`sentence_beam`). The rows that a sentence
would leave alone say whether it is right (`sentence_scores`). What found sentences add to the rows is taken out (`decoder_rest`), which makes
the rest clearer; that is repeated until nothing new is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

import torch
from torch import Tensor

from leakaudit.algorithms.position_rows import longest_length
from leakaudit.algorithms.rare_rows.decoder_rest import Rest
from leakaudit.algorithms.rare_rows.sentence_beam import grow_sentences
from leakaudit.algorithms.rare_rows.sentence_rows import find_tables
from leakaudit.algorithms.rare_rows.sentence_scores import Scored, SentenceScores
from leakaudit.algorithms.rare_rows.sentence_simulations import Simulations
from leakaudit.algorithms.resimulation import prove
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import word_embedding
from leakaudit.plugins.attack_protocol import APPLIES, Applicability, GuessedSequence, Reconstruction, not_applicable
from leakaudit.plugins.budget import Budget

MOST_ROUNDS = 24
"""Most times that sentences are grown from their starts. Our choice: on training texts nothing new came after eleven."""

WIDER = 2
"""How many times as wide the search is when a round has found nothing. Our choice."""

GUESSED = 300.0
"""Evidence in nats of a sentence that is guessed although its rows do not agree. Our choice: half of what one sure row tells."""

LIKELY = 0.3
"""Own score of such a sentence. Our choice: most are right in their first words only."""


def decoder_applies(seen: Observation) -> Applicability:
    """Say whether the rows of a causal language model's head can be read."""
    facts = seen.facts
    if facts.task != "causal-lm":
        return not_applicable(f"the head's rows name next tokens in causal language models; the task is {facts.task!r}")
    if not seen.whole:
        return not_applicable("sentences are simulated to the head, and only the first blocks of the model were kept")
    try:
        tables = find_tables(seen)
    except AnatomyError as error:
        return not_applicable(str(error))
    if tables.head not in seen.update:
        return not_applicable(f"the head's table {tables.head!r} is frozen or its update is not shared")
    if not seen.update[tables.head].any():
        return not_applicable(f"every entry of the update of the head's table {tables.head!r} is zero")
    if facts.training_mode and any(rate > 0 for rate in facts.dropout.values()):
        return not_applicable("dropout was active, so that the states of a prefix differ from the public model's")
    if seen.only_a_direction:
        return not_applicable(
            "the update is a difference of weights whose entries tell no sizes, and rows are sums of states"
        )
    if seen.noise_level.of(tables.head, word_embedding(seen.model)) > 0.0 or seen.zeroed:
        return not_applicable(
            "a declared defence adds noise to the update or sets entries to zero; rows are read exactly"
        )
    return APPLIES


def recover_decoder(seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
    """Recover the sentences of a causal language model's batch.

    Args:
        seen: `decoder_applies` to it.
        rng: draws sentences from the client's model, to learn what its states look like.
        budget: when it is used up, what was found so far is returned.
    """
    found = Pursuit(seen, rng, budget)
    found.run()
    return found.reconstruction()


class Pursuit:
    """The search for all sentences of a batch."""

    def __init__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> None:
        """Prepare the rows; see `recover_decoder`."""
        self._seen, self._budget = seen, budget
        self.rest = Rest(seen, find_tables(seen), rng)
        self._simulations = Simulations(seen)
        bound = seen.facts.vocabulary.max_length
        self._longest = min(longest_length(seen) or bound, bound)
        self.found: list[Scored] = []
        self.guessed: list[Scored] = []

    def run(self) -> None:
        """Find sentences until nothing new comes or the budget is used up."""
        wider = 1
        for _ in range(MOST_ROUNDS):
            self._simulations.next_round()
            scores = SentenceScores(self.rest, self._simulations)
            grown = grow_sentences(scores, self.rest.starts(), self._longest, self._budget, wider)
            new = _compatible(scores, (one for one in grown if one.found))
            self.guessed = _compatible(scores, (one for one in grown if one.evidence > GUESSED), new)
            self.found += new
            told = [one.targets for one in self.found]
            self.rest.take([one.tokens for one in self.found], median(told) if told else self.rest.targets)
            if self._budget.exhausted() or (not new and wider > 1) or self.rest.left_targets() < 1:
                break
            wider = 1 if new else WIDER

    def reconstruction(self) -> Reconstruction:
        """Return what was found, with what is proved."""
        error = self.rest.agreement()
        guess = [
            GuessedSequence(one.tokens, own_score=_own_score(error[list(one.tokens)]), proved=one.proved)
            for one in self.found
        ]
        guess += [GuessedSequence(one.tokens, own_score=LIKELY) for one in self.guessed]
        guess.sort(key=lambda one: -one.own_score)
        proof = prove(self._seen, guess, self._budget)
        diagnostics = {"targets": self.rest.targets, "targets_found": float(self.rest.taken.targets)}
        return Reconstruction(
            sequences=proof.sequences,
            stop="budget" if self._budget.exhausted() else "done",
            diagnostics=diagnostics | proof.diagnostics,
        )


def _compatible(scores: SentenceScores, ranked: Iterable[Scored], before: Sequence[Scored] = ()) -> list[Scored]:
    """Return the first sentences whose states the rows can hold together.

    Args:
        scores: the rows.
        ranked: sentences, the best first.
        before: sentences that take states already.
    """
    used: Counter[int] = Counter(token for one in before for token in one.tokens[1:])
    kept: list[Scored] = []
    for one in ranked:
        if scores.fits(used, one.tokens):
            used.update(one.tokens[1:])
            kept.append(one)
    return kept


def _own_score(errors: Tensor) -> float:
    """Return 1 if a sentence's best half of rows is explained, towards 0 if not."""
    return float((1 - errors.median()).clamp(0.0, 0.99))
