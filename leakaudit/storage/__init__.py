"""Storage: snapshots on disk between trainer and audit, private and bounded.

It may import `client`, `models`, `config`, `results` and `files`.
"""

__all__ = [
    "digests",
    "encryption",
    "frozen_weights",
    "parent_watch",
    "retention",
    "safetensors_stream",
    "snapshot_content",
    "snapshot_files",
    "snapshots",
    "spool",
]
