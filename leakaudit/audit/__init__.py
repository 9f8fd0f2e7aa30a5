"""The audit of recorded steps: it scores attacks against the true batch.

No other room has both an attack's guess and the truth. Only `publish` imports `gate` and `reports`.
"""

__all__ = [
    "active_server",
    "applied_defenses",
    "as_sent",
    "attempt",
    "audit",
    "battery",
    "canaries",
    "comparison",
    "controls",
    "devices",
    "entity_tagger",
    "entries",
    "inline",
    "known_factors",
    "live_copy",
    "perplexity",
    "publish",
    "results",
    "rounds",
    "run_folder",
    "scoring",
    "simulation",
    "spool_audit",
    "stamp",
    "state",
    "step_record",
    "verification",
    "verified_record",
    "weight_difference",
    "worker",
]
