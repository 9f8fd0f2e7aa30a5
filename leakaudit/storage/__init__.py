"""Storage: private, bounded folders of snapshots between trainer and audit.

It may import `client`, `models`, `config`, `results` and `files`.
"""

__all__ = [
    "attempt_deaths",
    "digests",
    "disk_use",
    "encryption",
    "folder_owners",
    "frozen_weights",
    "held_rounds",
    "locks",
    "manifest_seal",
    "parent_watch",
    "partial_steps",
    "participants",
    "retention",
    "round_tensors",
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
