"""Finds the files that a run made, when its results are published."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from leakaudit.config.audit import AuditConfig
from leakaudit.results.artifacts import Found, find_artifacts
from leakaudit.results.origin import Origin


def released_files(config: AuditConfig, folder: Path, origin: Origin) -> Found:
    """Return names and digests of the artefacts that a configuration names.

    A file that was last written before the run began is not taken: an earlier run left it there.

    Args:
        config: names the artefacts.
        folder: folder of the audit, which is none of them.
        origin: what was known when the run began.
    """
    began = origin.policy.taken_at if origin.of_training and origin.policy else None
    since = None if began is None else datetime.fromisoformat(began).timestamp()
    return find_artifacts(config.artifacts, without=folder, since=since)
