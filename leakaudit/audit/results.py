"""Assembles the results of an audit from its journal and its state."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from leakaudit import __version__
from leakaudit.audit.attempt import PARTS_ONLY
from leakaudit.audit.conformance.log import ConformanceLog
from leakaudit.audit.conformance.record import conformance_of
from leakaudit.audit.controls import counted_controls
from leakaudit.audit.membership.log import MembershipLog
from leakaudit.audit.membership.summary import membership_of
from leakaudit.audit.privacy import SHIPPED, privacy_of
from leakaudit.audit.provenance import released_files
from leakaudit.audit.secret_bounds import canaries_of
from leakaudit.audit.state import SavedState, now, number_of
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.errors import ResultsError
from leakaudit.registry import attacks as attack_registry
from leakaudit.results.artifacts import Found
from leakaudit.results.as_sent import AS_SENT, SENT_ENTRY
from leakaudit.results.files import with_digest
from leakaudit.results.journal import JournalEntry
from leakaudit.results.lengths import without_counts
from leakaudit.results.schema import (
    Attempt,
    AttemptStatus,
    Battery,
    Catalogue,
    Coverage,
    NotTested,
    Overhead,
    Privacy,
    Results,
    RunInfo,
    StepRecord,
    TextMode,
    ThreatModel,
)
from leakaudit.results.summary import seeds_of, summarise
from leakaudit.results.wording import counted

NEVER_TESTED = (
    ("aggregated updates", "one client's update was audited, not a sum over clients"),
    ("attribute inference", "only text and labels of the batch are attacked"),
)
"""What no audit of this version tests, and why."""


@dataclass(frozen=True)
class RunEnd:
    """What the caller of an audit knows when the audit ends."""

    refused: int = 0
    """Number of snapshots that could not be audited and whose step is unknown."""
    not_kept: Sequence[tuple[int, str]] = ()
    """Pairs of a number of due steps that were not recorded, and the reason."""
    total_steps: int | None = None
    """Number of optimizer steps of the training run; None if unknown."""
    overhead: Overhead = field(default_factory=Overhead)
    """What the audit cost the training process."""
    interrupted: bool = False
    """Whether the audit was stopped before its end."""
    simulated: bool = False
    """Whether no training run made the steps."""
    final: bool = False
    """Whether the files that the run made are looked for now."""
    privacy: tuple[Privacy, ...] = ()
    """What the accountant of the training said."""


@dataclass(frozen=True)
class ResultsBuilder:
    """Builds the results of one audit."""

    folder: Path
    """Folder of the audit; error messages name it."""
    config: AuditConfig
    battery: Battery
    command: str
    """How the audit was started."""
    catalogue: Catalogue
    """Descriptions of the audit's plugins."""
    pairing: str = ""
    """Id of the key of the steps' marks; empty without one."""

    def build(self, saved: SavedState, entries: Sequence[JournalEntry], end: RunEnd, device: torch.device) -> Results:
        """Return the results with their digest.

        Args:
            saved: the audit's state.
            entries: every finished attempt.
            end: what the caller knows at the end of the audit.
            device: where attacks computed.

        Raises:
            ResultsError: no step was audited.
        """
        if saved.subject is None or saved.regime is None:
            raise ResultsError(
                f"{self.folder}: no step was audited, so there are no results; "
                "was the run shorter than `first_step`, or was every snapshot skipped?"
            )
        attempts = tuple(_public(entry.attempt) for entry in entries)
        released = released_files(self.config, self.folder, saved.origin) if end.final else Found()
        granted = tuple(sorted({name for attempt in attempts for name in attempt.granted}))
        privacy = privacy_of(self.config, end.privacy, declared=bool(saved.regime.declared))
        stated = [one for one in privacy if one.defense == SHIPPED]
        ordered = tuple(sorted(saved.steps, key=lambda step: step.step))  # rounds of several processes end in any order
        results = Results(
            run=self._run(saved, end, device),
            subject=saved.subject.model_copy(update={"artifacts": released.artifacts}),
            threat_model=threat_model_of(self.config.server, granted),
            regime=saved.regime,
            steps=ordered,
            attempts=attempts,
            summaries=summarise(attempts, seeds_of(saved.steps)),
            controls=counted_controls(saved.controls, self.config.controls),
            coverage=self._coverage(saved, entries, end, released),
            overhead=end.overhead,
            privacy=privacy,
            membership=membership_of(*MembershipLog(self.folder).read(), [step.id for step in ordered]),
            conformance=conformance_of(*ConformanceLog(self.folder).read(), stated, end.total_steps),
            canaries=canaries_of(entries, saved.steps, self.catalogue, privacy, self.config.privacy.delta),
            catalogue=_catalogue_with_sent(self.catalogue) if saved.as_sent else self.catalogue,
            min_tokens=self.config.min_tokens,
        )
        return with_digest(saved.origin.within(results))

    def _run(self, saved: SavedState, end: RunEnd, device: torch.device) -> RunInfo:
        return RunInfo(
            id=saved.run,
            started=saved.started,
            finished=now(),
            tool=__version__,
            battery=_battery_with_sent(self.battery) if saved.as_sent else self.battery,
            text_mode=TextMode.HASH,
            seed=self.config.seed,
            command=self.command,
            environment=environment_of(device),
            interrupted=end.interrupted,
            simulated=end.simulated,
            pairing=self.pairing,
        )

    def _coverage(self, saved: SavedState, entries: Sequence[JournalEntry], end: RunEnd, released: Found) -> Coverage:
        ran = {spec.name for spec in self.config.attacks}
        partly = Counter(e.attempt.attack for e in entries if e.attempt.reason == PARTS_ONLY.reason)
        not_tested = (
            *((f"step {number_of(step)}", why) for step, why in saved.lost.items()),
            *((f"{attack}, on {counted(n, 'step')}", PARTS_ONLY.reason) for attack, n in partly.items()),
            *((f"{counted(number, 'step')} that should have been kept", why) for number, why in end.not_kept),
            *((f"the artefact {name}", why) for name, why in released.not_named),
            *_canaries_not_tested(self.config, entries),
            *_servers_not_tested(self.config.server),
            *_membership_not_tested(self.config, self.folder),
            *NEVER_TESTED,
        )
        return Coverage(
            not_tested=tuple(NotTested(what=what, why=why) for what, why in not_tested),
            not_run=tuple(
                NotTested(what=name, why=_why_to_run(kind, saved.steps))
                for name, kind in attack_registry
                if name not in ran
            ),
            audited_steps=len(saved.steps),
            skipped_snapshots=end.refused,
            total_steps=end.total_steps,
        )


