"""The table of attacks without torch is the page that the tests make."""

from __future__ import annotations

import re
from pathlib import Path

from leakaudit.preflight.attack_table import READ_SENTENCES, READ_WORDS, RUNS_ON
from leakaudit.registry import attacks

PAGE = Path(__file__).parents[2] / "docs" / "attacks_by_update.md"


def test_the_table_is_the_page() -> None:
    """Every cell that says `yes`, of classifiers and of language models."""
    text = PAGE.read_text(encoding="utf-8")
    body = text[text.index("<!-- table: begin -->") : text.index("<!-- table: end -->")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line.startswith("|")]
    on_page: dict[str, set[str]] = {column: set() for column in rows[0][1:]}
    for name, *cells in rows[2:]:
        attack = re.match(r"`(.+?)`", name)
        assert attack is not None
        for column, cell in zip(on_page, cells, strict=True):
            on_page[column] |= {attack[1]} if cell == "yes" and attack[1] != "random-labels" else set()
    assert on_page == {column: set(names) for column, names in RUNS_ON.items()}


def test_attacks_are_sorted_by_what_they_return() -> None:
    """As the attacks themselves say."""
    goals = {name: attacks.create(name, {}).goal for name in set().union(*RUNS_ON.values())}
    assert {name for name, goal in goals.items() if goal == "words"} == READ_WORDS
    assert {name for name, goal in goals.items() if goal == "text"} >= READ_SENTENCES
    assert not {name for name in READ_SENTENCES if goals[name] == "labels"}
