"""The configuration of an audit, read from YAML and validated. No torch.

It may import `results` and `files`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leakaudit.config.audit import AuditConfig, PluginSpec, load_config

__all__ = ["AuditConfig", "PluginSpec", "load_config"]


def __getattr__(name: str) -> Any:
    """Import the configuration of an audit when it is asked for; the gate needs none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from leakaudit.config import audit

    return getattr(audit, name)
