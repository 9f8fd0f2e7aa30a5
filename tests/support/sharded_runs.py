"""Prints how trainings under FSDP2 are stamped, and what FSDP1 shows of a step.

    python -m tests.support.sharded_runs

It starts two processes over gloo on this machine. The figures stand in docs/decisions/sharded.md.
"""

from __future__ import annotations

import copy
import datetime
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DataCollatorForLanguageModeling

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.capture.observing.entry_sample import EntrySample
from leakaudit.models.wrappers import plain_name
from tests.support import matrix, stacks, tiny
from tests.support.fsdp_on_cpu import fsdp_on_cpu
from tests.support.pair import run_two
from tests.support.parted_processes import collectives_so_far
from tests.support.tiny_trainer import (
    Rows,
    audit_config,
    distance,
    gradient,
    kept,
    make_trainer,
    stamp,
    without_side_process,
)

STEPS = 2


def dropping() -> nn.Module:
    return tiny.bert(dropout=0.1)


def _texts() -> dict[str, Any]:
    tokenizer = tiny.gpt2_tokenizer()
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return {"tokenizer": tokenizer, "rows": Rows(tokenizer, classes=0), "collator": collator}


RUNS: Mapping[str, tuple[Callable[[], nn.Module], Mapping[str, Any], Mapping[str, Any]]] = {
    "SGD, dropout, clipped": (dropping, {}, {"max_grad_norm": 0.001}),
    "SGD, no dropout": (tiny.bert, {}, {}),
    "AdamW, dropout": (dropping, {}, {"optim": "adamw_torch", "learning_rate": 1e-3}),
    "LoRA": (matrix.lora, {}, {}),
    "GPT-2, tied weights": (tiny.gpt2_lm, {"transformer_layer_cls_to_wrap": ["GPT2Block"]}, _texts()),
    "cpu_ram_efficient_loading": (dropping, {"cpu_ram_efficient_loading": True}, {}),
    "gradient_checkpointing, dropout": (dropping, {}, {"gradient_checkpointing": True}),
    "activation_checkpointing, no dropout": (tiny.bert, {"activation_checkpointing": True}, {}),
    "activation_checkpointing, dropout": (dropping, {"activation_checkpointing": True}, {}),
    "bf16, dropout": (dropping, {}, {"bf16": True}),
    "bf16, no dropout": (tiny.bert, {}, {"bf16": True}),
    "weights in bfloat16, dropout": (lambda: dropping().to(torch.bfloat16), {}, {}),
    "weights in bfloat16, no dropout": (lambda: tiny.bert().to(torch.bfloat16), {}, {}),
}
"""Training -> model, settings of FSDP, arguments of the Trainer."""


def stamped(folder: Path, name: str, *, sharded: bool) -> str:
    """Train with two micro-batches a step; return its stamps, in the first process."""
    make, sharding, arguments = RUNS[name]
    wrapped = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["BertLayer"]}
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2, **wrapped, **sharding}} if sharded else {}
    audit = LeakAuditCallback(audit_config(folder))
    with fsdp_on_cpu():
        trainer = make_trainer(
            folder, audit, model=make(), per_device_train_batch_size=1, max_steps=STEPS,
            gradient_accumulation_steps=2, ddp_backend="gloo", **{**fsdp, **arguments},
        )  # fmt: skip
        audit.attach(trainer)
        with without_side_process():
            trainer.train()
    if dist.get_rank():
        return ""
    found = [stamp(snapshot) for snapshot in kept(audit).values()]
    return ", ".join(f"{one.status.value} {one.relative_error or 0:.1e}" for one in found)


def fsdp1() -> str:
    """Return what a step of FSDP1 shows to code that enters no collective."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    plain: Any = tiny.bert().train()
    reference, shapes = copy.deepcopy(plain), {name: p.shape for name, p in plain.named_parameters()}
    layers = ModuleWrapPolicy({type(plain.bert.encoder.layer[0])})
    model = FullyShardedDataParallel(
        plain, auto_wrap_policy=layers, use_orig_params=True, device_id=torch.device("cpu")
    )
    batches, parameters = stacks.classes(count=2), list(model.parameters())
    weights = copy.deepcopy(reference.state_dict())
    samples: list[EntrySample] = []
    named: list[int] = []

    def look(*_: Any) -> None:
        samples.append(EntrySample.of(parameters))
        named.append(len({id(p) for p in plain.parameters()} & {id(p) for p in parameters}))

    plain.register_forward_pre_hook(look)
    model(**batches[dist.get_rank()]).loss.backward()
    changed, touched = samples[0].changed(parameters), samples[0].touched(parameters)
    before = collectives_so_far()
    parts = {plain_name(n): None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    reading = collectives_so_far() - before
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        pass
    summoning = collectives_so_far() - before - reading
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, parts)
    whole = {n: torch.cat([g[n].reshape(-1) for g in everybody if g[n] is not None]).reshape(shapes[n]) for n in shapes}
    right: dict[str, Tensor] = {n: g / 2 for n, g in gradient(reference, weights, list(batches)).items()}
    missing = [sum(piece is None for piece in pieces.values()) for pieces in everybody]
    return (
        f"gathered gradient off by {distance(whole, right):.1e}; collectives: {reading} to read the shards, {summoning} in "
        f"summon_full_params; of {len(shapes)} parameters {missing} have no gradient in rank 0 and 1; "
        f"{named[0]} of the optimizer's are in the model in its forward pass; {len(changed)} have other entries after it, "
        f"{len(touched)} were moved or written to"
    )


def main() -> None:
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as place:
            said = run_two("tests.support.sharded_runs", Path(place))
        print("\n".join(line for line in said[0].splitlines() if line.startswith("| ")))
        return
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for number, name in enumerate(RUNS):
        print(f"| {name} | {stamped(folder / f'{number}', name, sharded=True)} |", flush=True)
    for number, name in enumerate(("bf16, no dropout", *list(RUNS)[-2:])):
        print(f"| DDP: {name} | {stamped(folder / f'ddp-{number}', name, sharded=False)} |", flush=True)
    print(f"| FSDP1 | {fsdp1()} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
