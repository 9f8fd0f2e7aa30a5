"""Storage: private, bounded folders of snapshots between trainer and audit.

It may import `client`, `models`, `config`, `results` and `files`.
"""

__all__ = [
    "digests",
    "disk_use",
    "encryption",
    "frozen_weights",
    "held_rounds",
    "locks",
    "parent_watch",
    "partial_steps",
    "participants",
    "retention",
    "rounds_file",
    "run_folders",
    "safetensors_stream",
    "shared_weights",
    "snapshot_content",
    "snapshot_files",
    "snapshot_queue",
    "snapshots",
    "spool",
    "spool_files",
    "truth_tensors",
]
