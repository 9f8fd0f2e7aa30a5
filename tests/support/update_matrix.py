"""The table of attacks and kinds of update: what reads what, and why not.

No cell is typed by hand.

    python -m tests.support.update_matrix          # prints the table
    python -m tests.support.update_matrix --write  # writes it into docs/attacks_by_update.md

A cell is what the audit says of an attack and a client's step on a small model: `yes` if the attack gets a gradient or reads the difference
of weights itself, `direction` if it gets the difference in place of a gradient, `no` if the audit or the attack refuses. Each attack is
tried on the first of the small models to whose plain gradient it applies. An attack on texts that applies to classifiers and to language
models has a row for each.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leakaudit.audit.active_server import WidePooler, on_active_server
from leakaudit.audit.attempt import readable
from leakaudit.client.batches import make_batch
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.config.invocation import public_reason
from leakaudit.models.array_classifier import save_auxiliary
from leakaudit.models.lora import add_lora, is_adapter
from leakaudit.registry import attacks
from tests.support import tiny
from tests.support.generated_pages import write_between
from tests.support.optimizer_steps import difference_step

PAGE = Path(__file__).parents[2] / "docs" / "attacks_by_update.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

TEXTS = ("the old dog chased a cat", "one bird saw two fish", "a small river", "the horse ate in the house") * 3
EARLIER = ("three big trees",)
AUXILIARY = ("gradient-mixture", "llg-plus")
"""Attacks that need labelled data like the client's; they get some."""


@dataclass(frozen=True)
class Kind:
    """A kind of update."""

    optimizer: str = ""
    """Name in `tests.support.optimizer_steps.OPTIONS`; empty for a gradient."""
    steps: int = 1
    kept: bool = False
    """Whether the optimizer kept the moments of an earlier round."""
    adapters: bool = False


KINDS: dict[str, Kind] = {
    "gradient": Kind(),
    "SGD, K = 1": Kind("SGD"),
    "SGD, K = 4": Kind("SGD", 4),
    "momentum, K = 4": Kind("momentum", 4),
    "AdamW, K = 1": Kind("AdamW"),
    "AdamW, K = 4": Kind("AdamW", 4),
    "AdamW, moments kept": Kind("AdamW", kept=True),
    "Adafactor, K = 1": Kind("Adafactor"),
    "adapters, gradient": Kind(adapters=True),
    "adapters, AdamW, K = 1": Kind("AdamW", adapters=True),
    "adapters, AdamW, K = 10": Kind("AdamW", 10, adapters=True),
}
"""Column -> the kind of update; the optimizer is new in every round unless its moments are kept."""


def _classifier() -> nn.Module:
    return tiny.bert(num_labels=3)


HOSTS: dict[str, Callable[[Kind], Observation]] = {
    "a classifier": lambda kind: _step(kind, _classifier(), tiny.bert_tokenizer(), "classification").observe(),
    "a language model": lambda kind: _step(kind, tiny.gpt2_lm(), tiny.gpt2_tokenizer(), "causal-lm").observe(),
    "a language model with a head of its own": lambda kind: _step(
        kind, tiny.gpt2_lm(tied=False), tiny.gpt2_tokenizer(), "causal-lm"
    ).observe(),
    "a classifier with a wide pooler": lambda kind: _with_wide_pooler(kind),
}
"""Description -> step of a client on a small model."""


def _step(kind: Kind, model: nn.Module, tokenizer: Any, task: Any) -> ClientStep:
    """Return a client's step; the batch has one text in each local step."""
    frozen = _with_adapters(model) if kind.adapters else frozenset[str]()
    step = difference_step(
        kind.optimizer or "SGD",
        [[text] for text in TEXTS[: kind.steps]],
        model=model,
        tokenizer=tokenizer,
        task=task,
        kept=EARLIER if kind.kept else None,
        frozen=frozen,
        batch_size_bound=1,
    )
    if kind.optimizer:
        return step
    return replace(step, facts=step.facts.model_copy(update={"view": "local", "learning_rate": None}))


def _with_wide_pooler(kind: Kind) -> Observation:
    """Return what a server sees that widened the pooler.

    Kept moments are only declared: those of the earlier round have the shape of the old pooler.
    """
    step = _step(replace(kind, kept=False), _classifier(), tiny.bert_tokenizer(), "classification")
    seen = on_active_server(step, WidePooler(width=2000, dimension=24)).observe()
    if not kind.kept or seen.facts.optimizer is None:
        return seen
    kept = seen.facts.optimizer.model_copy(update={"fresh": False})
    return replace(seen, facts=seen.facts.model_copy(update={"optimizer": kept}))


