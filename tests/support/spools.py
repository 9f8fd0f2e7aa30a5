"""What a spool holds."""

AFTER_AN_AUDIT = [
    ".gitignore",
    "audit.json",
    "battery.json",
    "finished.json",
    "trainer.lock",
    "worker.lock",
]
"""Files of a spool whose audit is finished, sorted by name: no snapshot, and nothing half-written."""
