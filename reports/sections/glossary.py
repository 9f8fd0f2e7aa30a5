"""The section that explains the words of a report."""

from __future__ import annotations

from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.results.schema import LENGTHS, PluginEntry

GLOSSARY = (
    ("Client step", "One optimizer step of one client: the batch and the update that was sent for it. All rates count client steps."),
    ("Leak", "One of these came back, from the least to the worst: the exact label counts; every word of the batch, or most words of a text; a whole text, word for word."),
    ("No leak event", "No leak, and no search was cut off. The numbers beside it say how much still came back."),
    ("Bounds", "The lowest and highest leak rate that the counts are compatible with: one-sided Clopper-Pearson."),
    ("Out of time", "The attack was stopped at its time limit. More time might find more, so such a step does not show what a defence stops."),
    ("Not applicable", "The attack says that it cannot work here, and why. It is no evidence that nothing leaks."),
    ("Unverifiable", "A step that cannot be computed again, so nobody knows whether its update comes from the kept batch. What comes back from it proves a leak; where nothing comes back, it is no evidence."),
    ("Positive control", "An undefended step with known text that must be recovered. If it is not, the audit is blind."),
    ("Negative control", "An update of another batch. If the text is \"recovered\" from that, the scores are wrong."),
    ("In reach", "Tokens that were among an attack's candidates; sequences that would have passed its own test, had it tried them."),
    ("Search gave up", "The text was in reach, and the attack did not find it. More time or a better search might: no protection."),
    ("Not by these attacks", "The attacks that were run could not have found the text, however long they searched. Another attack may."),
    ("Lengths", LENGTHS),
)  # fmt: skip


def section(redacted: RedactedResult) -> Section:
    """Explain the words of the report and the plugins that took part."""
    catalogue = redacted.results.catalogue
    metrics = {entry.label: entry.meaning for entry in catalogue.metrics.values()}
    plugins = {
        _title(name, entry): entry.meaning
        for entries in (catalogue.attacks, catalogue.defenses)
        for name, entry in entries.items()
    }
    described = [(title, meaning) for title, meaning in (metrics | plugins).items() if meaning]
    return Section("glossary", "Glossary", {"entries": [*GLOSSARY, *described]})


def _title(name: str, entry: PluginEntry) -> str:
    """Return a label, with the name that tables use if the two differ."""
    bare = name.partition("(")[0]
    return entry.label if entry.label.lower() == bare.replace("-", " ") else f"{entry.label} ({bare})"
