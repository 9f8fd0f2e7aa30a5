"""The section on the time, memory and disk space that the audit took."""

from __future__ import annotations

from leakaudit.gate.wording import percent
from leakaudit.reports.cells import OBSERVED, attack_names, state_of
from leakaudit.reports.escaping import plain
from leakaudit.reports.pictures import MOST_CURVES, Curve, seconds_chart
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.reports.wording import run_time
from leakaudit.results.recovery import Severity, severity
from leakaudit.results.schema import AttemptStatus, Results
from leakaudit.results.wording import counted


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
    curves, said = _curves(results), _how_fast(results)
    picture = {
        "said": said,
        "chart": seconds_chart(curves[:MOST_CURVES], plain(said)) if curves else None,
        "curves": [_quartiles(one) for one in curves],
        "hidden": counted(max(0, len(curves) - MOST_CURVES), "attack") if len(curves) > MOST_CURVES else "",
    }
    return Section("cost", "What this audit cost", {"costs": rows, "lead": lead} | picture)


def _curves(results: Results) -> list[Curve]:
    """Return when each attack leaked, on the update as the client produced it.

    The attack with the most leaks comes first.
    """
    found = []
    for attack in attack_names(results):
        mine = [a for a in results.attempts if a.attack == attack and a.defense == OBSERVED and a.finished]
        leaks = tuple(sorted(a.wall_s for a in mine if a.leaked))
        if not leaks:
            continue
        late = any(a.status is AttemptStatus.BUDGET_EXHAUSTED and not a.leaked for a in mine)
        found.append(Curve(plain(attack), leaks, len(mine), max(a.wall_s for a in mine), state_of(mine), late))
    return sorted(found, key=lambda one: (-len(one.seconds) / one.steps, one.name))


def _how_fast(results: Results) -> str:
    """Return sentences on the first step that leaked, and on the seconds that it took.

    Empty without a leak.
    """
    mine = [a for a in results.attempts if a.defense == OBSERVED and a.finished]
    of_text = [a for a in mine if severity([a]) > Severity.LABELS]
    leaks = of_text or [a for a in mine if a.leaked]
    if not leaks:
        return ""
    what = "leak of text" if of_text else "leak of labels"
    numbers = {step.id: step.step for step in results.steps}
    order = sorted({a.step for a in mine}, key=lambda name: (numbers[name], name))
    quickest: dict[str, float] = {}
    for attempt in leaks:
        quickest[attempt.step] = min(attempt.wall_s, quickest.get(attempt.step, attempt.wall_s))
    first = next(name for name in order if name in quickest)
    fast = min(leaks, key=lambda a: (a.wall_s, numbers[a.step], a.attack))
    said = f"The first {what} is in step {numbers[first]}, number {order.index(first) + 1} of {counted(len(order), 'searched step')}. "
    said += f"The quickest one took {run_time(fast.wall_s)} ({fast.attack})"
    half = -(-len(order) // 2)
    times = sorted(quickest.values())
    if len(times) >= half and len(order) > 1:
        return f"{said}, and half of the steps had one within {run_time(times[half - 1])} of attack."
    return said + (
        "." if len(order) == 1 else f"; {len(times)} of {len(order)} steps had one, which is less than half."
    )


def _quartiles(one: Curve) -> dict[str, str]:
    """Return a curve as the row of a table.

    Seconds until a quarter, half and three quarters of the steps had leaked.
    """
    needed = [-(-one.steps * quarter // 4) for quarter in (1, 2, 3)]
    cells = [run_time(one.seconds[n - 1]) if n <= len(one.seconds) else "not reached" for n in needed]
    return {
        "attack": one.name,
        "leaked": f"{len(one.seconds)} of {one.steps}",
        "first": run_time(one.seconds[0]),
        **dict(zip(("quarter", "half", "most"), cells, strict=True)),
        "longest": run_time(one.longest) + (", cut off" if one.cut else ""),
    }
