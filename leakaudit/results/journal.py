"""The private journal of an audit, `journal.jsonl`: one finished attempt per line.

Unlike results.json it holds a pattern of each text, the class counts and, in text mode full, the texts themselves.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from leakaudit.errors import ResultsError
from leakaudit.files.json_lines import split_lines
from leakaudit.files.regular_files import read_regular
from leakaudit.results.schema import Attempt, ResultsModel


class TokenMatch(StrEnum):
    """What a pattern says about one token of a recovered or a true sequence."""

    BIGRAM = "b"
    """Correct, and part of a correct bigram."""
    UNIGRAM = "u"
    """Correct token."""
    WRONG = "."


class Sample(ResultsModel):
    """A true sequence and what one attack recovered of it."""

    step: str
    attack: str
    defense: str
    sequence: str
    """Id of its `SequenceScore`."""
    true_pattern: str
    """One `TokenMatch` for each token of the true sequence, without special tokens."""
    guess_pattern: str | None
    """The same for the guess; None for an attack that guesses a bag of tokens."""
    true_tokens: tuple[str, ...] | None = None
    """Tokens as the tokenizer writes them; only in text mode full, else None."""
    guess_tokens: tuple[str, ...] | None = None


class LabelSample(ResultsModel):
    """True and recovered class counts of one step."""

    step: str
    attack: str
    defense: str
    true_counts: tuple[int, ...]
    guess_counts: tuple[int, ...]
    names: tuple[str, ...] | None = None


class SecretOutcome(ResultsModel):
    """Whether an attack recovered the secret that was put into a batch."""

    recovered: bool = False
    """Whether one of its guesses names the secret."""
    guesses: Annotated[int, Field(ge=0)] = 0
    """L: number of texts that it guessed; each names one value at most."""
    values: Annotated[int, Field(ge=2)]
    """M: number of values from which the secret was drawn."""
    first: bool = True
    """Whether the step is in the first epoch, as far as the size of the data and of the batch tell."""


class JournalEntry(ResultsModel):
    """One line of `journal.jsonl`: a finished attempt and its private samples."""

    attempt: Attempt
    samples: tuple[Sample, ...] = ()
    labels: LabelSample | None = None
    secret: SecretOutcome | None = None
    """None if the batch holds no secret of the audit."""


def load_journal(path: Path) -> list[JournalEntry]:
    """Read `journal.jsonl`; a missing file is an empty journal.

    A killed worker may leave an incomplete last line. It is left out.

    Raises:
        ResultsError: a line other than the last one cannot be read.
    """
    if not path.exists():
        return []
    lines = split_lines(read_regular(path))
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(JournalEntry.model_validate_json(line))
        except ValidationError:
            if number == len(lines):
                break  # a worker was killed while it wrote: that attempt is repeated
            raise ResultsError(f"{path}: line {number} of {len(lines)} cannot be read") from None
    return entries
