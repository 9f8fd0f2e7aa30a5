"""Integrations: one adapter for each federated or fine-tuning framework.

No framework is imported here, so that no integration imports another's framework:

    from leakaudit.integrations.flower import LeakAuditMod                 # Flower: a client mod
    from leakaudit.integrations.nvflare import LeakAuditFilter             # NVFlare: a DXO filter that can block
    plugins: [leakaudit.integrations.axolotl.LeakAuditPlugin]              # axolotl: a line of its YAML

`docs/integrations.md` says how each is used and what was tried.
"""

from leakaudit.parts import require_audit

__all__ = ["axolotl", "contents", "flower", "nvflare"]

require_audit(__name__)
