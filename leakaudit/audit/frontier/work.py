"""The trainings of a frontier, one after the other; finished ones are kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from leakaudit import __version__
from leakaudit.audit.frontier.evaluation import metrics_of
from leakaudit.audit.frontier.plan import Candidate, Need, Trial, dropped, has_rivals, need_of, short_steps
from leakaudit.audit.frontier.prices import price_of, seconds_of_step
from leakaudit.audit.frontier.rows import Found
from leakaudit.audit.frontier.store import KeptMetric, KeptPrice, KeptTraining, Store
from leakaudit.audit.frontier.training import Trainer
from leakaudit.audit.simulation.tables import content_of
from leakaudit.errors import LeakAuditError, NonFiniteUpdateError, type_and_place
from leakaudit.results.schema import Results

UNFIT = (LeakAuditError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, NotImplementedError)
"""What a defence raises where it does not fit a training. Lack of memory and of disk space are no fault of the defence."""


@dataclass
class Work:
    """All trainings of one frontier."""

    trainer: Trainer
    store: Store
    candidates: Sequence[Candidate]
    seeds: Sequence[int]
    source: str
    """Digest of model, data and options of the audited steps."""
    drop: bool = True
    """Whether dominated strengths are dropped after a third of the steps."""
    notice: Callable[[str], None] = lambda _: None
    """Called with the name of each training that begins; it may raise to stop the work."""
    tell: Callable[[str], None] = lambda _: None
    """Called with a sentence for the user, such as why a strength was dropped."""
    prices: dict[str, KeptPrice] = field(default_factory=dict)
    """Label of a defence -> its price, as far as they are known."""
    begun_s: float = 0.0
    """Estimated seconds of the trainings that began or were read."""
    _trained: dict[str, list[KeptTraining]] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)

    def need(self, candidate: Candidate) -> Need:
        """Return the trainings that a candidate needs at most."""
        return need_of(candidate, self.candidates, self.trainer.trainings, len(self.seeds), self.drop)

    def seconds(self) -> float:
        """Return the estimated seconds of all trainings, without the evaluation.

        Prices must be known (`price_all`); a defence that does not fit needs none.
        """
        steps = self.trainer.trainings.train_steps
        return sum(self.need(one).steps(steps) * self.prices[one.label].step_s for one in self.candidates)

    def price_all(self) -> None:
        """Measure or read the price of every candidate."""
        for candidate in self.candidates:
            key = self.key_of("price", candidate, seed=self.seeds[0], rate=self.trainer.trainings.train_rate)
            kept = self.store.find(key, KeptPrice)
            if kept is None:
                self.notice(f"timing {candidate.label}")
                kept = self._priced(candidate, self._several_steps)
                if not kept.unfit:
                    self.store.keep(key, kept)
            self.prices[candidate.label] = kept

    def estimate_all(self) -> None:
        """Estimate the time of every candidate from one step of it; nothing is kept."""
        for candidate in self.candidates:
            self.prices[candidate.label] = self._priced(candidate, self._one_step)

    def _one_step(self, candidate: Candidate) -> KeptPrice:
        return KeptPrice(step_s=seconds_of_step(self.trainer, candidate.defense, self.seeds[0]))

    def _several_steps(self, candidate: Candidate) -> KeptPrice:
        return KeptPrice(**asdict(price_of(self.trainer, candidate.defense, self.seeds[0])))

    def run(self, results: Results | None = None) -> None:
        """Take all trainings; finished ones are read.

        Args:
            results: of the audit of the same defences, which decide what is dominated; None only where nothing is dropped.
        """
        plain = [one for one in self.candidates if one.defense is None]
        others = [one for one in self.candidates if one.defense is not None]
        for candidate in plain:
            self._take_seeds(candidate, self.trainer.trainings.train_rate)
        fit = [one for one in others if not self._is_unfit(one)]
        rates = self._choose(fit, results)
        for candidate in fit:
            if candidate.label in rates:
                self._take_seeds(candidate, rates[candidate.label])

    def found(self) -> Found:
        """Return what was measured so far."""
        waiting = [one.label for one in self.candidates if not self._trained.get(one.label)]
        reasons = dict.fromkeys(waiting, "utility not measured: the command was stopped before a training ended")
        trained = {label: tuple(own) for label, own in self._trained.items() if own}
        return Found(trained, dict(self.prices), reasons | self._reasons)

    def _is_unfit(self, candidate: Candidate) -> bool:
        why = self.prices[candidate.label].unfit
        if why:
            self._reasons[candidate.label] = f"utility not measured: {why}"
        return bool(why)

    def _choose(self, candidates: Sequence[Candidate], results: Results | None) -> dict[str, float]:
        """Return the learning rate of each candidate that is not dropped."""
        trainings = self.trainer.trainings
        rates: dict[str, float] = {}
        trials: list[Trial] = []
        for candidate in candidates:
            rates[candidate.label] = trainings.train_rate
            if not self.need(candidate).short:
                continue
            own = [
                self._take(candidate, self.seeds[0], short_steps(trainings.train_steps), rate)
                for rate in trainings.rates
            ]
            ended = [one for one in own if one.has_ended_well]
            best = min(ended, key=lambda one: float(np.mean(one.choice)), default=None)
            trials.append(Trial(candidate, None if best is None else np.array(best.choice)))
            if best is not None and best.learning_rate is not None:
                rates[candidate.label] = best.learning_rate
        rivals = [one for one in trials if has_rivals(one.candidate, self.candidates)]
        for label, why in dropped(rivals, results).items() if self.drop and results is not None else ():
            self._reasons[label] = why
            self.tell(f"{label}: {why}")
            del rates[label]
        return rates

    def _take_seeds(self, candidate: Candidate, rate: float) -> None:
        own = self._trained.setdefault(candidate.label, [])
        for seed in self.seeds:
            own.append(self._take(candidate, seed, self.trainer.trainings.train_steps, rate))

    def _take(self, candidate: Candidate, seed: int, steps: int, rate: float) -> KeptTraining:
        """Train, or read a finished training."""
        key = self.key_of("training", candidate, seed=seed, steps=steps, rate=rate)
        self.begun_s += steps * self.prices[candidate.label].step_s
        kept = self.store.find(key, KeptTraining)
        if kept is None:
            self.notice(f"{candidate.label}, seed {seed}{self.length(steps, rate)}")
            kept = self.train_one(candidate, seed, steps, rate)
            if not kept.unfit:  # what failed is tried again by the next command
                self.store.keep(key, kept)
        return kept

    def length(self, steps: int, rate: float) -> str:
        """Return the length of a training for its line of progress."""
        return f", {steps} steps at {rate:.3g}"

    def train_one(self, candidate: Candidate, seed: int, steps: int, rate: float) -> KeptTraining:
        """Train one model; where the defence does not fit, return the reason."""
        facts: dict[str, Any] = {"defense": candidate.label, "seed": seed, "steps": steps, "learning_rate": rate}
        try:
            trained = self.trainer.train(candidate.defense, seed, steps, rate)
        except UNFIT as error:
            self.trainer.check()  # foreign code may turn the exception of a signal into one of these
            if candidate.defense is None:
                raise
            return KeptTraining(**facts, unfit=_why(error))
        if trained.choice is None or trained.evaluation is None:
            return KeptTraining(**facts, diverged=True, diverged_at=trained.diverged_at)
        metrics = {
            name: KeptMetric(value=one.value, by_example=tuple(one.by_example.tolist()))
            for name, one in metrics_of(trained.evaluation).items()
        }
        choice = tuple((trained.choice.losses / trained.choice.tokens).tolist())
        return KeptTraining(**facts, choice=choice, metrics=metrics)

    def _priced(self, candidate: Candidate, measure: Callable[[Candidate], KeptPrice]) -> KeptPrice:
        """Return what `measure` returns, or why the defence has no price."""
        try:
            return measure(candidate)
        except NonFiniteUpdateError:
            return KeptPrice()  # it diverges at once, which its trainings tell
        except UNFIT as error:
            self.trainer.check()
            if candidate.defense is None:
                raise
            return KeptPrice(unfit=_why(error))

    def key_of(self, what: str, candidate: Candidate, **more: Any) -> str:
        """Return the digest of everything that a training depends on."""
        trainings = self.trainer.trainings
        defense = candidate.defense
        knobs = None if defense is None else (defense.name, asdict(defense))  # type: ignore[call-overload]
        options = [trainings.train_batch_size, trainings.train_optimizer]
        evaluation = "" if trainings.eval is None else hashlib.sha256(content_of(trainings.eval)).hexdigest()
        device = str(self.trainer.device)
        parts = [what, self.source, options, evaluation, knobs, device, __version__, more]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _why(error: Exception) -> str:
    """Return why a defence does not fit.

    A message of foreign code may hold values of the batch, so only its type and place are told.
    """
    return str(error) if isinstance(error, LeakAuditError) else type_and_place(error)
