"""Lengths of time in configurations, policies and options: one way to write them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pydantic import TypeAdapter, ValidationError

from leakaudit.config.duration import MAX_LENGTH, Duration, length_of


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("7d", timedelta(days=7)),
        ("12h", timedelta(hours=12)),
        ("30m", timedelta(minutes=30)),
        ("90s", timedelta(seconds=90)),
        ("0.5d", timedelta(hours=12)),
        ("0s", timedelta()),
        ("999999d", MAX_LENGTH),
    ],
)
def test_a_number_and_a_unit_are_a_length_of_time(text: str, length: timedelta) -> None:
    """Days, hours, minutes and seconds."""
    assert length_of(text) == length


@pytest.mark.parametrize("text", ["", "7", "d", "7w", "7 d", "-1d", "1e3d", "7d\n", "\u0667d", "nand"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    """The message says what to write."""
    with pytest.raises(ValueError, match="write a number and d, h, m or s, such as 7d"):
        length_of(text)


@pytest.mark.parametrize("text", ["1000000d", "9" * 400 + "d", "9" * 400 + ".0h"])
def test_a_length_beyond_any_calendar_is_refused(text: str) -> None:
    """The message is one short line, however long the number is."""
    with pytest.raises(ValueError, match=r"is too long; the longest is 999999d") as caught:
        length_of(text)
    assert len(str(caught.value)) < 120


def test_a_duration_of_a_file_is_above_zero_and_kept_as_written() -> None:
    """An age limit of nothing would refuse all evidence."""
    adapter: TypeAdapter[str] = TypeAdapter(Duration)
    assert adapter.validate_python("1.5h") == "1.5h"
    with pytest.raises(ValidationError, match="'0d' is not above zero"):
        adapter.validate_python("0d")
