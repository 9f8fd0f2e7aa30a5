"""Rounds of local steps with many optimizers, and the stamps of their updates.

    python -m tests.support.delta_rows          # prints the table
    python -m tests.support.delta_rows --write  # writes it into docs/capture.md

Each row is two rounds of a tiny model, in a plain loop, with an audit and without. The optimizer is new in the first round, and keeps its
moments for the second one. `tests/capture/test_delta_rows.py` runs every row and holds it against the page.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.local_steps import state_tensors
from leakaudit.client.snapshot import Snapshot
from leakaudit.results.schema import VerificationStatus
from tests.support import stacks, tiny
from tests.support.generated_pages import write_between
from tests.support.tiny_trainer import audit_config, kept, stamp, without_side_process

PAGE = Path(__file__).parents[2] / "docs" / "capture.md"
BEGIN, END = "<!-- differences: begin -->", "<!-- differences: end -->"
COLUMNS = ("new optimizer", "moments of the round before")
ROUNDS = 2


@dataclass(frozen=True)
class Row:
    """One way to train in rounds."""

    optimizer: Callable[[nn.Module], Any]
    local_steps: int = 2
    model: Callable[[], nn.Module] = field(default=lambda: tiny.bert(dropout=0.1))
    schedule: Callable[[Any], Any] | None = None
    windows: int = 1
    """Micro-batches of a local step."""
    clip: float | None = None
    autocast: bool = False


@dataclass(frozen=True)
class Trained:
    """What a training left."""

    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    """State of the optimizer, by parameter and key."""
    snapshots: dict[int, Snapshot] = field(default_factory=dict)

    def equals(self, other: Trained) -> bool:
        """Return whether weights and state of the optimizer are the same to the last bit."""
        return _same(self.weights, other.weights) and _same(self.state, other.state)


def _same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in two)


def train(row: Row, folder: Path | None = None) -> Trained:
    """Train two rounds; with a folder they are audited."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft reads a name that transformers will remove
        model = row.model().train()
    optimizer = row.optimizer(model)
    schedule = None if row.schedule is None else row.schedule(optimizer)
    torch.manual_seed(1)  # the dropout of both trainings
    watched = _watched(row, model, optimizer, folder)
    with without_side_process(), watched:
        for window in _windows(row):
            for batch in window:
                with torch.autocast("cpu", torch.bfloat16) if row.autocast else contextlib.nullcontext():
                    loss = model(**batch).loss / row.windows
                loss.backward()
            if row.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), row.clip)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
    names = {id(p): name for name, p in model.named_parameters()}
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Trained(found, state_tensors(optimizer, names), kept(watched) if folder else {})


def _watched(row: Row, model: nn.Module, optimizer: Any, folder: Path | None) -> Any:
    if folder is None:
        return contextlib.nullcontext()
    return watch(
        model,
        optimizer,
        tokenizer=tiny.bert_tokenizer(),
        config=audit_config(folder, max_snapshots=50),
        observe="delta",
        local_steps=row.local_steps,
        max_grad_norm=row.clip,
    )


def _windows(row: Row) -> list[list[stacks.Batch]]:
    batches = stacks.classes(count=ROUNDS * row.local_steps * row.windows)
    return [batches[start : start + row.windows] for start in range(0, len(batches), row.windows)]


# ---------------------------------------------------------------------- models and optimizers


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adamw(model: nn.Module, **options: Any) -> Any:
    """Return AdamW with a rate of 1e-3."""
    return torch.optim.AdamW(_trained(model), **{"lr": 1e-3, **options})


def of_torch(name: str, **options: Any) -> Callable[[nn.Module], Any]:
    """Return what makes an optimizer of torch."""
    return lambda model: getattr(torch.optim, name)(_trained(model), **{"lr": 1e-3, **options})


