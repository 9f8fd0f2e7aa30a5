"""What left the machine: a second update of a step, beside the produced one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from leakaudit.audit.applied_defenses import defenses_found, defenses_left
from leakaudit.audit.as_declared import is_as_declared
from leakaudit.audit.comparison import Update
from leakaudit.audit.verification import verify
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import Observation
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.results.as_sent import AS_SENT, PRODUCED
from leakaudit.results.journal import JournalEntry
from leakaudit.results.schema import StepRecord, Verification, VerificationStatus

UNDECLARED = DeclaredDefense(name="undeclared change")
"""The defence in a sent update that is not what the declared defences make of the produced one. No plugin has this name, so an attack
knows nothing about it: any part of the update may be noise, and any entry may have been set to zero."""

NOT_AS_DECLARED = "what was sent is not what the declared defences make of the produced update"

BEYOND_DECLARED = (
    "what was sent comes from the produced update, but differs from it by digits or noise that the declared defences do not make; send what "
    "the training left, without computing with it"
)


@dataclass(frozen=True)
class SentUpdate:
    """A sent update that differs from the produced one."""

    seen: Observation
    """What attacks see, with the defences that are in it."""
    stamp: Verification
    """Whether the declared defences make it from the produced update."""
    shipped: tuple[DeclaredDefense, ...]
    """The declared defences that are in it, as the protocol declares them."""


def sent_of(snapshot: Snapshot, produced: Observation, client: ClientStep) -> SentUpdate | None:
    """Return what was sent, if it differs from what was produced.

    What left beside it is not known, so nothing of it is verified then.

    Args:
        snapshot: says what was sent; nothing if nobody told it.
        produced: the update of the training.
        client: the step that produced it.
    """
    if snapshot.sent is None:
        return None
    beside, differences = snapshot.sent_beside, snapshot.sent_differences
    sent = snapshot.sent.to(next(produced.model.parameters()).device)
    own = tuple(one for one in sent.facts.defenses if one in produced.facts.defenses)
    same = not beside and _same(sent.update, produced.update)
    if same and sent.facts.defenses == own:
        return None
    declared = replace(client, facts=sent.facts)
    bare = {name: produced.update[name] for name in sent.update}
    stamp = verify(declared, sent.update, repeated=bare)

    def left() -> list[DeclaredDefense]:
        return [one for one in defenses_left(declared, stamp) if one not in own]

    if same and stamp.status.bounds:
        if left() and is_as_declared(declared, produced, sent.update, left(), differences=differences):
            return None  # the declared defences do nothing to it
        stamp = stamp.model_copy(update={"absent": (*stamp.absent, *(one.name for one in left()))})
    unsent = len(produced.update) - len(bare)
    left_out = f"{unsent} of {len(produced.update)} trained parameters were not sent" if unsent else ""
    factor = 1.0 if stamp.scale is None else stamp.scale
    explained = stamp.status.bounds and is_as_declared(
        declared, produced, sent.update, left(), factor=factor, differences=differences
    )
    if explained and not beside:
        found = defenses_found(declared, stamp, sent.update)
        stamp = stamp.model_copy(update={"note": "; ".join(filter(None, (stamp.note, left_out)))})
        return SentUpdate(sent.declaring(found), stamp, defenses_left(declared, stamp))
    why = f"{beside} other tensors left with it, which nobody audited" if beside else NOT_AS_DECLARED
    if stamp.status.bounds and not explained:
        why = BEYOND_DECLARED
    unknown = Verification(status=VerificationStatus.UNVERIFIABLE, note="; ".join(filter(None, (why, left_out))))
    return SentUpdate(sent.declaring((*own, UNDECLARED)), unknown, own)


def copies_of_produced(entries: Iterable[JournalEntry], steps: Iterable[StepRecord]) -> Iterator[JournalEntry]:
    """Yield the attempts on steps that were sent as produced, a second time as sent.

    Nothing is attacked twice: the two updates are the same. A step whose update was changed has no copies, even if the attempts on what was
    sent are missing.

    Args:
        entries: every finished attempt.
        steps: the records of all steps.
    """
    as_produced = {step.id for step in steps if step.sent is None}
    entries = list(entries)
    made = {(e.attempt.step, e.attempt.attack) for e in entries if e.attempt.defense == AS_SENT}
    for entry in entries:
        attempt = entry.attempt
        if attempt.defense != PRODUCED or attempt.step not in as_produced:
            continue
        if (attempt.step, attempt.attack) not in made:
            yield entry.model_copy(
                update={
                    "attempt": attempt.model_copy(update={"defense": AS_SENT}),
                    "samples": tuple(s.model_copy(update={"defense": AS_SENT}) for s in entry.samples),
                    "labels": entry.labels and entry.labels.model_copy(update={"defense": AS_SENT}),
                }
            )


def _same(one: Update, other: Update) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name].to(one[name])) for name in one)
