"""The options of `leakaudit simulate`: client steps without a training loop.

No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from leakaudit.config.client_optimizer import parse_optimizer
from leakaudit.errors import ConfigError

MAX_CLASSES = 100_000
"""Most classes of a classifier. Our choice: a head with that many classes takes 0.3 GB at hidden size 768, and an audit holds several
copies of it. A larger label is usually an identifier in the wrong field."""

GRANTS = ("labels", "lengths", "words", "longest", "counts")
"""What a threat model may give an attack (`leakaudit.client.facts.Granted`)."""


def _option(default: Any, text: str, **limits: float) -> Any:
    """Return a dataclass field with its `--help` text and its limits.

    The limits are `minimum`, `maximum`, or `above` for a lower limit that is itself excluded.
    """
    return field(default=default, metadata={"help": text, **limits})


@dataclass(frozen=True)
class Simulation:
    """Client steps that are made from a model and a data file.

    Each field is an option of `leakaudit simulate`; its metadata holds the text of `--help`.
    """

    model: Path = field(
        metadata={
            "help": "Folder as `save_pretrained` writes it; for arrays `package.module:function` that makes the classifier."
        }
    )
    data: Path = field(
        metadata={
            "help": "Texts and labels as JSONL, JSON, CSV, TSV, Parquet or a folder of `datasets`; or arrays as `save_auxiliary` writes them "
            "(.safetensors)."
        }
    )
    task: Literal["classification", "causal-lm"] = _option("classification", "What the model is trained for.")
    num_labels: int | None = _option(
        None,
        "Classes; default: those of the model's classifier, else the largest label plus one.",
        minimum=2,
        maximum=MAX_CLASSES,
    )
    batch_size: int = _option(1, "Texts of one batch.", minimum=1)
    steps: int = _option(10, "Client steps to audit.", minimum=1)
    seed: int = _option(0, "Seed of fresh head, shuffle, dropout and attacks.")
    mode: Literal["eval", "train"] = _option("eval", "train: dropout on.")
    freeze: tuple[str, ...] = _option(
        (), "`embeddings`, or patterns of parameter names, comma-separated; default: nothing."
    )
    grant: tuple[str, ...] = _option(
        (),
        "What the threat model gives the attacks: labels, lengths, words (the set of tokens), longest (the longest length), counts (how often "
        "each token occurs); default: nothing.",
    )
    lora_rank: int | None = _option(
        None, "Train low-rank adapters and the head instead of the weights; default: the weights.", minimum=1
    )
    lora_targets: tuple[str, ...] = _option(
        (), "Ends of the names of the layers with adapters; default: peft's choice."
    )
    lora_warmup: int = _option(
        0,
        "Rounds of training before the audit. With 0, the adapters' B is zero and A has no update.",
        minimum=0,
    )
    optimizer: str | None = _option(
        None,
        "Optimizer of the local steps: adamw, adam, sgd or adafactor, with options as in adamw(weight_decay=0.01,fresh=true); default: sgd.",
    )
    local_steps: int = _option(1, "Optimizer steps that a client takes, each on a batch of its own.", minimum=1)
    learning_rate: float | None = _option(
        None,
        "Learning rate of the local steps; the update is then a difference of weights. Default: none, and the update is the gradient.",
        above=0,
    )
    clients: int = _option(
        1, "Clients whose mean update is seen, as under secure aggregation; each has a batch of its own.", minimum=1
    )
    window: int = _option(
        1,
        "Consecutive updates that the adversary adds up, each of a batch of its own; for defences with error feedback.",
        minimum=1,
    )
    max_grad_norm: float | None = _option(None, "L2 norm to which every gradient is clipped; default: none.", above=0)
    text_field: str = _option("text", "Field of the data that holds the text.")
    label_field: str = _option("label", "Field of the data that holds the class: a number from 0, or its name.")

    secrets: str | None = _option(
        None,
        "Puts a record with a secret into every step and bounds epsilon by those recovered: a text such as 'patient number {digits:6}'; "
        "{one_of:FILE} is a line of a file; default: no secret.",
    )

    def __post_init__(self) -> None:
        """Refuse unknown grants and values that make no client step."""
        unknown = sorted(set(self.grant) - set(GRANTS))
        if unknown:
            raise ConfigError(f"--grant {', '.join(unknown)}: an attack can be granted {', '.join(GRANTS)}")
        if self.batch_size < 1 or self.steps < 1:
            raise ConfigError(f"at least one step of one text is needed, got {self.steps} steps of {self.batch_size}")
        if self.lora_rank is None and (self.lora_targets or self.lora_warmup):
            raise ConfigError("--lora-targets and --lora-warmup say nothing without --lora-rank")
        if (self.lora_rank is not None and self.lora_rank < 1) or self.lora_warmup < 0 or self.local_steps < 1:
            raise ConfigError(
                "the rank of adapters and the number of local steps are at least 1, that of warm-up steps at least 0; "
                f"got {self.lora_rank}, {self.local_steps} and {self.lora_warmup}"
            )
        if self.local_steps > 1 and self.learning_rate is None:
            raise ConfigError(
                f"--local-steps {self.local_steps} needs --learning-rate: what a client sends is a difference of weights"
            )
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ConfigError(f"--learning-rate is above 0, got {self.learning_rate:g}")
        self._check_means()
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"--max-grad-norm is above 0, got {self.max_grad_norm:g}")
        if self.optimizer is not None:
            parse_optimizer(self.optimizer)
            if self.learning_rate is None:
                raise ConfigError(
                    f"--optimizer {self.optimizer} needs --learning-rate: what a client sends is a difference of weights"
                )

    def _check_means(self) -> None:
        """Refuse means of several updates that are not made."""
        self._check_several("--clients", self.clients, "client")
        self._check_several("--window", self.window, "update")
        if self.clients > 1 and self.window > 1:
            raise ConfigError("--clients and --window: only the window of one client is made; leave out one of them")

    def _check_several(self, name: str, value: int, what: str) -> None:
        """Refuse a mean of several updates that is not that of plain gradients."""
        if value < 1:
            raise ConfigError(f"{name} is at least 1, got {value}")
        if value > 1 and (self.learning_rate is not None or self.max_grad_norm is not None):
            option = "--learning-rate" if self.learning_rate is not None else "--max-grad-norm"
            raise ConfigError(
                f"{name} {value} and {option}: every {what} would be changed on its own before the mean, and only the mean of plain "
                f"gradients is made; leave out {option}, or audit one {what}"
            )
