"""`none` leaves the update as it was sent."""

from __future__ import annotations

import torch

from leakaudit.defenses.none import NoDefense
from tests.support import tiny


def test_it_returns_what_it_was_given() -> None:
    """Not even a declaration is added."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["a dog"], [1])
    seen = step.observe()
    assert NoDefense()(step, seen, torch.Generator()) is seen
