"""One of two processes that train a model under FSDP1 on gloo, with an audit.

    python -m tests.support.flat_shards FOLDER

What the optimizers got stands in FOLDER afterwards: whole gradients, which FSDP1 itself put together.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from leakaudit.callbacks.torch_loop import watch
from leakaudit.models.wrappers import plain_name
from tests.support import tiny
from tests.support.parted_processes import collectives_so_far
from tests.support.tiny_trainer import audit_config, without_side_process
from tests.support.two_processes import STEPS, batches


def flat(model: Any, **options: Any) -> FullyShardedDataParallel:
    """Return a BERT under FSDP1: every layer is a flat parameter, and so is the rest."""
    policy = ModuleWrapPolicy({type(model.bert.encoder.layer[0])})
    given: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu"), "auto_wrap_policy": policy}
    return FullyShardedDataParallel(model, **{**given, **options})


def frozen() -> nn.Module:
    """Return a BERT whose embeddings are not trained."""
    model: Any = tiny.bert(dropout=0.1)
    model.bert.embeddings.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def gradients(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """Return the whole gradients, as FSDP1 puts them together."""
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        trained = [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]  # the others get zeros
        return {name: p.grad.detach().clone() for name, p in trained if p.grad is not None}


def weights(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """Return the whole weights, as FSDP1 puts them together."""
    with FullyShardedDataParallel.summon_full_params(model):
        return {plain_name(n): p.detach().clone() for n, p in model.named_parameters()}


def train(
    folder: Path,
    model: FullyShardedDataParallel,
    *,
    windows: int = 1,
    clip: float | None = None,
    quiet: bool = False,
    chosen: Callable[[Tensor], bool] = lambda _p: True,
    audited: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Train with an audit; return what the steps had.

    That is whole gradients, whole weights before each step and after the last one, and the number of collectives.

    Args:
        folder: of the audit.
        model: under FSDP1.
        windows: micro-batches of a step.
        clip: L2 norm to which gradients are clipped.
        quiet: whether all micro-batches but the last one are passed under `no_sync`.
        chosen: which parameters the optimizer gets.
        audited: whether there is an audit.
        options: of `watch`.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if chosen(p)], lr=1e-3)
    got: dict[str, Any] = {"gradients": [], "weights": [], "collectives": collectives_so_far()}
    kept_apart = all(module._use_orig_params for module in FullyShardedDataParallel.fsdp_modules(model))
    mine = batches(dist.get_rank())
    with contextlib.ExitStack() as within:
        if audited:
            within.enter_context(without_side_process())
            config = audit_config(folder)
            within.enter_context(
                watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config, max_grad_norm=clip, **options)
            )
        for start in range(0, STEPS * windows, windows):
            for number, batch in enumerate(mine[start : start + windows]):
                with model.no_sync() if quiet and number < windows - 1 else contextlib.nullcontext():
                    (model(**batch).loss / windows).backward()
            if clip is not None:
                model.clip_grad_norm_(clip)
            if kept_apart:  # FSDP1 cannot put gradients of flat parameters together
                got["gradients"].append(gradients(model))
            got["weights"].append(weights(model))
            optimizer.step()
            optimizer.zero_grad()
    got["weights"].append(weights(model))
    got["collectives"] = collectives_so_far() - got["collectives"]
    return got


def main() -> None:
    folder = Path(sys.argv[1])
    chosen = sys.argv[2:]
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # every process draws masks of its own

    def bert() -> nn.Module:
        return tiny.bert(dropout=0.1).train()

    runs: dict[str, Callable[[Path], Any]] = {
        "flat": lambda home: train(home, flat(bert())),
        "windows": lambda home: train(home, flat(bert()), windows=2),
        "no_sync": lambda home: train(home, flat(bert()), windows=2, quiet=True),
        "clipped": lambda home: train(home, flat(bert()), clip=0.001),
        "frozen": lambda home: train(home, flat(frozen().train())),
        "gradients only": lambda home: train(home, flat(bert(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)),
        "not sharded": lambda home: train(home, flat(bert(), sharding_strategy=ShardingStrategy.NO_SHARD)),
        "empty pieces left out": lambda home: train(home, flat(bert()), chosen=lambda p: p.numel() > 0),
        "flat parameters": lambda home: train(home, flat(bert(), use_orig_params=False)),
        "half": lambda home: train(home, flat(bert(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))),
        "own share": lambda home: train(home, flat(bert()), observe="local"),
        "without an audit": lambda home: train(home, flat(tiny.bert().train()), audited=False),
        "with an audit": lambda home: train(home, flat(tiny.bert().train())),
    }
    got = {name: run(folder / name) for name, run in runs.items() if not chosen or name in chosen}
    torch.save(got, folder / f"updates-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
