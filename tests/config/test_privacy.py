"""What a configuration may say of differential privacy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leakaudit.config.privacy import PrivacyConfig


@pytest.mark.parametrize(
    "keys",
    [
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": float("nan")},
        {"sampling_rate": 0.0},
        {"sampling_rate": 1.5},
        {"steps": 0},
        {"epsilon": 0.0, "delta": 1e-5},
        {"epsilon": float("inf"), "delta": 1e-5},
        {"epsilon": 3.0},
        {"accountant": "opacus rdp"},
        {"epsilon": 3.0, "delta": 1e-5, "accountant": "a\nb"},
        {"sampling": "sorted"},
        {"epsilom": 3.0},
    ],
)
def test_numbers_that_no_guarantee_has_are_refused(keys: dict[str, Any]) -> None:
    """Wrong: a delta of 0, a rate above 1, no steps, or half of a claim is accepted."""
    with pytest.raises(ValidationError):
        PrivacyConfig.model_validate(keys)


def test_a_whole_claim_is_read() -> None:
    """Wrong: a form of the documentation that is refused."""
    claim = {"epsilon": 3, "delta": 1e-5, "accountant": "dp-accounting pld", "sampling": "poisson"}
    assert PrivacyConfig.model_validate(claim).covers == "run"
