"""The configuration of `leakaudit nightly`, read from YAML and validated.

No torch.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from leakaudit.config.audit import (
    DATA_NAME,
    DEFAULT_ATTACKS,
    DEVICE_PATTERN,
    MAX_COUNT,
    MAX_PLUGINS,
    MAX_SECONDS,
    MAX_SEED,
    NONE,
    Count,
    Plugin,
)
from leakaudit.config.duration import Duration
from leakaudit.config.simulation import Simulation
from leakaudit.results.schema import TextMode

FILE = "nightly.yaml"
"""File that `leakaudit nightly` reads unless the user names another one."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=True)


def _words(value: Any) -> Any:
    """Read one name as a list of one."""
    return (value,) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]


class SimulateSection(_Section):
    """Client steps made from a model and a data file, as by `simulate`."""

    model: Path
    """Folder as `save_pretrained` writes it."""
    data: Path
    """Texts and labels as JSONL, JSON, CSV, TSV, Parquet or a folder of `datasets`."""
    text_field: str = "text"
    """Field of the data that holds the text."""
    label_field: str = "label"
    """Field of the data that holds the class: a number from 0, or its name."""
    task: Literal["classification", "causal-lm"] = "classification"
    """What the model is trained for."""
    num_labels: Annotated[int, Field(ge=2)] | None = None
    """Classes; null for those of the model's classifier, else the largest label plus one."""
    batch_size: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    """Texts of one batch."""
    steps: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 20
    """Client steps of a night."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | Literal["night"] = "night"
    """Seed of shuffle, dropout and attacks. `night`: another one every night, so that every night draws new batches. With a number every night
    repeats the same steps, and all nights together are the evidence of one."""
    mode: Literal["eval", "train"] = "train"
    """`train`: dropout on."""
    freeze: Words = ()
    """`embeddings`, or patterns of parameter names."""
    grant: Words = ()
    """What the threat model gives the attacks: labels, lengths, words, longest, counts."""
    lora_rank: Annotated[int, Field(ge=1)] | None = None
    """Train low-rank adapters and the head instead of the weights."""
    lora_targets: Words = ()
    """Ends of the names of the layers with adapters; empty for peft's choice."""
    lora_warmup: Count = 0
    """Rounds of training before the audit."""
    optimizer: str | None = None
    """Optimizer of the local steps, such as adamw(weight_decay=0.01)."""
    local_steps: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    """Optimizer steps that a client takes."""
    learning_rate: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """Learning rate of the local steps."""
    clients: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    """Clients whose mean update is seen."""
    window: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    """Consecutive updates that the adversary adds up."""
    max_grad_norm: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """L2 norm to which every gradient is clipped."""
    secrets: str | None = None
    """A text with a secret, such as `patient number {digits:6}`; a record of it is put into every step."""

    def simulation(self, seed: int) -> Simulation:
        """Return the simulation of one night.

        Args:
            seed: of the night; used where the section's own is `night`.

        Raises:
            ConfigError: options contradict each other.
        """
        own = {name: getattr(self, name) for name in (field.name for field in fields(Simulation)) if name != "seed"}
        return Simulation(**own, seed=seed if self.seed == "night" else self.seed)


class SnapshotsSection(_Section):
    """Kept snapshots of a training run, which may still go on."""

    folder: Path
    """An audit's folder, its spool, or a folder that holds snapshots."""
    tokenizer: Path | None = None
    """Folder of the tokenizer; null for the one kept in the spool."""
    identity: Path | None = None
    """File with the private key that opens encrypted snapshots; null for the variable LEAKAUDIT_IDENTITY."""
    allow_factory: Words = ()
    """Functions of your own code that make the model of the snapshots, such as package.module:name."""


class TrainingSection(_Section):
    """A training command with our callback, which a night runs as a child."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments, as a list. It is not given to a shell."""
    folder: Path | None = None
    """Working folder; null for that of this file."""
    time_limit: Duration = "12h"
    """Longest time that the training may take. It then gets SIGTERM, and SIGKILL 30 s later."""
    allow_factory: Words = ()
    """Functions of your own code that make the model of the snapshots, such as package.module:name."""


