"""The facts that an adapter knows about a training run and about each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from leakaudit.capture.processes.process_group import ProcessGroup
from leakaudit.capture.recording.step_tensors import Observe
from leakaudit.capture.trackers import Trackers
from leakaudit.config.audit import AuditConfig, for_tonight, load_config
from leakaudit.errors import ConfigError
from leakaudit.results.schema import TrackerRun

OFF_SWITCH = "LEAKAUDIT_DISABLED"
"""Environment variable that switches the audit off, if it is not empty."""

Source = AuditConfig | Mapping[str, Any] | Path | str | None
"""Where a user's configuration comes from: a file, the object, a mapping, or None for the defaults."""


def configuration(source: Source) -> AuditConfig:
    """Return the configuration from a user's source.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong; the message names the key.
    """
    if source is None:
        return for_tonight(AuditConfig())
    config = _of_mapping(source) if isinstance(source, Mapping) else load_config(source)
    if config.artifacts:  # another process finds them, perhaps in another working folder
        config = config.model_copy(update={"artifacts": tuple(path.absolute() for path in config.artifacts)})
    return for_tonight(config)


def _of_mapping(given: Mapping[str, Any]) -> AuditConfig:
    """Return the configuration of a mapping, which may hold objects of Python."""
    try:
        return AuditConfig.model_validate(given)
    except ValidationError as error:
        wrong = [
            (".".join(map(str, one["loc"])), one["msg"]) for one in error.errors(include_url=False, include_input=False)
        ]
        said = "; ".join(f"`{key}`: {message}" if key else message for key, message in wrong)
        raise ConfigError(f"the configuration has a wrong key or value: {said}") from None


@dataclass(frozen=True)
class StepContext:
    """The facts that only the framework knows about the step that begins."""

    step: int
    """Optimizer step, counted from 0."""
    epoch: float | None = None
    total_steps: int | None = None
    """Steps of the run; None if unknown."""
    loss: float | None = None
    """The last loss that the trainer logged."""
    learning_rate: float | None = None
    max_grad_norm: float | None = None
    """Bound to which the L2 norm of the gradient is clipped; None without clipping."""
    max_grad_value: float | None = None
    """Bound to which each entry of the gradient is clipped; None without clipping."""
    autocast: str | None = None
    """`bf16` or `fp16`, where hooks cannot see the autocast of the framework; None where they can."""
    kept_rng: bool = True
    """Whether dropout draws from the random generators that are recorded."""
    note: str = ""


@dataclass(frozen=True)
class TrainerContext:
    """The facts that an adapter knows about the run when it begins."""

    model: nn.Module
    """The model as the framework holds it, with or without wrappers."""
    optimizer: Any
    """The optimizer, a wrapper around it, or a list of several that share the model."""
    tokenizer: Any
    framework: str = ""
    """Name of the trainer, filled in by the `Adapter`."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version, filled in by the `Adapter`."""
    called: nn.Module | None = None
    """The object that the training loop calls; None for `model`."""
    num_labels: int | None = None
    """C of a classifier of arrays, which has no tokenizer; None for text."""
    criterion: nn.Module | None = None
    """Loss of a classifier of arrays; None for mean cross-entropy."""
    scaler: Any = None
    """The `GradScaler`, where no wrapper of the optimizer holds it."""
    batch_size_bound: int | None = None
    """Most examples of one optimizer step, where the protocol makes that public."""
    total_steps: int | None = None
    """Optimizer steps of the run; None if unknown."""
    kept_before: int = 0
    """Steps that the run kept before it was resumed from a checkpoint."""
    trackers: Trackers | None = None
    """The framework's loggers; filled in by the `Adapter`."""
    run_name: str = ""
    """What the framework calls the run; filled in by the `Adapter`, empty if it has no name."""
    observe: Observe = "update"
    local_steps: int | None = 1
    """K optimizer steps that make one `delta`; None if K is known only at the end of a round."""
    peers: ProcessGroup | None = None
    """The other processes of a distributed run."""

    @property
    def loop_calls(self) -> nn.Module:
        """The object that the training loop calls."""
        return self.model if self.called is None else self.called

    @property
    def tracked(self) -> tuple[TrackerRun, ...]:
        """What the trackers call the run."""
        return () if self.trackers is None else self.trackers.facts()

    @property
    def writes(self) -> bool:
        """Whether this process writes the audit; one process of a distributed run does."""
        return writes(self.peers)

    @property
    def audited_steps(self) -> int | None:
        """Steps of the run as the audit counts them; None if unknown.

        A round of local steps counts once.
        """
        if self.total_steps is None:
            return None
        return self.total_steps // self.steps_per_round

    @property
    def one_step(self) -> bool:
        """Whether an update comes from one optimizer step."""
        return self.observe != "delta" or self.local_steps == 1

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps that are one step of the audit: K for `delta`, else 1.

        It is 1 if K is not known, because a round of unknown length is told at each step whether it begins.
        """
        return self.local_steps or 1 if self.observe == "delta" else 1


def writes(peers: ProcessGroup | None) -> bool:
    """Return whether this process writes the audit.

    A process that trains alone writes it; in a group, only the first process does.
    """
    return peers is None or peers.first
