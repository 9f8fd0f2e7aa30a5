"""The matrix of stacks and features: every cell is a training with an audit.

No cell is typed by hand.

    python -m tests.support.matrix          # prints the table
    python -m tests.support.matrix --write  # writes it into docs/capture.md

A cell is what the steps of that training were stamped: `verified` if all of them came out of the kept batch again with a relative
error below 1e-5 (3e-2 under autocast), else the weakest stamp; `refused` if the audit said before training that it cannot be done;
`untested` if the stack does not have the feature, or not on a CPU. `test_matrix.py` runs every cell and holds it against the page.
TRL and sentence-transformers have tables of their own (`package_rows.py`), which are written with it where they are installed.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.capture.refusals import refuse_strategy
from leakaudit.client.snapshot import Snapshot
from leakaudit.errors import SnapshotError
from leakaudit.results.schema import VerificationStatus
from tests.support import package_rows, stacks, tiny
from tests.support.generated_pages import write_between
from tests.support.pair import pair
from tests.support.stacks import STACKS, Case
from tests.support.tiny_trainer import TEXTS, stamp

PAGE = Path(__file__).parents[2] / "docs" / "capture.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"

LOOPS = ("Accelerate", "plain torch")
LIGHTNING = ("Lightning, automatic", "Lightning, manual")
TRAINERS = ("Trainer", "Seq2SeqTrainer")

TOLERANCE = {"bfloat16": 3e-2, "float16": 3e-2}
"""Largest relative error of a verified cell, by precision; 1e-5 for every other one."""


def _smoothed(outputs: Any, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1)


def _checkpointed() -> nn.Module:
    model: Any = tiny.bert(dropout=0.1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def _frozen() -> nn.Module:
    model: Any = tiny.bert()
    model.bert.embeddings.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def _noisy() -> nn.Module:
    from transformers.integrations.neftune import activate_neftune

    model = tiny.bert()
    activate_neftune(model, 5.0)
    return model


def lora() -> nn.Module:
    """Return a classifier with adapters and a trained head, by `get_peft_model`."""
    import peft

    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], lora_dropout=0.1)
    torch.manual_seed(0)
    return peft.get_peft_model(tiny.bert(dropout=0.1), config)


def packed() -> list[stacks.Batch]:
    """Return batches of one row of packed texts, told apart by positions only."""
    from transformers import DataCollatorWithFlattening

    tokenizer = tiny.gpt2_tokenizer()
    collate = DataCollatorWithFlattening()
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    return [dict(collate(rows[2 * i : 2 * i + 2])) for i in range(3)]


def _half(stack: str) -> Case | None:
    return Case(batches=stacks.classes(), precision="fp16") if stack in ("plain torch", *LIGHTNING) else None


def _delta(stack: str) -> Case | None:
    if stack not in LOOPS:
        return None
    return Case(batches=stacks.classes(count=6), options={"observe": "delta", "local_steps": 3})


def _with_gpt2(batches: list[stacks.Batch], **more: Any) -> Case:
    return Case(model=tiny.gpt2_lm, tokenizer=tiny.gpt2_tokenizer, batches=batches, **more)


def _adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


FEATURES: dict[str, Callable[[str], Case | None]] = {
    "one batch a step": lambda stack: Case(batches=stacks.classes()),
    "AdamW": lambda stack: Case(
        batches=stacks.classes(), optimizer=_adamw, arguments={"optim": "adamw_torch", "learning_rate": 1e-3}
    ),
    "clipping to a norm": lambda stack: Case(batches=stacks.classes(), clip=0.001),
    "accumulation, ragged last window": lambda stack: Case(batches=stacks.classes(count=5), windows=3),
    "dropout": lambda stack: Case(model=lambda: tiny.bert(dropout=0.1), batches=stacks.classes()),
    "bf16 autocast": lambda stack: Case(batches=stacks.classes(), precision="bf16"),
    "fp16 with a GradScaler": _half,
    "loss outside the model (label smoothing, `compute_loss_func`)": lambda stack: Case(
        batches=stacks.classes(), loss=_smoothed
    ),
    "language model, tied weights": lambda stack: _with_gpt2(stacks.texts(), windows=2),
    "packed sequences": lambda stack: _with_gpt2(packed()),
    "frozen embeddings": lambda stack: Case(model=_frozen, batches=stacks.classes()),
    "LoRA with a trained head (peft)": lambda stack: Case(model=lora, batches=stacks.classes()),
    "activation checkpointing with dropout": lambda stack: Case(model=_checkpointed, batches=stacks.classes()),
    "`torch.compile`": lambda stack: (
        Case(batches=stacks.classes(), arguments={"torch_compile": True, "torch_compile_backend": "eager"})
        if stack in TRAINERS
        else Case(batches=stacks.classes(), wrap=lambda model: torch.compile(model, backend="eager"))  # type: ignore[arg-type, return-value]
    ),
    "NEFTune": lambda stack: (
        Case(batches=stacks.classes(), arguments={"neftune_noise_alpha": 5.0})
        if stack in TRAINERS
        else Case(model=_noisy, batches=stacks.classes())
    ),
    "weights in bfloat16": lambda stack: Case(model=lambda: tiny.bert().to(torch.bfloat16), batches=stacks.classes()),
    "FedAvg: difference of weights over three local steps": _delta,
}
"""Row of the matrix -> the case for a stack; None where the stack does not have the feature, or not on a CPU."""


TOGETHER = {
    "DDP, two processes": {
        "Trainer": "trainer",
        "Lightning, automatic": "lightning",
        "Accelerate": "accelerate",
        "plain torch": "ddp",
    },
    "DDP, one process's own share": {"plain torch": "local"},
    "FSDP2, two processes": {"Trainer": "trainer-fsdp2", "Accelerate": "accelerate-fsdp2", "plain torch": "fsdp2"},
    "FSDP2, two micro-batches a step": {
        "Trainer": "trainer-fsdp2",
        "Accelerate": "accelerate-fsdp2",
        "plain torch": "fsdp2-windows",
    },
    "FSDP1, two processes": {"plain torch": "flat"},
}
"""Row -> stack -> name of the run in `two_processes.py`, or in a module of `ELSEWHERE`."""

ELSEWHERE = {"flat": "tests.support.flat_shards"}
"""Name of a run -> module of its processes."""

PRIVATE: dict[str, dict[str, Any]] = {
    "Opacus, clipped and noised": {"sigma": 1.0},
    "Opacus, physical batches (`BatchMemoryManager`), no noise": {"sigma": 0.0, "physical": 2, "steps": 1},
    "Opacus, Poisson batches, no noise": {"sigma": 0.0, "poisson": True, "size": 2},
}
"""Row -> how to train privately, in plain torch."""

STRATEGIES = {
    "DeepSpeed": dict.fromkeys(STACKS, "DEEPSPEED") | dict.fromkeys(LIGHTNING, "DeepSpeedStrategy"),
    "DataParallel": {stack: "DataParallel" for stack in STACKS if stack not in LIGHTNING},
}
"""Row -> stack -> what its framework calls that strategy; Lightning has no DataParallel."""

FLAT = dict.fromkeys(STACKS, "FSDP") | dict.fromkeys(LIGHTNING, "FSDPStrategy")
"""Stack -> what its framework calls FSDP1."""

ROWS = (*FEATURES, *TOGETHER, *PRIVATE, *STRATEGIES)


def cell(feature: str, stack: str) -> str:
    """Make one cell: train, or ask whether it is refused."""
    if feature in TOGETHER:
        name = TOGETHER[feature].get(stack)
        if name is None:
            return _refused(FLAT.get(stack)) if feature.startswith("FSDP1") else "untested"
        return _weakest((pair(ELSEWHERE[name]) if name in ELSEWHERE else pair()).kept(name))
    if feature in PRIVATE:
        if stack != "plain torch":
            return "untested"
        with tempfile.TemporaryDirectory() as folder:
            return _weakest(stacks.private_run(Path(folder), **PRIVATE[feature])[0])
    if feature in STRATEGIES:
        return _refused(STRATEGIES[feature].get(stack))
    case = FEATURES[feature](stack)
    if case is None:
        return "untested"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = STACKS[stack](Path(folder), case)
        except AssertionError:
            return "refused"  # the audit said no before training, and has no folder
        return _weakest(found)


def _refused(name: str | None) -> str:
    """Return whether a strategy is refused.

    A strategy that a stack does not have, or does not refuse, is untested here.
    """
    try:
        refuse_strategy(name or "", fsdp2=False)
    except SnapshotError:
        return "refused"
    return "untested"


def _weakest(found: dict[int, Snapshot]) -> str:
    """Return the weakest stamp of some steps.

    The error of a verified step must be within the bound.
    """
    if not found:
        return "refused"
    for snapshot in found.values():
        verification = stamp(snapshot)
        if verification.status is not VerificationStatus.VERIFIED:
            return str(verification.status.value)
        error = verification.relative_error
        assert error is not None
        if error > TOLERANCE.get(snapshot.observation.facts.dtype, 1e-5):
            return f"{error:.0e} off"
    return "verified"


def table(cells: dict[tuple[str, str], str]) -> str:
    """Return the matrix as a Markdown table."""
    lines = [f"| | {' | '.join(STACKS)} |", f"| --- |{' --- |' * len(STACKS)}"]
    lines += [f"| {feature} | {' | '.join(cells[feature, stack] for stack in STACKS)} |" for feature in ROWS]
    return "\n".join(lines)


def on_page() -> dict[tuple[str, str], str]:
    """Return the cells that the page shows."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()[1:]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head = rows[0][1:]
    return {(row[0], stack): found for row in rows[2:] for stack, found in zip(head, row[1:], strict=True)}


def main() -> None:
    logging.disable(logging.WARNING)
    cells = {(feature, stack): cell(feature, stack) for feature in ROWS for stack in STACKS}
    print(table(cells))
    if "--write" in sys.argv:
        write_between(PAGE, BEGIN, END, table(cells))
    package_rows.main()


if __name__ == "__main__":
    main()
