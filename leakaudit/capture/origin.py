"""Takes policy, code and base model when a training begins."""

from __future__ import annotations

from torch import nn

from leakaudit.capture.refusals import policy_of
from leakaudit.config.audit import AuditConfig
from leakaudit.gate.origin import origin_of
from leakaudit.models.base_weights import base_of_config
from leakaudit.results.origin import Origin


def origin_of_training(config: AuditConfig, model: nn.Module) -> Origin:
    """Return what is known of a training that begins in the working folder.

    Args:
        config: the audit's configuration.
        model: the model itself, without wrappers.

    Raises:
        ConfigError: the policy cannot be read.
    """
    base = base_of_config(getattr(model, "config", None))
    origin = origin_of(policy_of(config), config.out_dir, data=config.data_name, base_model=base)
    return origin.model_copy(update={"of_training": True})
