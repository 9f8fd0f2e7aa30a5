"""Scores of the candidates of one step, by its update and by another one."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leakaudit.algorithms.membership.candidates import Candidate
from leakaudit.algorithms.membership.readings import Readings, read_texts
from leakaudit.algorithms.membership.scores import entries_of, scores_from
from leakaudit.audit.membership.log import MembershipLog, Scored
from leakaudit.audit.membership.nonmembers import (
    Parts,
    has_classes,
    longest,
    parts_of,
    read_nonmembers,
    tokenised,
)
from leakaudit.audit.simulation.examples import Examples, Fields
from leakaudit.audit.step_record import texts_of
from leakaudit.client.observation import Observation
from leakaudit.client.truth import Truth
from leakaudit.config.audit import AuditConfig
from leakaudit.errors import AnatomyError, DataError, LeakAuditError, SnapshotError

logger = logging.getLogger(__name__)

Ids = tuple[int, ...]


@dataclass(frozen=True)
class _Earlier:
    """The update of an earlier step, as later ones compare it with their candidates."""

    entries: dict[str, int]
    """Parameter name -> number of entries read."""
    update: Tensor
    """(P,) float32."""
    held: frozenset[Ids]
    """Texts of that step."""

    def fits(self, readings: Readings) -> bool:
        """Return whether the same entries are read."""
        return self.entries == _sizes(readings)


@dataclass
class MembershipMeasure:
    """Tests each step of an audit once, and writes its scores into the log.

    It never raises because of a step: a step that cannot be tested is left out with the reason.
    """

    folder: Path
    """Of the audit."""
    config: AuditConfig
    tokenizer: Any
    _read: dict[str, Examples] = field(default_factory=dict)
    """Task -> the file of non-members."""
    _earlier: _Earlier | None = None

    def measure(self, step_id: str, seen: Observation, truth: Truth) -> None:
        """Test a step, unless it was tested or nobody asked for it.

        Args:
            step_id: id of the step.
            seen: what the eavesdropper sees of what the run sends, with the defences that are in it.
            truth: the texts of the step.
        """
        log = MembershipLog(self.folder)
        if self.config.membership is None or log.has(step_id):
            return
        try:
            log.add(step_id, self._scored(step_id, seen, truth))
        except torch.OutOfMemoryError:
            log.leave_out(step_id, "the GPU has no room for the gradients of the candidates")
        except DataError as error:
            logger.warning("membership: %s", error)  # names the file, which results do not
            log.leave_out(step_id, "the file of non-members cannot be read; the log of the audit says why")
        except LeakAuditError as error:
            log.leave_out(step_id, str(error))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            log.leave_out(step_id, f"its candidates cannot be read ({type(error).__name__})")  # may quote inputs

    def _scored(self, step_id: str, seen: Observation, truth: Truth) -> Scored:
        assert self.config.membership is not None
        if not seen.whole:
            raise SnapshotError("only parts of the update were kept; keep whole steps (`keep: all`)")
        held = texts_of(truth, seen)
        if not held:
            raise AnatomyError("its batch holds no text")
        labels = truth.labels() if seen.facts.task == "classification" else None
        read = self._nonmembers(seen.facts.task)
        labelled = labels is not None and len(labels) == len(held) and has_classes(read, seen.facts)
        limit = longest(self.config.membership, seen.facts)
        outside = tokenised(read.rows, self.tokenizer, limit, labelled=labelled)
        parts = parts_of(outside, set(held), self.config.membership, self.config.seed, step_id)
        known = labels if labelled and labels is not None else [None] * len(held)
        members = list({ids: Candidate(ids, label) for ids, label in zip(held, known, strict=True) if ids}.values())
        return self._compared(step_id, seen, members, parts, labelled)

    def _nonmembers(self, task: str) -> Examples:
        """Return the texts of the file, which is read once."""
        assert self.config.membership is not None
        if task not in self._read:
            what = self.config.membership
            self._read[task] = read_nonmembers(what.nonmembers, task, Fields(what.text_field, what.label_field))
        return self._read[task]

    def _compared(
        self, step_id: str, seen: Observation, members: Sequence[Candidate], parts: Parts, labelled: bool
    ) -> Scored:
        """Return the scores of members and others, in a shuffled order of candidates."""
        assert self.config.membership is not None
        draw = random.Random(f"{self.config.seed} {step_id} members")
        held = frozenset(text.token_ids for text in members)
        members = draw.sample(list(members), min(len(members), self.config.membership.candidates // 2))
        others = parts.others[: self.config.membership.candidates - len(members)]
        mixed = [(text, index < len(members)) for index, text in enumerate([*members, *others])]
        draw.shuffle(mixed)
        candidates, inside = [text for text, _ in mixed], [mine for _, mine in mixed]
        readings, calibration = read_texts(seen, candidates), read_texts(seen, parts.calibration)
        update = entries_of(seen, calibration)
        scores = scores_from(update, readings, calibration)
        found = _Divided(scores.candidates, inside)
        base = _Divided(-readings.first(readings.losses), inside)
        earlier = self._earlier if self._earlier is not None and self._earlier.fits(readings) else None
        self._earlier = _Earlier(_sizes(readings), update, held)
        known: tuple[Tensor, ...] = ()
        if earlier is None:
            batch = read_texts(seen, parts.known_batch)
            of_batch = _update_of(batch)
            alone = scores_from(of_batch, batch, calibration)
            known = tuple(alone.candidates)
            null = scores_from(of_batch, readings, calibration)
            without = [True] * len(candidates)
        else:
            null = scores_from(earlier.update, readings, calibration)
            without = [text.token_ids not in earlier.held for text in candidates]
        outside = _Divided(null.candidates, inside, without)
        return Scored(
            members=found.members,
            others=found.others,
            calibration=tuple(scores.calibration.tolist()),
            numbers=parts.numbers,
            base_members=base.members,
            base_others=base.others,
            base_calibration=tuple((-calibration.first(calibration.losses)).tolist()),
            null="known batch" if earlier is None else "another step",
            null_members=outside.members,
            null_others=outside.others,
            known_batch=tuple(float(one) for one in known),
            labelled=labelled or seen.facts.task != "classification",
            overlapped=parts.overlapped,
        )


@dataclass(frozen=True)
class _Divided:
    """Numbers of candidates, divided into members and others."""

    values: Tensor
    """(N,)"""
    inside: Sequence[bool]
    """Whether each candidate is in the step."""
    taken: Sequence[bool] | None = None
    """Whether it counts; None for all."""

    @property
    def members(self) -> tuple[float, ...]:
        return self._where(True)

    @property
    def others(self) -> tuple[float, ...]:
        return self._where(False)

    def _where(self, wanted: bool) -> tuple[float, ...]:
        taken = self.taken or [True] * len(self.inside)
        return tuple(
            float(value)
            for value, inside, counts in zip(self.values, self.inside, taken, strict=True)
            if counts and inside is wanted
        )


def _update_of(batch: Readings) -> Tensor:
    """Return (P,) the read entries of the gradient of a batch.

    It is that of plain SGD. A text without a known label counts with the first class, which is as good as any for a text of no step.
    """
    first = [int((batch.text == number).nonzero()[0, 0]) for number in range(batch.texts)]
    return batch.gradients[first].mean(dim=0)


def _sizes(readings: Readings) -> dict[str, int]:
    return {name: len(places) for name, places in readings.entries.items()}
