"""The configuration of an audit, read from YAML and validated. No torch.

It may import `results` and `files`.
"""

from leakaudit.config.audit import AuditConfig, PluginSpec, load_config

__all__ = ["AuditConfig", "PluginSpec", "load_config"]
