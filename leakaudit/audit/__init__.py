"""The audit of kept steps: attacks and defences meet the true batch here, and nowhere else.

It may import every room to its left: `client`, `storage`, all plugins, `results`, `gate` and `reports`.
"""

__all__ = [
    "active_server",
    "applied_defenses",
    "audit",
    "canaries",
    "comparison",
    "devices",
    "inline",
    "live_copy",
    "run_folder",
    "scoring",
    "simulation",
    "verification",
    "worker",
]