def _two_rates(model: nn.Module) -> Any:
    """Return AdamW with groups as transformers makes them, and two rates."""
    plain = {id(p) for name, p in model.named_parameters() if "bias" in name or "LayerNorm" in name}
    parts = [[p for p in _trained(model) if (id(p) in plain) is kind] for kind in (False, True)]
    groups = [
        {"params": parts[0], "weight_decay": 0.1},
        {"params": parts[1], "weight_decay": 0.0, "lr": 3e-4},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


def _adafactor_of_transformers(model: nn.Module) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(_trained(model), lr=1e-3, scale_parameter=False, relative_step=False)


def _cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


def adapted(**options: Any) -> Callable[[], nn.Module]:
    """Return what makes a model with adapters of peft; LoRA by default."""
    import peft

    def make() -> nn.Module:
        kind = peft.IA3Config if "feedforward_modules" in options else peft.LoraConfig
        rank = (
            {}
            if "feedforward_modules" in options
            else {"r": 4, "lora_dropout": 0.1, "target_modules": ["query", "value"]}
        )
        return peft.get_peft_model(tiny.bert(dropout=0.1), kind(task_type="SEQ_CLS", **{**rank, **options}))

    return make


IA3 = {"target_modules": ["key", "value", "output.dense"], "feedforward_modules": ["output.dense"]}

ROWS: dict[str, Row] = {
    "AdamW, K = 1": Row(adamw, local_steps=1),
    "AdamW, K = 4, rates of a cosine": Row(adamw, local_steps=4, schedule=_cosine),
    "AdamW, foreach": Row(lambda model: adamw(model, foreach=True)),
    "AdamW, fused": Row(lambda model: adamw(model, fused=True)),
    "AdamW, amsgrad, maximize": Row(lambda model: adamw(model, amsgrad=True, maximize=True)),
    "AdamW, a rate in a tensor": Row(lambda model: adamw(model, lr=torch.tensor(1e-3))),
    "AdamW, two groups with their own rate and decay": Row(_two_rates),
    "AdamW, two micro-batches a local step, clipped": Row(adamw, windows=2, clip=0.01),
    "AdamW, bf16 autocast": Row(adamw, autocast=True),
    "AdamW, weights in bfloat16": Row(
        lambda model: adamw(model, lr=1e-2), model=lambda: tiny.bert(dropout=0.1).to(torch.bfloat16)
    ),
    "Adam with decay in the gradient": Row(of_torch("Adam", weight_decay=0.1)),
    "SGD, rates of a cosine": Row(of_torch("SGD", lr=0.1), local_steps=3, schedule=_cosine),
    "SGD, Nesterov's momentum and decay": Row(
        of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), local_steps=3
    ),
    "Adafactor of torch": Row(of_torch("Adafactor", lr=1e-2)),
    "Adafactor of transformers": Row(_adafactor_of_transformers),
    "Adadelta": Row(of_torch("Adadelta", lr=0.1)),
    "Adagrad": Row(of_torch("Adagrad")),
    "Adamax": Row(of_torch("Adamax")),
    "NAdam": Row(of_torch("NAdam")),
    "RAdam": Row(of_torch("RAdam")),
    "RMSprop": Row(of_torch("RMSprop", momentum=0.9, centered=True)),
    "LoRA, AdamW, K = 10": Row(adamw, local_steps=10, model=adapted()),
    "DoRA, AdamW, K = 4": Row(adamw, local_steps=4, model=adapted(use_dora=True)),
    "IA3, AdamW, K = 4": Row(adamw, local_steps=4, model=adapted(**IA3)),
}
"""Name of a row -> how it trains; K = 2 where nothing is said."""


# ---------------------------------------------------------------------- the table


def cells(row: Row) -> list[str]:
    """Return the stamp of each round of a row."""
    with tempfile.TemporaryDirectory() as folder:
        snapshots = train(row, Path(folder)).snapshots
        return [stamp_of(snapshots.get(number)) for number in range(ROUNDS)]


def stamp_of(snapshot: Snapshot | None) -> str:
    if snapshot is None:
        return "not kept"
    found = stamp(snapshot)
    equal = found.status is VerificationStatus.VERIFIED and found.relative_error == 0.0
    return "verified, to the bit" if equal else str(found.status.value)


def table(found: dict[str, list[str]]) -> str:
    """Return the rows as a Markdown table."""
    head = [f"| | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    return "\n".join([*head, *(f"| {name} | {' | '.join(row)} |" for name, row in found.items())])


def on_page() -> dict[str, list[str]]:
    """Return the cells that the page shows, by row."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()[3:]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def main() -> None:
    """Print the table, and write it where the arguments say so."""
    logging.disable(logging.WARNING)
    with contextlib.redirect_stderr(io.StringIO()):
        found = table({name: cells(row) for name, row in ROWS.items()})
    print(found)
    if "--write" in sys.argv:
        write_between(PAGE, BEGIN, END, found)


if __name__ == "__main__":
    main()
