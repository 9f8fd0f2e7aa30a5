"""Journal entries: attempts, scores and the text that the text mode allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from leakaudit.audit.scoring.patterns import strip
from leakaudit.audit.scoring.reachability import Reached, ReachedSequence
from leakaudit.audit.scoring.score import Scored, ScoredSequence
from leakaudit.audit.state import AuditState
from leakaudit.config.audit import AuditConfig
from leakaudit.plugins.attack_protocol import Reconstruction
from leakaudit.results.journal import JournalEntry, LabelSample, Sample
from leakaudit.results.lengths import bucket
from leakaudit.results.recovery import LEAST_SHARE
from leakaudit.results.schema import Attempt, AttemptStatus, Missing, SequenceScore, TextMode


class AttemptId(NamedTuple):
    """One attack on one step under one defence."""

    step: str
    """Id of the step, such as `st-000040`."""
    attack: str
    """Label of the attack."""
    defense: str
    """Label of the defence."""


class Finished(NamedTuple):
    """What an attack returned, with its scores."""

    guess: Reconstruction
    scored: Scored
    reached: Reached
    granted: tuple[str, ...]
    """What the attack was granted beyond the update."""
    seconds: float
    on_gpu: bool
    perplexity: float | Missing | None = None
    """Of the guessed texts; None if no text was guessed."""


@dataclass(frozen=True)
class EntryBuilder:
    """Builds the journal entries of one audit."""

    config: AuditConfig
    tokenizer: Any
    """Converts token ids to text in text mode full."""
    state: AuditState
    """Has the key for hashes of private text."""

    def failed(self, attempt: AttemptId, status: AttemptStatus, reason: str, seconds: float = 0.0) -> JournalEntry:
        """Return the entry of an attempt without a guess.

        Args:
            attempt: the labels of the attempt.
            status: any status except `ran` and `budget_exhausted`.
            reason: a clause without private text.
            seconds: duration of the attack.
        """
        return JournalEntry(
            attempt=Attempt(
                step=attempt.step,
                attack=attempt.attack,
                defense=attempt.defense,
                seed=self.config.seed,
                adaptive=self.config.adaptive,
                status=status,
                reason=reason,
                wall_s=round(seconds, 4),
            )
        )

    def finished(self, attempt: AttemptId, found: Finished) -> JournalEntry:
        """Return the entry of an attempt with a guess."""
        record = self._attempt(attempt, found)
        if self.config.text is TextMode.HASH:
            return JournalEntry(attempt=record)
        guessed_text = any(part is not None for part in (found.guess.sequences, found.guess.tokens))
        pairs = zip(record.sequences, found.scored.sequences, strict=True) if guessed_text else ()
        samples = tuple(self._sample(attempt, shown, scored) for shown, scored in pairs)
        return JournalEntry(attempt=record, samples=samples, labels=_label_sample(attempt, found.scored))

    def _attempt(self, attempt: AttemptId, found: Finished) -> Attempt:
        guess, scored, reached = found.guess, found.scored, found.reached
        exhausted = guess.stop == "budget"
        seconds = round(found.seconds, 4)
        both = zip(scored.sequences, reached.by_sequence, strict=True)
        return Attempt(
            step=attempt.step,
            attack=attempt.attack,
            defense=attempt.defense,
            seed=self.config.seed,
            adaptive=self.config.adaptive,
            status=AttemptStatus.BUDGET_EXHAUSTED if exhausted else AttemptStatus.RAN,
            reason=f"stopped after {self.config.budget_s:g} s with its best guess so far" if exhausted else "",
            stop=guess.stop,
            granted=found.granted,
            wall_s=seconds,
            gpu_s=seconds if found.on_gpu else 0.0,
            events=scored.events,
            sequences=tuple(self._sequence(attempt.step, i, one, reach) for i, (one, reach) in enumerate(both)),
            scores=dict(scored.scores),
            facts={name: float(value) for name, value in guess.diagnostics.items() if abs(float(value)) < float("inf")},
            told_by={name: min(1.0, float(share)) for name, share in guess.told_by.items() if share > 0},
            guess_perplexity=found.perplexity,
            reachable_tokens=reached.tokens,
            reachable_sequences=reached.sequences,
        )

    def _sequence(self, step: str, index: int, found: ScoredSequence, reach: ReachedSequence) -> SequenceScore:
        ids = found.pair.true_ids
        return SequenceScore(
            id=f"{step.replace('st-', 's-')}-{index}",
            hmac=self.state.keyed_hash(",".join(map(str, ids)).encode(), digits=16),
            scores={name: number for name, number in found.numbers.items() if number is not None},
            min_tokens_bucket=bucket(len(ids)),
            long_enough=found.long_enough,
            own_score=found.pair.own_score,
            proved=found.pair.proved,
            reachable=reach.share,
            passes=reach.passes,
            strip=self._strip(found),
        )

    def _strip(self, found: ScoredSequence) -> str | None:
        """Return which parts of a sequence were recovered.

        None in text mode hash, which hides these parts, if the attack guessed no text, and for a bag of words that are mostly wrong: a bag
        of the whole vocabulary would show every text as recovered.
        """
        in_bag = found.numbers.get("token_recall") is not None and _mostly_right(found)
        guessed = found.guess_pattern is not None or in_bag
        return strip(found.true_pattern) if guessed and self.config.text is not TextMode.HASH else None

    def _sample(self, attempt: AttemptId, scored: SequenceScore, found: ScoredSequence) -> Sample:
        full = self.config.text is TextMode.FULL
        return Sample(
            step=attempt.step,
            attack=attempt.attack,
            defense=attempt.defense,
            sequence=scored.id,
            true_pattern=found.true_pattern,
            guess_pattern=found.guess_pattern,
            true_tokens=self._display(found.pair.true_ids) if full else None,
            guess_tokens=self._display(found.pair.guess_ids) if full and found.guess_pattern is not None else None,
        )

    def _display(self, ids: Iterable[int]) -> tuple[str, ...]:
        return tuple(str(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids)))


def _mostly_right(found: ScoredSequence) -> bool:
    return (found.numbers.get("token_precision") or 0.0) >= LEAST_SHARE


def _label_sample(attempt: AttemptId, scored: Scored) -> LabelSample | None:
    if scored.labels is None:
        return None
    return LabelSample(
        step=attempt.step,
        attack=attempt.attack,
        defense=attempt.defense,
        true_counts=scored.labels.true,
        guess_counts=scored.labels.guess,
    )
