"""Adapters and small optimizers on plain and quantised bases, and their stamps.

    python -m tests.support.adapter_rows          # prints both tables
    python -m tests.support.adapter_rows --write  # writes them into docs/capture.md

Each cell is a training of a tiny model in a plain loop with an audit. `tests/capture/test_adapter_rows.py` runs every cell and holds it
against the page. The layers of 4 and 8 bits and the optimizers with moments of 8 bits are stand-ins with the interface of the libraries,
which need other hardware.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.audit.attempt import readable
from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.snapshot import Snapshot
from leakaudit.models import quantised_layers
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attacks
from leakaudit.results.schema import Verification, VerificationStatus
from tests.capture.test_rebuilt import llama, with_lora
from tests.support import stacks, tiny
from tests.support.generated_pages import write_between
from tests.support.own_optimizers import EightBits as EightBitAdam
from tests.support.own_optimizers import Lion, Paged, ScheduleFree
from tests.support.quantised import EightBits, FourBits, quantised
from tests.support.tiny_trainer import audit_config, kept, stamp, without_side_process

PAGE = Path(__file__).parents[2] / "docs" / "capture.md"
MARKS = {
    "adapters": ("<!-- adapters: begin -->", "<!-- adapters: end -->"),
    "optimizers": ("<!-- small optimizers: begin -->", "<!-- small optimizers: end -->"),
}
STEPS = 2

QUICK = ("embedding-rows", "span")
"""Attacks that a cell runs: the first that applies."""


# ---------------------------------------------------------------------- bases, adapters, optimizers


BASES: dict[str, Callable[[nn.Module], Any]] = {
    "float32": lambda model: model,
    "4 bits": lambda model: quantised(model, FourBits),
    "8 bits": lambda model: quantised(model, EightBits),
}
"""Column -> what makes a base of a model, in place."""


@dataclass(frozen=True)
class Adapters:
    """One way to train adapters."""

    options: dict[str, Any]
    """Further settings of `LoraConfig`."""
    model: dict[str, Any] | None = None
    """Further settings of the base's configuration."""
    only_b: bool = False

    def on(self, base: str) -> Any:
        """Return a model with these adapters; their B is not zero."""
        import peft

        chosen = {"r": 2, "target_modules": ["q_proj", "v_proj"], **self.options}
        made = with_lora(BASES[base](llama(**(self.model or {}))), peft.LoraConfig(**chosen))
        for name, parameter in made.named_parameters():
            if self.only_b and ".lora_A." in name:
                parameter.requires_grad_(False)
        return made.train()


SAVED = ["embed_tokens", "lm_head"]

ADAPTERS: dict[str, Adapters] = {
    "LoRA": Adapters({}),
    "rsLoRA": Adapters({"use_rslora": True, "lora_alpha": 8}),
    "DoRA": Adapters({"use_dora": True}),
    "`rank_pattern`, `alpha_pattern`": Adapters({"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"v_proj": 5}}),
    "`modules_to_save`: `embed_tokens`, `lm_head`": Adapters({"modules_to_save": SAVED}),
    "the same, tied (`ensure_weight_tying`)": Adapters(
        {"modules_to_save": SAVED, "ensure_weight_tying": True}, model={"tie_word_embeddings": True}
    ),
    "`trainable_token_indices`": Adapters({"trainable_token_indices": [5, 6, 7]}),
    '`bias="lora_only"`': Adapters({"bias": "lora_only"}, model={"attention_bias": True}),
    "`lora_bias`": Adapters({"lora_bias": True}, model={"attention_bias": True}),
    "only B is trained (FFA-LoRA)": Adapters({}, only_b=True),
}
"""Row of the table of adapters -> how they are made."""


def adafactor_of_transformers(parameters: Any) -> Any:
    """Return transformers' Adafactor with a rate of its caller."""
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW, moments of 8 bits (stand-in)": EightBitAdam,
    "AdamW, moments in paged memory (stand-in)": Paged,
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "Lion": Lion,
    "Adafactor of torch": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    "Adafactor of transformers": adafactor_of_transformers,
    "AdamW, schedule-free (stand-in)": ScheduleFree,
    "Muon of torch (rank 24, one text a step)": lambda parameters: torch.optim.Muon(parameters, lr=1e-3),
}
"""Row of the table of optimizers -> what makes it."""


# ---------------------------------------------------------------------- a training


@dataclass(frozen=True)
class Trained:
    """What a training with an audit left."""

    snapshots: list[Snapshot]
    refusal: str
    """Why nothing was kept; empty if something was."""


@contextlib.contextmanager
def counted_as_installed() -> Iterator[None]:
    """Let the layers of the tests count as those of an installed package."""
    found = quantised_layers.installed_packages() | {"tests"}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(quantised_layers, "installed_packages", lambda: found)
        yield


class _Said(logging.Handler):
    """Collects what the audit logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def adamw(parameters: Any) -> Any:
    """Return AdamW with a rate of 1e-3."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def train(
    make: Callable[[], Any], optimizer: Callable[[Any], Any], unit: str, folder: Path, *, texts: int = 2
) -> Trained:
    """Train two steps of some texts each, which are audited as steps or as one round."""
    torch.manual_seed(0)
    with counted_as_installed(), without_side_process():
        model = make()
        moving = optimizer([p for p in model.parameters() if p.requires_grad])
        more: dict[str, Any] = {"observe": "delta", "local_steps": STEPS} if unit == "round" else {}
        config = audit_config(folder, max_snapshots=50)
        said, logger = _Said(), logging.getLogger("leakaudit")
        logger.addHandler(said)
        try:
            with watch(model, moving, tokenizer=tiny.gpt2_tokenizer(), config=config, **more) as audit:
                _loop(model, moving, texts)
        finally:
            logger.removeHandler(said)
        found = [] if audit.folder is None else list(kept(audit).values())
        return Trained(found, "" if found else " ".join(said.lines) or "nothing was kept")


