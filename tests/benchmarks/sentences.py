"""Sentences of a data file that pass the filters of FILM's experiments.

FILM (Gupta et al. 2022, Appendix B.1) keeps sentences with fewer than 40 tokens, fewer than 5 unknown tokens, a perplexity below 50 under
the public GPT-2, and at least one named entity; the tested ones have 15 to 40 tokens. The filters on length and entities are applied here.
A byte-level BPE knows every token. The perplexity filter is not applied: it would need the weights of GPT-2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

LEAST, MOST = 15, 40
"""Tokens of a sentence. Source: FILM, Sec. 6.1 and Appendix B.1."""


def kept_rows(
    rows: Sequence[dict[str, Any]], tokenizer: Any, least: int = LEAST, most: int = MOST
) -> list[dict[str, Any]]:
    """Return rows with tokens in range, and an entity if the data names any.

    Args:
        rows: each with `text`, and where known `spans` or `entities`.
        tokenizer: of the victim.
        least, most: tokens, both included.
    """
    ids = tokenizer([row["text"] for row in rows], add_special_tokens=False)["input_ids"]
    tagged = any(entities_in(row) for row in rows)
    return [
        row
        for row, text in zip(rows, ids, strict=True)
        if least <= len(text) <= most and (entities_in(row) or not tagged)
    ]


def entities_in(row: dict[str, Any]) -> list[str]:
    """Return the named entities of a row, from its `entities` or `spans`."""
    return row.get("entities") or [row["text"][start:end] for start, end, *_ in row.get("spans") or ()]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows as JSONL and return the path; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
