"""Floors on the evidence for a rule: steps in each third of the run, and texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from leakaudit.gate.evidence import Evidence
from leakaudit.gate.policy import EvidencePolicy
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted


def below(results: Results, evidence: Evidence, floor: EvidencePolicy) -> Iterator[str]:
    """Yield a sentence for each floor that the evidence for a rule does not reach.

    Args:
        results: the audit.
        evidence: for one rule; its verified and judged steps count.
        floor: of the policy.
    """
    yield from _phases(results, evidence, floor)
    if evidence.texts < floor.min_texts:
        there = "is 1" if evidence.texts == 1 else f"are {evidence.texts}"
        yield f"The policy asks for {counted(floor.min_texts, 'text')} that can have the event or score; there {there}."


def _phases(results: Results, evidence: Evidence, floor: EvidencePolicy) -> Iterator[str]:
    asked = floor.min_steps_per_phase.asked
    there: Counter[str] = Counter(step.phase for step in results.steps if step.id in evidence.bounding_steps)
    if all(there[name] >= least for name, least in asked.items()):
        return
    found = ", ".join(f"{there[name]} of {least} {name}" for name, least in asked.items())
    yield f"The policy asks for steps of evidence in each part of the run; there are {found}."
    if unknown := there["simulated"]:
        verb = "does" if unknown == 1 else "do"
        yield f"{counted(unknown, 'step')} {verb} not say in which part of a run they lie: simulated, or in a run of unknown length."
