"""Records of nights for tests."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from leakaudit.history.record import NightRecord, Rate
from leakaudit.history.trend import id_of, time_of

FIRST = "2026-11-01T0000Z"
KEYS = {"model": "Bert cd", "data": "notes", "attacks": "span; leakaudit 0.1.0", "policy": "ab12"}


def night_id(number: int) -> str:
    """Return the id of the night `number` days after the first one."""
    return id_of(time_of(FIRST) + timedelta(days=number))


def rate(k: int, n: int, **extra: Any) -> Rate:
    """Build the rate of one night whose steps are all fresh."""
    fields: dict[str, Any] = {"event": "exact_sentence", "defense": "shipped", "limit": 0.05, "k": k, "n": n}
    return Rate(**({"fresh_k": k, "fresh_n": n} | fields | extra))


def night(number: int, k: int = 0, n: int = 20, **extra: Any) -> NightRecord:
    """Build the record of one night with a single rate."""
    id_ = night_id(number)
    fields: dict[str, Any] = {
        "night": id_,
        "status": "audited",
        "started": id_,
        "finished": id_,
        "exit_code": 3 if k else 0,
        "verdict": "FAIL" if k else "PASS",
        "keys": KEYS,
        "steps": n,
        "planned": n,
        "rates": (rate(k, n),),
    }
    return NightRecord(**(fields | extra))


def gap(number: int, reason: str = "the data file is missing") -> NightRecord:
    """Build the record of a night that could not run."""
    return night(number, status="gap", reason=reason, exit_code=5, verdict=None, keys={}, steps=0, rates=())
