"""Rules that the tests of the gate share, and the call that judges by them."""

from __future__ import annotations

from typing import Any

from leakaudit.gate import evaluate as gate
from leakaudit.gate.verdict import Verdict
from leakaudit.results.schema import Results
from tests.support.factories import NOW, policy

RED_LINE = {"id": "red-line", "severity": "critical", "event": "exact_sentence", "max_count": 0}


RATE = {"id": "rate", "event": "exact_sentence", "max_rate": 0.05}


def judge(found: Results, *rules: dict[str, Any], **extra: Any) -> Verdict:
    """Judge results by rules on top of the defaults of the test policy."""
    return gate.evaluate(found, policy(*rules, **extra), now=NOW)
