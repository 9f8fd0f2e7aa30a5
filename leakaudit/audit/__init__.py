"""The audit of recorded steps; only here do attacks meet the true batch.

It may import `client`, `storage`, all plugins, `results`, `gate` and `reports`; only `publish` imports the last two.
"""

__all__ = [
    "active_server",
    "applied_defenses",
    "attempt",
    "audit",
    "battery",
    "canaries",
    "comparison",
    "controls",
    "devices",
    "entries",
    "inline",
    "live_copy",
    "publish",
    "results",
    "run_folder",
    "scoring",
    "simulation",
    "spool_audit",
    "stamp",
    "state",
    "step_record",
    "verification",
    "worker",
]
