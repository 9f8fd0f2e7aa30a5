"""The attacks on one step, as it was observed or under a defence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from leakaudit.audit.attempt import AttemptRunner, generator
from leakaudit.audit.due_attempts import DueAttempts, Labelled
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.config.invocation import public_reason
from leakaudit.errors import AnatomyError, SnapshotError, type_and_place
from leakaudit.plugins.defense_protocol import Defense
from leakaudit.plugins.error_feedback import mean_of_window
from leakaudit.results.schema import AttemptStatus


@dataclass(frozen=True)
class Attacks:
    """Runs attempts and writes them to the journal."""

    due: DueAttempts
    attempts: AttemptRunner
    seed: int
    """Seed of the audit."""
    on_gpu: Callable[[], bool]
    """Whether attacks compute on a GPU; memory that runs out there is the caller's business."""

    def under(
        self, label: str, defense: Defense, due: Iterator[Labelled], client: ClientStep, seen: Observation, truth: Truth
    ) -> None:
        """Apply one defence, if an attempt under it is due, and run the attempts."""
        if (first := next(due, None)) is None:
            return
        todo = chain((first,), due)
        if not seen.whole and not defense.is_identity():
            reason = "only parts of this step were kept, and no defence can be tried on them: `keep: all` keeps it"
            self.due.close(todo, AttemptStatus.SKIPPED, reason)
            return
        if client.recipe.window > 1 and not (defense.error_feedback or defense.is_identity()):
            reason = f"a window shows what error feedback sends later, and {defense.name} has none: audit it without --window"
            self.due.close(todo, AttemptStatus.SKIPPED, reason)
            return
        try:
            defended = _defended(defense, client, seen, generator(self.seed, first[0].step, label))
        except AnatomyError as error:
            self.due.close(
                todo, AttemptStatus.NOT_APPLICABLE, public_reason(f"the defence does not apply: {error}", defense)
            )
            return
        except Exception as error:
            if self.on_gpu() and isinstance(error, torch.OutOfMemoryError):
                raise
            # Our own messages say what to do and hold no private text.
            reason = str(error) if isinstance(error, SnapshotError) else type_and_place(error)
            self.due.close(todo, AttemptStatus.ERROR, reason)
            return
        self.run_all(todo, defended, truth)

    def run_all(self, todo: Iterable[Labelled], seen: Observation, truth: Truth) -> None:
        """Run attempts on an observation, one after another."""
        for which, attack in todo:
            self.due.append(self.attempts.run(which, attack, seen, truth, raise_out_of_memory=self.on_gpu()))


def _defended(defense: Defense, client: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
    """Return what the adversary sees under a defence, of one update or of a window."""
    if client.recipe.window > 1 and defense.error_feedback:
        return mean_of_window(defense, client, seen, rng)
    return defense(client, seen, rng)
