"""The section on the time, memory and disk space that the audit took."""

from __future__ import annotations

from leakaudit.gate.wording import percent
from leakaudit.reports.cells import attack_names
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.reports.wording import run_time


def section(redacted: RedactedResult) -> Section:
    """Show the time that each attack took, and what the audit cost the training run."""
    results = redacted.results
    rows = []
    for attack in attack_names(results):
        mine = [a for a in results.attempts if a.attack == attack]
        seconds = sorted(a.wall_s for a in mine if a.finished)
        first = min((a.wall_s for a in mine if a.leaked), default=None)
        counts: dict[str, int] = {}
        for attempt in mine:
            word = attempt.status.value.replace("_", " ")
            counts[word] = counts.get(word, 0) + 1
        gpu = sum(a.gpu_s for a in mine)
        rows.append(
            {
                "attack": attack,
                "attempts": ", ".join(f"{n} {word}" for word, n in counts.items()) or "none",
                "median": run_time(seconds[len(seconds) // 2]) if seconds else "none",
                "total": run_time(sum(a.wall_s for a in mine)),
                "gpu": run_time(gpu) if gpu else "none",
                "first": run_time(first) if first is not None else "none",
            }
        )
    lead = f"Each attempt was allowed {run_time(results.run.battery.budget_s)}."
    overhead = results.overhead
    if overhead.training_s:
        share = percent(overhead.blocked_s / overhead.training_s)
        lead += f" The audit held up training for {run_time(overhead.blocked_s)} of {run_time(overhead.training_s)} ({share})."
    elif overhead.blocked_s:
        lead += f" The audit held up training for {run_time(overhead.blocked_s)}."
    if overhead.disk_mb:
        lead += (
            f" A thread beside training wrote {overhead.disk_mb:.0f} MB in {run_time(overhead.writer_s or 0.0)}, from copies of "
            f"{overhead.memory_mb or 0.0:.0f} MB in the trainer's memory."
        )
    return Section("cost", "Cost", {"costs": rows, "lead": lead})
