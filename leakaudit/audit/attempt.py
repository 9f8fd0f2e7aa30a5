"""One attempt: an attack on one update under one defence, and its scores."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from leakaudit.algorithms.gradient_estimate import as_gradient
from leakaudit.audit.entity_tagger import entity_tagger
from leakaudit.audit.entries import AttemptId, EntryBuilder, Finished
from leakaudit.audit.own_words import of_own_words
from leakaudit.audit.perplexity import guess_perplexity
from leakaudit.audit.scoring.reachability import Reached, reachability, unknown
from leakaudit.audit.scoring.score import Scored, Tagger, score, with_similarity
from leakaudit.audit.state import number_of
from leakaudit.audit.step_record import texts_of
from leakaudit.audit.worker_signals import raise_lost_interrupt
from leakaudit.client.observation import Observation
from leakaudit.client.truth import Truth
from leakaudit.config.audit import AuditConfig
from leakaudit.config.invocation import public_reason
from leakaudit.config.secret_book import SecretBook
from leakaudit.errors import AnatomyError, type_and_place
from leakaudit.metrics.semantic_similarity import SemanticSimilarity
from leakaudit.models.array_classifier import ArrayClassifier
from leakaudit.plugins.attack_protocol import Applicability, Attack, Reconstruction, not_applicable
from leakaudit.plugins.budget import Budget
from leakaudit.results.journal import JournalEntry
from leakaudit.results.schema import AttemptStatus, Missing
from leakaudit.storage.attempt_deaths import AttemptDeaths

PARTS_ONLY = not_applicable(
    "only what attacks on the first blocks read was kept of this step (`keep: auto`), and this attack reads everything: `keep: all` keeps it"
)
NO_TEXT_TO_READ = not_applicable("the model classifies arrays: its batches hold no text")


@dataclass(frozen=True)
class Scorer:
    """Scores reconstructions with the settings of one audit."""

    config: AuditConfig
    tokenizer: Any
    """Decodes token ids."""

    @cached_property
    def tagger(self) -> Tagger | None:
        """The entity tagger that the configuration names; None if it names none.

        Raises:
            ModelError: it cannot be loaded.
        """
        return None if self.config.entity_tagger is None else entity_tagger(self.config.entity_tagger)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def score(self, guess: Reconstruction, truth: Truth, seen: Observation) -> Scored:
        """Return the scores of a guess.

        Args:
            guess: what an attack returned.
            truth: the batch with which the guess is compared.
            seen: what the attack saw.
        """
        labels = truth.labels() if seen.facts.task == "classification" else None
        texts = texts_of(truth, seen)
        scored = score(
            guess,
            texts,
            labels,
            seen.facts.num_labels,
            self.tokenizer,
            seen.facts.vocabulary.wordless_ids,
            self.config.min_tokens,
            [text.masked for text in truth.texts()] if texts else None,
            truth.entities() if texts else None,
            self.tagger,
        )
        likeness = self.config.sentence_model
        return scored if likeness is None else with_similarity(scored, SemanticSimilarity(likeness))


@dataclass(frozen=True)
class AttemptRunner:
    """Runs attempts with the settings of one audit."""

    config: AuditConfig
    scorer: Scorer
    entries: EntryBuilder
    deaths: AttemptDeaths | None = None
    """Counts the processes that died during an attempt; None where nobody starts a new one."""
    secrets: SecretBook | None = None
    """The secrets in the batches; None if there are none."""

    def run(
        self, attempt: AttemptId, attack: Attack, seen: Observation, truth: Truth, *, raise_out_of_memory: bool
    ) -> JournalEntry:
        """Run one attack and score its guess, unless processes died during it.

        If the attack crashes, the entry has the status `error` with the exception's type and place. It does not hold the message, which may
        quote private text.

        Args:
            attempt: the labels of the attempt.
            attack: the attack.
            seen: what the attack sees.
            truth: the batch with which its guess is compared.
            raise_out_of_memory: raise `torch.OutOfMemoryError`, so that the caller can repeat the attempt on the CPU.

        Raises:
            torch.OutOfMemoryError: the attack ran out of memory and `raise_out_of_memory` is set.
        """
        if self.deaths is None:
            return self._run(attempt, attack, seen, truth, raise_out_of_memory=raise_out_of_memory)
        if reason := self.deaths.deadly(attempt):
            return self.entries.failed(attempt, AttemptStatus.ERROR, reason)
        with self.deaths.during(attempt):
            return self._run(attempt, attack, seen, truth, raise_out_of_memory=raise_out_of_memory)

    def _run(
        self, attempt: AttemptId, attack: Attack, seen: Observation, truth: Truth, *, raise_out_of_memory: bool
    ) -> JournalEntry:
        entry, guess = self._attacked(attempt, attack, seen, truth, raise_out_of_memory=raise_out_of_memory)
        if self.secrets is None:
            return entry
        texts, guessed = texts_of(truth, seen), () if guess is None else guess.sequences or ()
        outcome = self.secrets.outcome(
            [self.scorer.text_of(ids) for ids in texts],
            [self.scorer.text_of(one.token_ids) for one in guessed],
            number_of(attempt.step),
        )
        return entry.model_copy(update={"secret": outcome})

    def _attacked(
        self, attempt: AttemptId, attack: Attack, seen: Observation, truth: Truth, *, raise_out_of_memory: bool
    ) -> tuple[JournalEntry, Reconstruction | None]:
        """Return the entry of an attempt, and the guess if there is one."""
        start = time.perf_counter()
        try:
            replaced = seen.facts.replaced is not None
            seen, fits = readable(attack, seen if self.config.adaptive else seen.unaware())
            if not fits:
                return self._not_applicable(attempt, attack, fits.reason, start), None
            budget = Budget(self.config.budget_s)
            guess = attack(seen, generator(self.config.seed, *attempt), budget)
            if replaced:
                guess = of_own_words(guess, seen, _prior_of(attack), budget)
            seconds = time.perf_counter() - start
            scored = self.scorer.score(guess, truth, seen)
        except AnatomyError as error:
            return self._not_applicable(attempt, attack, str(error), start), None
        except Exception as error:
            raise_lost_interrupt()
            if raise_out_of_memory and isinstance(error, torch.OutOfMemoryError):
                raise
            passed = time.perf_counter() - start
            return self.entries.failed(attempt, AttemptStatus.ERROR, type_and_place(error), passed), None
        found = Finished(
            guess=guess,
            scored=scored,
            reached=_reached(guess, truth, seen),
            granted=(*seen.facts.granted.names(), *getattr(attack, "grants", ())),
            seconds=seconds,
            perplexity=guess_perplexity(guess, _prior_of(attack), seen),
            on_gpu=next(seen.model.parameters()).device.type == "cuda",
        )
        return self.entries.finished(attempt, found), guess

    def _not_applicable(self, attempt: AttemptId, attack: Attack, reason: str, start: float) -> JournalEntry:
        shown = public_reason(reason, attack)
        return self.entries.failed(attempt, AttemptStatus.NOT_APPLICABLE, shown, time.perf_counter() - start)


def _prior_of(attack: Attack) -> object:
    """Return the prior that an attack uses, None if it uses none."""
    return getattr(attack, "language_model", getattr(attack, "prior", None))


def readable(attack: Attack, seen: Observation) -> tuple[Observation, Applicability]:
    """Return what an attack reads of an observation, and whether it applies to that.

    A difference of weights becomes an estimate of the gradient, unless the attack reads differences itself.
    """
    wants = getattr(attack, "reads", "gradient")
    if wants == "update":
        return seen, applicability(attack, seen)
    estimated, found = as_gradient(seen)
    if found.quality == "direction" and wants != "direction":
        return seen, not_applicable(f"it reads gradients, and {found.note}")
    return estimated, applicability(attack, estimated)


def applicability(attack: Attack, seen: Observation) -> Applicability:
    """Return whether an attack applies to an observation as it is, and why not."""
    if attack.goal != "labels" and isinstance(seen.model, ArrayClassifier):
        return NO_TEXT_TO_READ
    return attack.applies(seen) if can_read(attack, seen) else PARTS_ONLY


def can_read(attack: Attack, seen: Observation) -> bool:
    """Return whether the step holds all the parts that an attack reads."""
    return seen.whole or getattr(attack, "needs", "everything") == "named parts"


def generator(seed: int, *names: str) -> torch.Generator:
    """Return the random generator of one attempt.

    It depends only on the seed and the names. An attempt therefore draws the same numbers whether or not other attempts ran before it.
    """
    digest = hashlib.sha256("/".join((str(seed), *names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _reached(guess: Reconstruction, truth: Truth, seen: Observation) -> Reached:
    """Return what was in reach of the attack.

    If the attack's own code for this question fails, the result is unknown and holds the reason.
    """
    sequences = texts_of(truth, seen)
    try:
        return reachability(guess.reach, sequences, seen.facts.vocabulary.wordless_ids)
    except Exception as error:
        reason = Missing(missing=f"the attack's account of what it could have reached failed: {type_and_place(error)}")
        return unknown(reason, len(sequences))