def _with_adapters(model: nn.Module) -> frozenset[str]:
    """Add adapters that were trained a little; return the names of frozen weights."""
    add_lora(model, 4)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=rng))
    names = [name for name, _ in model.named_parameters()]
    return frozenset(name for name in names if not is_adapter(name) and not name.startswith("classifier"))


@cache
def seen_on(host: str, column: str) -> Observation:
    """Return what is seen of the client of a column."""
    return HOSTS[host](KINDS[column])


@cache
def _auxiliary() -> str:
    folder = Path(tempfile.mkdtemp())
    batch = make_batch(tiny.bert_tokenizer(), list(TEXTS[:3]), [0, 1, 2], "classification", tiny.POSITIONS)
    inputs = {name: tensor for name, tensor in batch.inputs.items() if name != "labels"}
    save_auxiliary(folder / "auxiliary", inputs, batch.inputs["labels"])
    return str(folder / "auxiliary")


@cache
def made(name: str) -> Any:
    """Return an attack with its defaults, and with what it cannot do without."""
    return attacks.create(name, {"auxiliary": _auxiliary()} if name in AUXILIARY else {})


@cache
def host_of(name: str) -> str:
    """Return the small model that an attack is tried on."""
    fitting = (host for host in HOSTS if readable(made(name), seen_on(host, "gradient"))[1])
    return next(fitting)


@dataclass(frozen=True)
class Cell:
    """One cell of the table."""

    word: str
    reason: str = ""


LANGUAGE = ", language model"
"""What follows an attack's name in a row on a language model, if its own row is on a classifier."""


def names_on_language_models() -> list[str]:
    """Return the attacks that apply to a classifier and to a language model."""
    return [
        name
        for name in names()
        if host_of(name) == "a classifier" and readable(made(name), seen_on("a language model", "gradient"))[1]
    ]


def cell(name: str, column: str, host: str) -> Cell:
    """Return what the audit says of an attack and a kind of update on a small model."""
    attack = made(name)
    read, fits = readable(attack, seen_on(host, column))
    if not fits:
        return Cell("no", public_reason(fits.reason, attack))
    return Cell("direction" if read.only_a_direction else "yes")


def names() -> list[str]:
    """Return the attacks of the package, in alphabetical order."""
    return sorted(name for name, kind in attacks if kind.__module__.startswith("leakaudit."))


def table(cells: Mapping[tuple[str, str], Cell]) -> str:
    """Return the table and the reasons as Markdown."""
    lines = [f"| attack | {' | '.join(KINDS)} |", f"| --- |{' --- |' * len(KINDS)}"]
    rows = sorted({name for name, _ in cells})
    lines += [f"| {_shown(row)} | {' | '.join(cells[row, column].word for column in KINDS)} |" for row in rows]
    return "\n".join([*lines, "", "Why not:", "", *_reasons(cells)])


def _reasons(cells: Mapping[tuple[str, str], Cell]) -> list[str]:
    """Return one line for each reason, with the attacks and the kinds of update."""
    found: dict[tuple[str, str], list[str]] = {}
    for (name, column), one in cells.items():
        if one.reason:
            found.setdefault((one.reason, column), []).append(_shown(name))
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (reason, column), who in found.items():
        by_reason.setdefault((reason, ", ".join(who)), []).append(column)
    return [f"- {who}; {'; '.join(columns)}: {reason}." for (reason, who), columns in by_reason.items()]


def _shown(row: str) -> str:
    name, language, _ = row.partition(LANGUAGE)
    return f"`{name}`{language}"


def all_cells() -> dict[tuple[str, str], Cell]:
    """Return every cell, by row and column."""
    found = {(name, column): cell(name, column, host_of(name)) for name in names() for column in KINDS}
    more = {
        (name + LANGUAGE, column): cell(name, column, "a language model")
        for name in names_on_language_models()
        for column in KINDS
    }
    return found | more


def on_page() -> str:
    """Return the part of the page that is generated."""
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def main() -> None:
    """Print the table, or write it into the page."""
    logging.disable(logging.WARNING)
    made_table = table(all_cells())
    print(made_table)
    if "--write" in sys.argv:
        write_between(PAGE, BEGIN, END, made_table)


if __name__ == "__main__":
    main()
