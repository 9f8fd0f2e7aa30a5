"""Twelve trainings with an audit; prints stamps and recovered texts as JSON.

    python -m tests.compat.configurations OUT.json

It runs in an environment with any versions that leakaudit takes. The weights of a new model differ between versions of transformers, so no
number is compared: only stamps, and which texts of the last kept step come back word by word.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from torch import nn

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import watch
from leakaudit.cli import main as cli
from leakaudit.client.snapshot import Snapshot
from leakaudit.results.files import load_results
from tests.support import stacks, tiny
from tests.support.spy import read_by_span
from tests.support.stacks import Case
from tests.support.tiny_trainer import TEXTS, audit_config, kept, make_trainer, stamp, without_side_process

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "peft",
    "lightning",
    "opacus",
    "trl",
    "numpy",
    "scipy",
)

Kept = Mapping[int, Snapshot]


def llama(**more: Any) -> nn.Module:
    """Return a small Llama."""
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=len(tiny.VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **more,
    )
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(config)


def frozen(model: nn.Module) -> nn.Module:
    """Freeze every table of embeddings."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)
    return model


def adapted(model: Any) -> Any:
    """Return a model with low-rank adapters whose B is not zero."""
    import peft

    made = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return made


def words(**more: Any) -> Case:
    """Return a training of a language model on texts."""
    return Case(tokenizer=tiny.gpt2_tokenizer, batches=stacks.texts(1), **more)


def adamw(model: nn.Module) -> Any:
    """Return a new AdamW."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def differences(optimizer: Callable[[nn.Module], Any], steps: int) -> Callable[[Path], Kept]:
    """Return a training whose client sends what changed after local steps."""

    def run(folder: Path) -> Kept:
        tokenizer, model = tiny.bert_tokenizer(), tiny.bert().train()
        moved, options = optimizer(model), {"observe": "delta", "local_steps": steps}
        with (
            without_side_process(),
            watch(model, moved, tokenizer=tokenizer, config=audit_config(folder), **options) as audit,  # type: ignore[arg-type]
        ):
            for number in range(steps):
                batch = tokenizer([TEXTS[number]], return_tensors="pt")
                model(**batch, labels=torch.tensor([number % 2])).loss.backward()
                moved.step()
                moved.zero_grad()
        return kept(audit)

    return run


CONFIGURATIONS: dict[str, Callable[[Path], Kept]] = {
    "torch, encoder, SGD": lambda folder: stacks.torch_loop(folder, Case(batches=stacks.classes(2))),
    "torch, encoder, dropout, AdamW": lambda folder: stacks.torch_loop(
        folder, Case(lambda: tiny.bert(dropout=0.1), batches=stacks.classes(1), optimizer=adamw)
    ),
    "torch, encoder, frozen tables": lambda folder: stacks.torch_loop(
        folder, Case(lambda: frozen(tiny.bert()), batches=stacks.classes(2))
    ),
    "torch, GPT-2": lambda folder: stacks.torch_loop(folder, words(model=tiny.gpt2_lm)),
    "torch, Llama, LoRA": lambda folder: stacks.torch_loop(folder, words(model=lambda: adapted(llama()))),
    "Trainer, encoder, clipped": lambda folder: stacks.hf_trainer(folder, Case(batches=stacks.classes(2), clip=0.01)),
    "Trainer, Llama, accumulation": lambda folder: stacks.hf_trainer(folder, words(model=llama, windows=2)),
    "Lightning, encoder": lambda folder: stacks.lightning(folder, Case(batches=stacks.classes(2))),
    "Accelerate, encoder, bf16 autocast": lambda folder: stacks.accelerate(
        folder, Case(batches=stacks.classes(2), precision="bf16")
    ),
    "Opacus, encoder, no noise": lambda folder: stacks.private_run(folder, sigma=0.0, bound=1e6, size=1)[0],
    "rounds, SGD, K = 2": differences(lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 2),
    "rounds, AdamW, K = 1": differences(adamw, 1),
}
"""Name -> a training that returns what was kept, by step."""


def result(run: Callable[[Path], Kept]) -> dict[str, Any]:
    """Return the stamps of a training, and how much `span` reads.

    That is the number of texts of its last kept step that come back word by word, and of all.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            snapshots = run(Path(folder))
        except AssertionError:
            return {"steps": 0, "stamps": ["refused"], "read": None}
        stamps = sorted({str(stamp(snapshot).status.value) for snapshot in snapshots.values()})
        found = read_by_span(snapshots[max(snapshots)])
    return {"steps": len(snapshots), "stamps": stamps, "read": None if found is None else list(found)}


def whole() -> dict[str, Any]:
    """Return what gate and report make of a training with a side process."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        audit = LeakAuditCallback(audit_config(Path(folder), attacks=("embedding-rows",), wait_at_end_s=120))
        trainer = make_trainer(Path(folder), audit)
        audit.attach(trainer)
        trainer.train()
        gate = CliRunner().invoke(cli, ["gate", str(audit.folder), "-q"])
        report = CliRunner().invoke(cli, ["report", str(audit.folder)])
        stamps = {str(step.verification.status.value) for step in load_results(Path(str(audit.folder))).steps}
    return {"gate": gate.exit_code, "report": report.exit_code, "stamps": sorted(stamps)}


def main(target: Path) -> None:
    """Run all of them and write what came out."""
    found = {name: result(run) for name, run in CONFIGURATIONS.items()}
    found["Trainer with a side process, gate, report"] = whole()
    versions = {name: _version(name) for name in LIBRARIES}
    target.write_text(json.dumps({"versions": versions, "found": found}, indent=1), encoding="utf-8")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
