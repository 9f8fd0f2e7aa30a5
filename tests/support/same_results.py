"""Results without what differs between two audits of the same steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OF_ONE_RUN = {"hmac", "snapshot", "wall_s", "seconds_per_step", "gpu_s", "overhead", "run", "digest"}
"""Keys of results that differ between two runs of the same steps: marks under the key of the run, times, ids."""


def same_results(folder: Path) -> Any:
    """Return the results in a folder without what only this run has."""
    return _without(json.loads((folder / "results.json").read_text(encoding="utf-8")))


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(item) for key, item in value.items() if key not in OF_ONE_RUN}
    return [_without(item) for item in value] if isinstance(value, list) else value
