"""Configuration: YAML files become one validated tree. No torch.

It may import `results` and `files`.
"""

from leakaudit.config.audit import AuditConfig, PluginSpec, load_config

__all__ = ["AuditConfig", "PluginSpec", "load_config"]