def _public(attempt: Attempt) -> Attempt:
    """Return an attempt without the exact counts in what its attack says of the batch."""
    if attempt.status is not AttemptStatus.NOT_APPLICABLE:
        return attempt
    return attempt.model_copy(update={"reason": without_counts(attempt.reason)})


def threat_model_of(server: PluginSpec | None, granted: tuple[str, ...]) -> ThreatModel:
    """Return the adversary of an audit.

    A policy may name it (`leakaudit.gate.policy_parts.RequiredThreatModel`).
    """
    if server is None:
        return ThreatModel(granted=granted)
    adversary = f"an active server, which changed the model before it sent it out ({server.label})"
    return ThreatModel(adversary=adversary, sees="one client's update of the changed model", granted=granted)


def _why_to_run(attack: Any, steps: Sequence[StepRecord]) -> str:
    """Say what an attack outside the battery might have added."""
    said = "known to the tool, not in this battery"
    more = attack.goal != "labels" and not attack.token_limit and any(step.beyond_hidden for step in steps)
    return f"{said}; it does not end where a step has as many tokens as the hidden size" if more else said


def _canaries_not_tested(config: AuditConfig, entries: Sequence[JournalEntry]) -> Iterator[tuple[str, str]]:
    """Yield why the invented records of the configuration showed nothing."""
    if config.canaries is not None and all(entry.secret is None for entry in entries):
        why = "no attacked step held a whole one: raise `rate`, keep more steps, or shorten the template so that no text is cut"
        yield "the records of `canaries`", why


def _servers_not_tested(server: PluginSpec | None) -> tuple[tuple[str, str], ...]:
    """Return the kinds of server that this audit does not test, and why."""
    if server is None:
        return (
            ("malicious server", "the battery only reads updates of honest training; crafted weights are out of scope"),
        )
    return (
        (
            "honest server",
            f"every step was computed anew on the model of {server.label}; the run's own updates were not attacked",
        ),
        ("other malicious servers", f"only {server.label} was tried"),
    )


def _membership_not_tested(config: AuditConfig, folder: Path) -> tuple[tuple[str, str], ...]:
    """Return why it was not asked who was in a step; nothing if it was."""
    if config.membership is None:
        return (
            ("membership inference", "the configuration names no texts of no step (`membership: {nonmembers: FILE}`)"),
        )
    scored, left_out = MembershipLog(folder).read()
    if scored:
        return ()
    return (("membership inference", left_out[0] if left_out else "no step was tested"),)


def _catalogue_with_sent(catalogue: Catalogue) -> Catalogue:
    """Return a catalogue that also describes what was sent."""
    return catalogue.model_copy(update={"defenses": {**catalogue.defenses, AS_SENT: SENT_ENTRY}})


def _battery_with_sent(battery: Battery) -> Battery:
    """Return a battery whose attacks also ran on what was sent."""
    return battery.model_copy(update={"defenses": (*battery.defenses, AS_SENT)})


def environment_of(device: torch.device) -> dict[str, str]:
    """Return the versions and the hardware of this process, as results name them."""
    import transformers

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": f"{device.type} ({name})",
        "threads": str(torch.get_num_threads()),
    }
