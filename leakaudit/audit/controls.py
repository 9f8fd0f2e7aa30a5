"""The controls of an audit: attacks on undefended canary steps with known text.

Positive control: an attack must recover the canary. Negative control: what an attack recovers from a canary must not match the real batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from leakaudit.audit.attempt import Scorer, can_read, generator, readable
from leakaudit.audit.canaries import CANARIES
from leakaudit.audit.scoring.score import Scored
from leakaudit.audit.state import AuditState, ControlOutcome, number_of
from leakaudit.client.array_batches import array_batch
from leakaudit.client.batches import make_batch, with_random_state
from leakaudit.client.facts import Granted, PublicFacts
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch, Truth, reading_of
from leakaudit.config.audit import AuditConfig
from leakaudit.config.shard import Shard
from leakaudit.errors import ModelError, SnapshotError
from leakaudit.models.array_classifier import ArrayClassifier
from leakaudit.models.loading import Task
from leakaudit.models.tensors import outputs_of
from leakaudit.plugins.attack_protocol import Attack
from leakaudit.plugins.budget import Budget
from leakaudit.results.schema import Control, Controls, Kind, KindControl, Tally

SHOWN_BY: Mapping[Kind, str] = MappingProxyType(
    {"text": "exact_sequence", "words": "all_words", "labels": "label_counts"}
)
"""Kind -> the event that shows that a canary was recovered in this kind."""


@dataclass(frozen=True)
class ControlRunner:
    """Runs the controls of one audit."""

    config: AuditConfig
    tokenizer: Any
    attacks: Sequence[tuple[str, Attack]]
    """Pairs of label and attack."""
    scorer: Scorer
    shard: Shard | None = None
    """The audit's shard; None for a whole audit."""

    def left(self, state: AuditState) -> int:
        """Return the number of controls that have not run yet."""
        planned = self.config.controls if self.shard is None else len(self.shard.numbers(self.config.controls))
        return max(0, planned - len(state.saved.controls))

    def is_due(self, state: AuditState, step_id: str) -> bool:
        """Return whether a control has to run beside a step.

        The first steps of an audit have one each. A shard runs the controls of those of them that are its own.
        """
        own = self.shard is None or number_of(step_id) < self.config.controls
        return own and not state.has_control(step_id) and self.left(state) > 0

    def run_if_due(
        self, state: AuditState, step_id: str, client: ClientStep, seen: Observation, device: torch.device
    ) -> None:
        """Run the control of a step and save its outcome, unless it is not due."""
        if not self.is_due(state, step_id):
            return
        turn = len(state.saved.controls) if self.shard is None else number_of(step_id)
        outcome = self.run(step_id, turn, client, seen, device)
        if outcome is not None:
            state.saved.controls.append(outcome)
            state.save()

    def run(
        self, step_id: str, turn: int, client: ClientStep, seen: Observation, device: torch.device
    ) -> ControlOutcome | None:
        """Attack a canary step.

        In the first control of an audit every attack runs, because a rule trusts only attacks that have read a canary. In later ones an
        attack is left out if an earlier one has recovered what it looks for, because slow attacks take their whole budget.

        Args:
            step_id: id of the step beside which the control runs.
            turn: number of the control; it chooses the canary.
            client: the real step, whose model and mode the canary step uses.
            seen: the observation of the real step.
            device: where attacks compute.

        Returns:
            The outcome; None if the canary step cannot be computed.

        Raises:
            torch.OutOfMemoryError: the GPU has no room; on the CPU the control can be repeated.
        """
        own_truth, canary = self._canary(client, turn, device)
        if canary is None:
            return None
        found: dict[str, tuple[Kind, ...]] = {}
        matched = None
        for label, attack in self.attacks:
            if turn and any(attack.goal in kinds for kinds in found.values()):
                continue
            scores = self._scores(step_id, label, attack, seen, canary, (own_truth, client.truth))
            if scores is None:
                continue
            own, other = scores
            if attack.goal != "labels":  # label counts of two batches are often the same
                matched = bool(matched) or SHOWN_BY[attack.goal] in other.events
            found[label] = tuple(kind for kind, event in SHOWN_BY.items() if event in own.events)
        goals = {attack.goal for _, attack in self.attacks}
        sought = tuple(sorted(goals & {"labels"} if isinstance(client.model, ArrayClassifier) else goals))
        return ControlOutcome(step=step_id, sought=sought, found=found, matched_other=matched)

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
        except torch.OutOfMemoryError:
            raise
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
        canary = ClientStep(client.model, truth, recipe, facts)
        if (seen := _observed(canary)) is not None or client.recipe.loss != "pulls":
            return truth, seen
        return truth, _observed(canary, client)

    def _batch(self, client: ClientStep, facts: PublicFacts, turn: int, label: int) -> MicroBatch:
        """Return the canary: one sentence, or two arrays of noise.

        Batch normalisation cannot train on one array. A sentence of a language model ends with the tokenizer's end of a text, as most
        trainings add it: what reads the model's inputs could not read the last word otherwise, which the model only predicts.
        """
        if isinstance(client.model, ArrayClassifier):
            random = generator(self.config.seed, "canary", str(turn))
            noise = torch.rand((2, *(facts.input_shape or ())), generator=random)
            return array_batch(noise, torch.tensor([label, label]))
        # Where labels are words, the canary's own words are the labels: a masked language model then predicts what it is shown.
        words = ("causal-lm", "masked-lm", "encoder-decoder")
        task: Task = "causal-lm" if facts.task in words else "classification"
        text = CANARIES[turn % len(CANARIES)]
        if task == "causal-lm":
            text += getattr(self.tokenizer, "eos_token", None) or ""
        return make_batch(self.tokenizer, [text], [label], task, facts.vocabulary.max_length)


