"""Records of nights for tests."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from leakaudit.gate.policy import NightsPolicy
from leakaudit.history.record import NightRecord, Rate
from leakaudit.history.saved_trend import SavedTrend
from leakaudit.history.trend import id_of, time_of, with_sequences

FIRST = "2026-11-01T0000Z"
KEYS = {"model": "Bert cd", "data": "notes", "attacks": "span; leakaudit 0.1.0", "policy": "ab12"}
ATTACKS = ("span", "embedding-rows", "april", "lamp", "dager", "tag", "film", "rare-rows")


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


def thirty_nights(run: str) -> SavedTrend:
    """Build thirty nights with five breaks, six gaps, three model versions and a leak.

    Args:
        run: id of the audit that is the last night.
    """
    changes = {4: "data", 5: "policy", 6: "attacks", 14: "hardware", 15: "shipped"}
    failed = {9: "the data file is missing", 20: "the data file is missing", 21: "the disk was full"}
    absent = {10, 11, 25}
    keys = dict(KEYS)
    past: list[NightRecord] = []
    records: list[NightRecord] = []
    for number in range(30):
        if number in absent:
            continue
        if number in failed:
            records.append(gap(number, failed[number]))
            continue
        if number in changes:
            keys, past = keys | {changes[number]: f"value {number}"}, []
        leaks = 3 if number >= 23 else 1 if number == 7 else 0
        plain = [
            rate(leaks, 20),
            *(rate(leaks if name == "span" else 0, 20, attack=name, limit=None) for name in ATTACKS),
        ]
        plain += [rate(0, 20, event="label_counts", limit=0.0), rate(0, 18, defense="prune", unjudged=2)]
        rates = with_sequences(plain, keys, past, NightsPolicy())
        version = f"{number // 12:x}"
        past.append(
            night(
                number, leaks, keys=keys, rates=rates, model_version=version, worse=number >= 24, run=run,
                units=(f"{number:016x}",),
            )
        )  # fmt: skip
        records.append(past[-1])
    return SavedTrend(records=tuple(records), period_s=86_400.0)