def _loop(model: Any, optimizer: Any, texts: int) -> None:
    getattr(optimizer, "train", lambda: None)()
    for batch in stacks.texts(size=texts, count=STEPS):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def worst(trained: Trained) -> Verification:
    """Return the stamp of the step with the largest error.

    A stamp other than `verified` comes first.
    """
    with counted_as_installed():
        stamps = [stamp(snapshot) for snapshot in trained.snapshots]
    return max(stamps, key=lambda one: (one.status is not VerificationStatus.VERIFIED, one.relative_error or 0.0))


def said_of(trained: Trained) -> str:
    """Return a cell: the stamp and its relative error, or why it is refused."""
    if not trained.snapshots:
        return f"refused: {trained.refusal}"
    found = worst(trained)
    if found.status is VerificationStatus.UNVERIFIABLE and "unknown moments" in found.note:
        return "unverifiable, unknown moments"
    return f"{found.status.value}, {found.relative_error or 0.0:.0e}".replace(", 0e+00", ", 0")


def adapter_cell(row: str, base: str, unit: str, folder: Path) -> str:
    """Return one cell of the table of adapters."""
    return said_of(train(lambda: ADAPTERS[row].on(base), adamw if unit == "round" else sgd, unit, folder))


def sgd(parameters: Any) -> Any:
    """Return plain SGD."""
    return torch.optim.SGD(parameters, lr=0.1)


def small(row: str) -> Callable[[], Any]:
    """Return what makes the model of a row of optimizers: adapters on 4 bits.

    The table of words is trained beside them, except by Muon, which is made for matrices that a layer multiplies by. Its rank is above
    the number of words of a round, so that `span` can read them.
    """
    options: dict[str, Any] = {"r": 24} if "Muon" in row else {"r": 8, "modules_to_save": ["embed_tokens"]}
    return lambda: Adapters(options).on("4 bits")


def optimizer_cells(row: str, folder: Path) -> list[str]:
    """Return a row of the table of optimizers."""
    texts = 1 if "Muon" in row else 2
    made = {unit: train(small(row), OPTIMIZERS[row], unit, folder / unit, texts=texts) for unit in ("step", "round")}
    return [*(said_of(one) for one in made.values()), read_in(made["round"].snapshots[0])]


def applying(snapshot: Snapshot) -> list[str]:
    """Return the attacks on texts and words that apply to a step as the audit has it."""
    own = [name for name, kind in attacks if kind.goal != "labels" and kind.__module__.startswith("leakaudit.")]
    return [name for name in own if readable(attacks.create(name), snapshot.observation)[1].applies]


def read_in(snapshot: Snapshot) -> str:
    """Return what the first attack that applies reads of a round, and what is wrong."""
    name = next((one for one in QUICK if one in applying(snapshot)), None)
    if name is None:
        return "no attack applies"
    attack = attacks.create(name)
    seen, _ = readable(attack, snapshot.observation)
    guess = attack(seen, tiny.generator(), Budget(seconds=60))
    texts = [sequence.token_ids for sequence in guess.sequences or ()]
    words = {*(guess.tokens or ()), *(token for text in texts for token in text)}
    true = {token for text in snapshot.truth.sequences() for token in text}
    return f"`{name}`: {len(words & true)} of {len(true)} words, {len(words - true)} wrong"


# ---------------------------------------------------------------------- the tables


def columns() -> list[tuple[str, str]]:
    """Return base and unit of each column of the table of adapters."""
    return [(base, unit) for base in BASES for unit in ("step", "round")]


def adapter_table() -> str:
    """Return the table of adapters as Markdown."""
    head = [f"{base}, {'gradient' if unit == 'step' else 'round of 2'}" for base, unit in columns()]
    lines = [f"| | {' | '.join(head)} |", f"| --- |{' --- |' * len(head)}"]
    for row in ADAPTERS:
        with tempfile.TemporaryDirectory() as folder:
            cells = [adapter_cell(row, base, unit, Path(folder) / f"{i}") for i, (base, unit) in enumerate(columns())]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def optimizer_table() -> str:
    """Return the table of optimizers as Markdown."""
    lines = ["| | gradient | round of 2 | an attack on the round reads |", "| --- | --- | --- | --- |"]
    for row in OPTIMIZERS:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(f"| {row} | {' | '.join(optimizer_cells(row, Path(folder)))} |")
    return "\n".join(lines)


def on_page(table: str) -> dict[str, list[str]]:
    """Return the cells that the page shows, by row."""
    text, (begin, end) = PAGE.read_text(encoding="utf-8"), MARKS[table]
    lines = text[text.index(begin) : text.index(end)].splitlines()[3:]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def main() -> None:
    """Print the tables, and write them where the arguments say so."""
    for name, made in (("adapters", adapter_table), ("optimizers", optimizer_table)):
        with contextlib.redirect_stderr(io.StringIO()):
            found = made()
        print(found, end="\n\n")
        if "--write" in sys.argv:
            write_between(PAGE, *MARKS[name], found)


if __name__ == "__main__":
    main()
