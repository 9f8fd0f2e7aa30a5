"""Bytes of the snapshots of adapters on a frozen base, on disk.

    python -m tests.benchmarks.frozen_base                 # BERT shapes of 22M and 110M parameters, plain and 4 bits
    python -m tests.benchmarks.frozen_base --sizes 22M

Random weights, LoRA of rank 16 on query and value with a trained head, one step a snapshot, B = 8, T = 64. The layers of 4 bits are a
stand-in with the interface of bitsandbytes that multiplies in the type that is named. Each snapshot has a link to one file with the frozen
weights, which counts once. Nothing is attacked. The bytes do not depend on the machine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leakaudit.callbacks.torch_loop import watch
from tests.benchmarks.capture import SHAPES
from tests.support import tiny
from tests.support.adapter_rows import counted_as_installed
from tests.support.quantised import FourBits, quantised
from tests.support.tiny_trainer import audit_config, without_side_process

RANK = 16
STEPS = 2

BASES: dict[str, Callable[[nn.Module], Any]] = {
    "float32": lambda model: model,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "4 bits, multiplies in float32": lambda model: quantised(model, FourBits, ("classifier",)),
    "4 bits, multiplies in bfloat16": lambda model: quantised(
        model.to(torch.bfloat16), lambda layer: FourBits(layer, torch.bfloat16), ("classifier",)
    ),
}
"""Name -> what makes a base of a model, in place."""


@dataclass(frozen=True)
class Written:
    """Bytes of one training."""

    parameters: int
    """Of the model before adapters."""
    live: int
    """Bytes of its frozen weights in the training process."""
    own: tuple[int, ...]
    """For each snapshot, bytes of the files that are its alone."""
    base: int
    """Bytes of the file that all snapshots share."""


def measure(shape: dict[str, Any], base: str, folder: Path) -> Written:
    """Train two steps and count the bytes of their snapshots."""
    import peft

    torch.manual_seed(0)
    plain = tiny.hf.BertForSequenceClassification(tiny.hf.BertConfig(num_labels=4, vocab_size=30522, **shape))
    count = sum(p.numel() for p in plain.parameters())
    config = peft.LoraConfig(r=RANK, target_modules=["query", "value"], modules_to_save=["classifier"])
    with counted_as_installed(), without_side_process():
        model = peft.get_peft_model(BASES[base](plain), config).train()
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.01)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        ids = torch.randint(5, 40, (8, 64))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(8) % 4}
        with watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(folder)) as audit:
            for _ in range(STEPS):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert audit.folder is not None
    return counted(sorted((audit.folder / "spool").glob("*.ready")), model, count)


def counted(snapshots: Sequence[Path], model: nn.Module, parameters: int) -> Written:
    """Return the bytes of snapshots; a file that they share counts once."""
    files = [[path.stat() for path in one.rglob("*") if path.is_file()] for one in snapshots]
    shared = set.intersection(*({file.st_ino for file in one} for one in files))
    live = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    return Written(
        parameters,
        live,
        tuple(sum(file.st_size for file in one if file.st_ino not in shared) for one in files),
        sum(file.st_size for file in files[0] if file.st_ino in shared),
    )


def row(size: str, base: str, found: Written) -> str:
    """Return one line of the table."""
    first, second = found.own[0] + found.base, found.own[1]
    return (
        f"| {size} ({found.parameters / 1e6:.1f}M) | {base} | {found.live / 1e6:.1f} | {first / 1e6:.1f} | {found.base / 1e6:.1f} "
        f"| {second / 1e6:.2f} |"
    )


def main() -> None:
    """Measure and print."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--sizes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    print(
        "| parameters | base | frozen weights in training, MB | first snapshot adds, MB | of which base | second adds |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for size in given.parse_args().sizes:
        for base in BASES:
            with tempfile.TemporaryDirectory() as folder:
                print(row(size, base, measure(SHAPES[size], base, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