class Nightly(_Section):
    """The configuration of the nights.

    `leakaudit schema nightly` prints the JSON Schema of this class. A relative path counts from the folder of the file.
    """

    schema_: Literal["leakaudit.nightly/1"] = Field(alias="schema")
    """Format of the file."""
    simulate: SimulateSection | None = None
    """Audit client steps made from a model and a data file. Give exactly one of `simulate`, `snapshots` and `training`."""
    snapshots: SnapshotsSection | None = None
    """Audit kept snapshots."""
    training: TrainingSection | None = None
    """Run a training command, and audit the steps that its callback kept."""
    data_name: Annotated[str, Field(pattern=DATA_NAME)] = ""
    """Name of the data set, shown where nights are compared. Nights with another name are not compared. Without it a keyed mark of the path
    stands for the data."""
    folder: Path = Path("leakaudit-nights")
    """Folder of all nights: `history/` with one small file for each, `nights/` with results and reports."""
    every: Duration = "1d"
    """Time from one night to the next. The night's name is the beginning of its period in UTC; a second start in the same period does only
    what is missing."""
    attacks: Annotated[tuple[Plugin, ...], Field(min_length=1, max_length=MAX_PLUGINS)] = DEFAULT_ATTACKS
    """Attacks to run on each step."""
    defenses: Annotated[tuple[Plugin, ...], Field(max_length=MAX_PLUGINS)] = (NONE,)
    """Defences to compare."""
    policy: Path | None = None
    """YAML policy of the gate; null for the built-in one."""
    baseline: Path = Path("leakaudit.baseline.json")
    """File of the baseline; a night is compared with it if it exists."""
    budget: Duration = "2h"
    """Time for a whole night; the default of --time-limit. Cheap attacks run on all steps first, then the slow ones; what is left out is
    listed."""
    budget_s: Annotated[FiniteFloat, Field(gt=0, le=MAX_SECONDS)] = 60.0
    """Most seconds for one attack on one step under one defence."""
    stop_when_decided: bool = True
    """End the night when its policy is decided, at a confidence that allows for looking after every step."""
    controls: Count = 3
    """Control steps of a night."""
    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = "auto"
    """Device of the attacks: auto, cpu, cuda, cuda:1 and so on."""
    text: Literal["hash", "masked"] = "masked"
    """Text in the reports. A nightly report never shows private text."""
    sentence_model: Path | None = None
    """Folder of a sentence encoder; it adds a score of likeness in meaning."""
    keep: Duration = "30d"
    """Age at which the results and the report of a night are removed. Its record in the history stays."""
    last: Annotated[int, Field(ge=2, le=1000)] = 30
    """Nights that the trend shows."""
    notify_command: Annotated[tuple[str, ...], Field()] = ()
    """Program with arguments that gets the night as one JSON document on its standard input; empty for none. It is not given to a shell."""
    notify_on: Literal["always", "change", "fail"] = "always"
    """When to run it. `change`: if the verdict differs from the night before, or the night could not run. `fail`: if the exit code is not 0."""

    @model_validator(mode="after")
    def _one_source(self) -> Nightly:
        given = [name for name in ("simulate", "snapshots", "training") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of simulate, snapshots and training; found {found}")
        return self

    @property
    def text_mode(self) -> TextMode:
        """The text mode of the reports."""
        return TextMode(self.text)


def load_nightly(path: Path) -> Nightly:
    """Read the configuration; relative paths count from the folder of the file.

    Raises:
        ConfigError: the file is missing or wrong; the message names every problem with file, line and key.
    """
    from leakaudit.config.strict_yaml import read_yaml

    config: Nightly = read_yaml(path, Nightly)
    placed: Nightly = _from(path.parent, config)
    if placed.training is None or placed.training.folder is not None:
        return placed
    return placed.model_copy(update={"training": placed.training.model_copy(update={"folder": path.parent})})


def _from(base: Path, section: Any) -> Any:
    """Return a section whose relative paths count from a folder."""
    moved: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Path):
            moved[name] = base / value
        elif isinstance(value, _Section):
            moved[name] = _from(base, value)
    return section.model_copy(update=moved)
