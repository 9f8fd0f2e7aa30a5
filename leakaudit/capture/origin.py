"""Takes policy, code and base model when a training begins."""

from __future__ import annotations

from torch import nn

from leakaudit.capture.refusals import policy_of
from leakaudit.config.audit import AuditConfig
from leakaudit.config.invocation import training_command
from leakaudit.gate.origin import origin_of
from leakaudit.models.base_weights import base_of_config
from leakaudit.results.origin import Origin
from leakaudit.results.schema import TrackerRun


def beginning_of(config: AuditConfig, model: nn.Module, trackers: tuple[TrackerRun, ...] = ()) -> tuple[str, Origin]:
    """Return how a training was started, and what is known as it begins.

    Args:
        config: the audit's configuration.
        model: the model itself, without wrappers.
        trackers: what the trackers call the run.

    Raises:
        ConfigError: the policy cannot be read.
    """
    base = base_of_config(getattr(model, "config", None))
    origin = origin_of(
        policy_of(config),
        config.out_dir,
        data=config.data_name,
        data_invented=config.data_invented,
        base_model=base,
    )
    return training_command(), origin.model_copy(update={"of_training": True, "trackers": trackers})
