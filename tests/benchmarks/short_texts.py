"""How often a guess of some words by their frequency is right.

The texts have a few words.

    python -m tests.benchmarks.short_texts FOLDER

FOLDER holds one folder for each corpus with `train.jsonl`, whose lines have the key `text`. Two words drawn by their frequency in the corpus
agree with probability sum p^2, so a text of n words is guessed with (sum p^2)^n at most: a guess of another length is never right.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path


def agreement(texts: list[str]) -> float:
    """Return the probability that two words drawn by their frequency agree."""
    words = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower()))
    return sum(n * n for n in words.values()) / words.total() ** 2


def main(folder: Path) -> None:
    """Print one line for each corpus."""
    for path in sorted(folder.glob("*/train.jsonl")):
        share = agreement([json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()])
        print(f"{path.parent.name:16} 1 word {share:.2%}; 2 words 1 in {share**-2:,.0f}; 3 words 1 in {share**-3:,.0f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