def _observed(canary: ClientStep, real: ClientStep | None = None) -> Observation | None:
    """Return the observation of a canary step; None if it cannot be computed.

    Args:
        canary: the step, with the loss of its model.
        real: the step of the client, whose loss outside the model takes the place of that; None for no other loss.
    """
    try:
        return (canary if real is None else _with_loss_of(real, canary)).observe()
    except torch.OutOfMemoryError:
        raise
    except (ModelError, SnapshotError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def _with_loss_of(real: ClientStep, canary: ClientStep) -> ClientStep:
    """Return a canary step whose model returns no loss of its own.

    The gradients that the real loss sent to the model's outputs for the first example are sent to the canary's outputs instead. So the
    canary's update depends on the same positions and directions as the update of a real text does.

    Raises:
        LookupError: the model has no output of that name.
    """
    batch, source = canary.truth.micro_batches[0], real.truth.micro_batches[0]
    inputs = {name: value for name, value in batch.inputs.items() if name != "labels"}
    with torch.no_grad():
        outputs = dict(outputs_of(real.model(**inputs)))
    gradients = {
        path: fitted(gradient[:1], outputs[path].shape)
        for path, gradient in source.output_gradients.items()
        if gradient.dim() > 1
    }
    return replace(
        canary,
        truth=replace(canary.truth, micro_batches=(replace(batch, inputs=inputs, output_gradients=gradients),)),
        recipe=canary.recipe.model_copy(update={"loss": "pulls"}),
        facts=canary.facts.model_copy(update={"own_loss": False}),
    )


def fitted(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient at an output of another shape, (1, T, ...).

    Positions are repeated from the beginning. Those at which the gradient is zero at the end, as at padding, are left out.

    Raises:
        LookupError: the shapes differ in more than the positions.
    """
    if gradient.shape == shape:
        return gradient
    if gradient.dim() < 3 or gradient.shape[2:] != shape[2:]:
        raise LookupError("an output has another shape")
    used = int(gradient.flatten(2).any(dim=2).nonzero()[:, 1].max()) + 1 if bool(gradient.any()) else gradient.shape[1]
    return gradient[:, torch.arange(shape[1], device=gradient.device) % used]


def _facts_of_canary(facts: PublicFacts, batch: MicroBatch, label: int) -> PublicFacts:
    """Return the facts of a canary step.

    Grants and the bound on the batch size are those of the canary, not of the real batch.
    """
    names = facts.granted.names()
    own = Granted.of(batch.inputs["input_ids"].tolist(), (label,), names) if names else Granted()
    bound = None if facts.batch_size_bound is None else len(batch.inputs["input_ids"])
    return facts.model_copy(update={"granted": own, "batch_size_bound": bound})


NOT_COMPUTED = "no canary step could be computed on the model of this audit"
"""Note on a control that was planned and ran on no step."""


def counted_controls(outcomes: Sequence[ControlOutcome], planned: int = 0) -> Controls:
    """Return the counts of both controls over all outcomes.

    Args:
        outcomes: of the controls that ran.
        planned: number of controls that were asked for.
    """
    if not outcomes:
        return Controls(positive=Control(note=NOT_COMPUTED if planned else ""))
    scored = [outcome for outcome in outcomes if outcome.matched_other is not None]
    kinds = {kind: _of_kind(outcomes, kind) for kind in SHOWN_BY}
    return Controls(
        positive=Control(
            k=sum(all(_has(outcome, kind) for kind in outcome.sought) for outcome in outcomes),
            n=len(outcomes),
            note=_by_whom(kinds),
        ),
        negative=Control(
            k=sum(bool(outcome.matched_other) for outcome in scored),
            n=len(scored),
            note="reconstructions of another batch's update that matched the real batch",
        ),
        kinds=kinds,
    )


def _has(outcome: ControlOutcome, kind: Kind) -> bool:
    return any(kind in found for found in outcome.found.values())


def _of_kind(outcomes: Sequence[ControlOutcome], kind: Kind) -> KindControl:
    """Return on how many canary steps one kind was recovered, and by whom."""
    ran = dict.fromkeys(label for outcome in outcomes for label in outcome.found)
    by = {}
    for label in ran:
        own = [kind in outcome.found[label] for outcome in outcomes if label in outcome.found]
        by[label] = Tally(k=sum(own), n=len(own))
    return KindControl(k=sum(_has(outcome, kind) for outcome in outcomes), n=len(outcomes), by=by)


def _by_whom(kinds: Mapping[Kind, KindControl]) -> str:
    """Return the note on the positive control: which attacks recovered what."""
    names = {kind: [label for label, own in found.by.items() if own.k] for kind, found in kinds.items()}
    said = [f"{kind} by {', '.join(labels)}" for kind, labels in names.items() if labels]
    return f"undefended canary steps: {'; '.join(said)}" if said else "no canary step was recovered"
