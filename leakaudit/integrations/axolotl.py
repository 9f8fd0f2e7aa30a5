"""`LeakAuditPlugin`, which audits a training run of axolotl.

    plugins: [leakaudit.integrations.axolotl.LeakAuditPlugin]
    leakaudit: leakaudit.yaml      # or the keys of that file themselves; without this key the defaults

Both lines belong into the YAML file of axolotl.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from leakaudit.callbacks.hf_trainer import LeakAuditCallback


class LeakAuditArgs(BaseModel):
    """What this plugin adds to axolotl's configuration."""

    leakaudit: str | dict[str, Any] | None = None
    """A YAML file of an audit's configuration, or its keys and values."""


class LeakAuditPlugin(BasePlugin):  # type: ignore[misc]  # axolotl ships no types
    """A plugin that attaches a `LeakAuditCallback` to axolotl's trainer."""

    def get_input_args(self) -> str:
        """Return the place of the class that declares our key of the YAML file."""
        return f"{__name__}.{LeakAuditArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Attach the callback, after all callbacks that axolotl itself adds.

        Args:
            cfg: axolotl's validated configuration.
            trainer: the trainer that axolotl made, a `transformers.Trainer`.
        """
        source = cfg.get("leakaudit")
        LeakAuditCallback(source.to_dict() if hasattr(source, "to_dict") else source).attach(trainer)
