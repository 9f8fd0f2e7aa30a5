"""The JSON Schema of `verdict.json`, which programs of others read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from leakaudit.config.described import described
from leakaudit.gate.verdict import Verdict


def undescribed(name: str, part: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of a part of a schema that say nothing of themselves."""
    yield from (f"{name}.{key}" for key, told in part.get("properties", {}).items() if not told.get("description"))


def test_every_key_of_a_verdict_is_described() -> None:
    """Wrong: a new key whose unit, or whose None, a reader has to guess."""
    schema = described(Verdict).model_json_schema(by_alias=True)
    parts = {"Verdict": schema, **schema["$defs"]}
    assert {"About", "RuleVerdict", "WayOut", "PooledRun", "Artifact"} <= {*parts}
    assert not [key for name, part in parts.items() for key in undescribed(name, part)]
