"""The controls of an audit: attacks on undefended canary steps with known text.

Positive control: an attack must recover the canary. Negative control: what an attack recovers from a canary must not match the real batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leakaudit.audit.attempt import Scorer, can_read, generator, readable
from leakaudit.audit.canaries import CANARIES
from leakaudit.audit.scoring.score import Scored
from leakaudit.audit.state import ControlOutcome
from leakaudit.client.array_batches import array_batch
from leakaudit.client.batches import make_batch, with_random_state
from leakaudit.client.facts import Granted, PublicFacts
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch, Truth, reading_of
from leakaudit.config.audit import AuditConfig
from leakaudit.errors import SnapshotError
from leakaudit.models.array_classifier import ArrayClassifier
from leakaudit.models.loading import Task
from leakaudit.plugins.attack_protocol import Attack
from leakaudit.plugins.budget import Budget
from leakaudit.results.schema import Control, Controls


@dataclass(frozen=True)
class ControlRunner:
    """Runs the controls of one audit."""

    config: AuditConfig
    tokenizer: Any
    attacks: Sequence[tuple[str, Attack]]
    """Pairs of label and attack."""
    scorer: Scorer

    def run(
        self, step_id: str, turn: int, client: ClientStep, seen: Observation, device: torch.device
    ) -> ControlOutcome | None:
        """Attack a canary step until both controls have an outcome.

        This is so when one attack has recovered the canary and one attack on text has been scored; otherwise every attack runs.

        Args:
            step_id: id of the step beside which the control runs.
            turn: number of the control; it chooses the canary.
            client: the real step, whose model and mode the canary step uses.
            seen: the observation of the real step.
            device: where attacks compute.

        Returns:
            The outcome; None if the canary step cannot be computed.
        """
        own_truth, canary = self._canary(client, turn, device)
        if canary is None:
            return None
        recovered, by, matched = False, "", None
        for label, attack in self.attacks:
            scores = self._scores(step_id, label, attack, seen, canary, (own_truth, client.truth))
            if scores is None:
                continue
            own, other = scores
            wanted = "exact_sequence" if attack.goal == "text" else "label_counts"
            if attack.goal == "text":
                matched = bool(matched) or "exact_sequence" in other.events
            if wanted in own.events and not by:
                recovered, by = True, label
            if recovered and matched is not None:
                break
        return ControlOutcome(step=step_id, recovered=recovered, by=by, matched_other=matched)

    def _scores(
        self,
        step_id: str,
        label: str,
        attack: Attack,
        seen: Observation,
        canary: Observation,
        truths: tuple[Truth, Truth],
    ) -> tuple[Scored, Scored] | None:
        """Return the scores of a canary's reconstruction against each of two batches.

        None if the attack cannot be a control: it is blind, does not apply to the canary, needs parts of the real step that were not kept,
        or crashed. The attempt on the real step reports such a crash.
        """
        budget = Budget(self.config.budget_s)
        try:
            if getattr(attack, "blind", False) or not can_read(attack, seen):
                return None
            canary, fits = readable(attack, canary)
            if not fits:
                return None
            guess = attack(canary, generator(self.config.seed, step_id, label, "canary"), budget)
            own, other = (self.scorer.score(guess, truth, canary) for truth in truths)
        except Exception:
            return None
        return own, other

    def _canary(self, client: ClientStep, turn: int, device: torch.device) -> tuple[Truth, Observation | None]:
        """Return an undefended canary step on the run's model, with its batch.

        The observation is None if the step cannot be computed. The report then says that the control did not run.
        """
        optimizer = client.facts.optimizer
        alone = None if optimizer is None else optimizer.one_fresh_step()
        facts = client.facts.model_copy(update={"defenses": (), "local_steps": 1, "optimizer": alone, "own_loss": None})
        label = turn % max(1, facts.num_labels or 1)
        batch = self._batch(client, facts, turn, label)
        facts = _facts_of_canary(facts, batch, label)
        batch = with_random_state(batch, self.config.seed + turn)
        truth = Truth((batch,), reading_of(facts)).to(device)
        recipe = StepRecipe(training=client.recipe.training, max_grad_norm=client.recipe.max_grad_norm)
        try:
            return truth, ClientStep(client.model, truth, recipe, facts).observe()
        except (SnapshotError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return truth, None

    def _batch(self, client: ClientStep, facts: PublicFacts, turn: int, label: int) -> MicroBatch:
        """Return the canary: one sentence, or two arrays of noise.

        Batch normalisation cannot train on one array.
        """
        if isinstance(client.model, ArrayClassifier):
            random = generator(self.config.seed, "canary", str(turn))
            noise = torch.rand((2, *(facts.input_shape or ())), generator=random)
            return array_batch(noise, torch.tensor([label, label]))
        # Where labels are words, the canary's own words are the labels: a masked language model then predicts what it is shown.
        words = ("causal-lm", "masked-lm", "encoder-decoder")
        task: Task = "causal-lm" if facts.task in words else "classification"
        text = CANARIES[turn % len(CANARIES)]
        return make_batch(self.tokenizer, [text], [label], task, facts.vocabulary.max_length)


def _facts_of_canary(facts: PublicFacts, batch: MicroBatch, label: int) -> PublicFacts:
    """Return the facts of a canary step.

    Grants and the bound on the batch size are those of the canary, not of the real batch.
    """
    lengths, labels, words = facts.granted.lengths, facts.granted.labels, facts.granted.words
    own = Granted(
        lengths=None if lengths is None else (int(batch.inputs["input_ids"].shape[1]),),
        labels=None if labels is None else (label,),
        words=None if words is None else tuple(batch.inputs["input_ids"].unique().tolist()),
    )
    bound = None if facts.batch_size_bound is None else len(batch.inputs["input_ids"])
    return facts.model_copy(update={"granted": own, "batch_size_bound": bound})


def counted_controls(outcomes: Sequence[ControlOutcome]) -> Controls:
    """Return the counts of both controls over all outcomes."""
    if not outcomes:
        return Controls()
    scored = [outcome for outcome in outcomes if outcome.matched_other is not None]
    by = sorted({outcome.by for outcome in outcomes if outcome.by})
    return Controls(
        positive=Control(
            k=sum(outcome.recovered for outcome in outcomes),
            n=len(outcomes),
            note=f"undefended canary steps recovered by {', '.join(by)}" if by else "no canary step was recovered",
        ),
        negative=Control(
            k=sum(bool(outcome.matched_other) for outcome in scored),
            n=len(scored),
            note="reconstructions of another batch's update that matched the real batch",
        ),
    )
