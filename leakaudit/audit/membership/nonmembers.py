"""Texts of no step: read from a file, and divided among their uses."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakaudit.algorithms.membership.candidates import Candidate
from leakaudit.algorithms.membership.readings import FEWEST
from leakaudit.audit.simulation.examples import Example, Examples, Fields, read_data
from leakaudit.audit.simulation.texts import MAX_LENGTH
from leakaudit.client.facts import PublicFacts
from leakaudit.config.membership import MembershipConfig
from leakaudit.errors import ConfigError, DataError

KNOWN_BATCH = 4
"""Texts of the known batch. Our choice: an update of so few names each of them, where the attack works at all."""

FEWEST_OTHERS = 16
"""Fewest candidates of no step. Our choice: with fewer, an AUC says nothing."""


@dataclass(frozen=True)
class Parts:
    """Texts of no step and their uses; no text has two."""

    known_batch: tuple[Candidate, ...]
    """Texts whose gradient is the update that must name them."""
    calibration: tuple[Candidate, ...]
    """Texts that fix the threshold."""
    numbers: tuple[int, ...]
    """Places of the calibration texts in the file, by which those of all steps are counted once."""
    others: tuple[Candidate, ...]
    """Candidates of no step."""
    overlapped: int
    """Texts that were left out because the step holds them."""


def read_nonmembers(path: Path, task: str, fields: Fields) -> Examples:
    """Read the texts of a file, with their classes where each has one.

    Raises:
        DataError: the file cannot be read, or holds no texts.
    """
    if task == "classification":
        try:
            return read_data(path, "classification", fields)
        except DataError:
            pass  # the labels cannot be used; whether the texts can, the next line says
    return read_data(path, "causal-lm", fields)


def has_classes(read: Examples, facts: PublicFacts) -> bool:
    """Return whether every text has a class of the model.

    Names of classes are numbered in sorted order, which is the model's numbering only if all classes are there.
    """
    if facts.task != "classification" or facts.num_labels is None:
        return False
    named_all = not read.classes or len(read.classes) == facts.num_labels
    return named_all and all(row.label is not None and row.label < facts.num_labels for row in read.rows)


def tokenised(rows: Sequence[Example], tokenizer: Any, max_length: int, *, labelled: bool) -> list[Candidate]:
    """Return different texts as a client's tokenizer writes them, without empty ones."""
    found: dict[tuple[int, ...], Candidate] = {}
    for row in rows:
        ids = tuple(tokenizer(row.text, truncation=True, max_length=max_length)["input_ids"])
        if ids:
            found.setdefault(ids, Candidate(ids, row.label if labelled else None))
    return list(found.values())


def longest(config: MembershipConfig, facts: PublicFacts) -> int:
    """Return the number of tokens after which a text is cut."""
    return min(config.max_length or MAX_LENGTH, facts.vocabulary.max_length)


def parts_of(
    texts: Sequence[Candidate], held: Collection[tuple[int, ...]], config: MembershipConfig, seed: int, step: str
) -> Parts:
    """Divide texts of no step among their uses.

    The known batch is the same in every step. Calibration texts and candidates are drawn for each step, so that the threshold of all steps rests on
    as many texts as possible.

    Args:
        texts: all of them, different from each other.
        held: token ids of the texts of the step, which are left out.
        config: how many are wanted; with few texts two thirds of them are calibration texts.
        seed: of the audit.
        step: id of the step.

    Raises:
        ConfigError: there are too few.
    """
    shuffled = list(enumerate(texts))
    random.Random(seed).shuffle(shuffled)
    outside = [(number, text) for number, text in shuffled if text.token_ids not in held]
    needed = KNOWN_BATCH + FEWEST + FEWEST_OTHERS
    if len(outside) < needed:
        raise ConfigError(
            f"the file of non-members has {len(outside)} different texts that the step does not hold, and {needed} are the fewest; give more"
        )
    rest = outside[KNOWN_BATCH:]
    random.Random(f"{seed} {step}").shuffle(rest)
    used = min(config.calibration, max(FEWEST, min(2 * len(rest) // 3, len(rest) - FEWEST_OTHERS)))
    return Parts(
        known_batch=tuple(text for _, text in outside[:KNOWN_BATCH]),
        calibration=tuple(text for _, text in rest[:used]),
        numbers=tuple(number for number, _ in rest[:used]),
        others=tuple(text for _, text in rest[used : used + config.candidates]),
        overlapped=len(texts) - len(outside),
    )
