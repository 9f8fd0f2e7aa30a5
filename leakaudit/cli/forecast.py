"""Time and disk space of an audit, from one measured step; for `leakaudit doctor`.

The step is made of the user's model and of texts, and gets the whole battery, on the device and with the threads of the side process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from leakaudit.results.wording import counted, duration

if TYPE_CHECKING:
    from leakaudit.config.audit import AuditConfig
    from leakaudit.gate.policy import Policy

SHOWN = 3
"""Slowest attempts that are named. Our choice: one line."""
WHOLE_BYTES = 10**9
"""Size in bytes up to which `keep: auto` keeps a whole step."""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report."""

    state: Literal["ok", "warn", "fail"]
    sentence: str


@dataclass(frozen=True)
class StepCost:
    """What one step cost."""

    texts: int
    """Number of texts in its batch."""
    seconds: float
    """Time of its verification and of all attempts."""
    attempts: tuple[tuple[str, float], ...]
    """Attack and defence, and its seconds; the slowest first."""
    step_bytes: int
    """Size of its weights and its update."""
    once_bytes: int
    """Size of the weights that are not trained, which all steps share."""


@dataclass(frozen=True)
class Measured:
    """The step that the user asks for."""

    model: Path
    data: Path | None = None
    """File of texts; None for sentences that came with leakaudit."""
    task: Literal["classification", "causal-lm"] = "classification"
    batch_size: int = 8
    text_field: str = "text"
    label_field: str = "label"

    def cost(self, config: AuditConfig) -> StepCost:
        """Make one step, audit it, and return what that cost.

        Raises:
            ModelError, DataError, ConfigError: the model or the data cannot be used.
        """
        import torch

        from leakaudit.audit.audit import Audit
        from leakaudit.audit.devices import choose_device
        from leakaudit.audit.simulation.texts import Simulator
        from leakaudit.config.simulation import Simulation

        threads = torch.get_num_threads()
        torch.set_num_threads(config.threads)
        try:
            with tempfile.TemporaryDirectory(prefix="leakaudit-doctor-") as name:
                folder = Path(name)
                data = self.data or _sentences(folder / "sentences.jsonl", self.batch_size)
                what = Simulation(self.model, data, task=self.task, batch_size=self.batch_size, steps=1)
                if self.data is not None:
                    what = replace(what, text_field=self.text_field, label_field=self.label_field)
                made = Simulator(what)
                alone = config.model_copy(update={"controls": 0, "out_dir": folder / "audit"})
                audit = Audit(folder / "audit", alone, made.tokenizer, device=choose_device(config.device))
                snapshot = made.snapshot(0)
                begun = time.perf_counter()
                audit.step(snapshot)
                seconds = time.perf_counter() - begun
                ran = [entry.attempt for entry in audit.entries]
        finally:
            torch.set_num_threads(threads)
        sizes = {name: p.numel() * p.element_size() for name, p in made.model.named_parameters()}
        shared = sum(size for name, size in sizes.items() if name in snapshot.observation.update)
        pairs = ((f"{a.attack} / {a.defense}", a.wall_s) for a in ran)
        return StepCost(
            texts=self.batch_size,
            seconds=seconds,
            attempts=tuple(sorted(pairs, key=lambda pair: -pair[1])),
            step_bytes=2 * shared,
            once_bytes=sum(sizes.values()) - shared,
        )


def forecast(cost: StepCost, config: AuditConfig, policy: Policy, steps: int | None) -> Iterator[Check]:
    """Yield what one step cost, and what a training of `steps` steps will cost."""
    from leakaudit.capture.plan import Plan, room_in_words

    slowest = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in cost.attempts[:SHOWN])
    once = f", and {_gigabytes(cost.once_bytes)} once" if cost.once_bytes else ""
    parts = ", less with `keep: auto`" if cost.step_bytes > WHOLE_BYTES and config.keep == "auto" else ""
    yield Check(
        "ok",
        f"one step with {counted(cost.texts, 'text')}: verified and attacked in {cost.seconds:.1f} s with "
        f"{counted(config.threads, 'thread')} ({slowest}); {_gigabytes(cost.step_bytes)} on the disk{parts}{once}",
    )
    if steps is None:
        return
    plan = Plan.of(config, policy, steps)
    kept = plan.kept or 0
    audited = kept + min(kept, config.controls)
    most = audited * len(config.attacks) * len(config.defenses) * config.budget_s
    room = max(0, int(config.max_spool_gb * 1e9) - cost.once_bytes) // max(1, cost.step_bytes)
    full = room_in_words(plan, config, room)
    controls = counted(min(kept, config.controls), "control step")
    about = f"about {duration(audited * cost.seconds)} (at most {duration(most)}, {controls} included)"
    clauses = [
        f"{counted(steps, config.unit)} of training: {plan.steps_in_words()}",
        f"attacks take {about} {_when(config)}",
        f"all kept steps together take {_gigabytes(kept * cost.step_bytes + cost.once_bytes)}",
        full,
        plan.policy_in_words(config, room),
    ]
    wrong = clauses[-1] or (full and config.schedule == "deferred")
    yield Check("warn" if wrong else "ok", "; ".join(filter(None, clauses)))


def _when(config: AuditConfig) -> str:
    return {
        "beside": "in a process beside the training",
        "deferred": "after the training",
        "inline": "in the training process, which waits for them",
    }[config.schedule]


def _gigabytes(size: int) -> str:
    """Return a size in GB.

    >>> _gigabytes(183_000_000), _gigabytes(10_800_000_000), _gigabytes(400_000)
    ('0.18 GB', '10.80 GB', 'less than 0.01 GB')
    """
    return f"{size / 1e9:.2f} GB" if size >= 10**7 else "less than 0.01 GB"


def _sentences(place: Path, wanted: int) -> Path:
    """Write a data file of sentences that came with leakaudit, and return it."""
    import json

    from leakaudit.audit.canaries import CANARIES

    rows = ({"text": CANARIES[row % len(CANARIES)], "label": row % 2} for row in range(wanted))
    place.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return place
