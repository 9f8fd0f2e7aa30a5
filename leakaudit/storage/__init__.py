"""Storage: private, bounded folders of snapshots between trainer and audit.

It may import `client`, `models`, `config`, `results` and `files`.
"""

__all__ = [
    "digests",
    "encryption",
    "frozen_weights",
    "locks",
    "parent_watch",
    "partial_steps",
    "retention",
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
