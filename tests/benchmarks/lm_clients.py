"""Attacks on simulated language-model clients, scored in FILM's way and ours."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from leakaudit.audit.attempt import readable
from leakaudit.audit.scoring.score import score
from leakaudit.audit.simulation.texts import Simulator
from leakaudit.client.observation import Observation
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import PluginSpec
from leakaudit.config.simulation import Simulation
from leakaudit.errors import AnatomyError, type_and_place
from leakaudit.plugins import Budget, Reconstruction
from leakaudit.plugins.overlap import Rouge, rouge_f
from leakaudit.registry import attacks, defenses

ROUGES: tuple[Rouge, ...] = ("rouge1", "rouge2", "rougeL")
FOUND = 0.25
"""ROUGE-L above which a sentence counts as found. Source: FILM (Gupta et al. 2022), Sec. 6.2 and Table 3."""

DRAW = 1_000_003
"""Distance of the random seeds of two draws. Our choice: a prime above every seed in use."""


@dataclass(frozen=True)
class Client:
    """Which steps a client takes."""

    victim: Path
    """Folder as `save_pretrained` writes it."""
    data: Path
    """JSONL with `text`."""
    batch_size: int
    batches: int
    seed: int = 1
    freeze: tuple[str, ...] = ()
    mode: str = "eval"

    def simulator(self, grant: tuple[str, ...] = ()) -> Simulator:
        """Return the maker of the steps, which are equal whatever is granted."""
        more: dict[str, Any] = {"freeze": self.freeze, "grant": grant, "mode": self.mode}
        return Simulator(
            Simulation(
                model=self.victim,
                data=self.data,
                task="causal-lm",
                batch_size=self.batch_size,
                steps=self.batches,
                seed=self.seed,
                **more,
            )
        )


@dataclass(frozen=True)
class Found:
    """What an attack found in one batch. A number that does not exist is absent."""

    first: Mapping[str, float] = field(default_factory=dict)
    """Of its first guess, the largest ROUGE F over the true texts, and the largest named entity recall (`nerr`)."""
    whole: Mapping[str, float] = field(default_factory=dict)
    """Means over all true texts, each with the guess that is assigned to it, `exact` among them; `found`, `precision`."""
    seconds: float = 0.0
    """Of computing, on one core."""
    reason: str = ""
    """Why there is no guess; empty if there is one."""
    guesses: tuple[str, ...] = ()


def attacked(
    snapshot: Snapshot,
    simulator: Simulator,
    attack: PluginSpec,
    defense: PluginSpec,
    budget: float,
    named: Mapping[str, Sequence[str]],
    *,
    draw: int = 0,
    aware: bool = True,
) -> Found:
    """Attack one step under one defence and score the guess.

    Args:
        snapshot: the step.
        simulator: made it.
        attack: name and options.
        defense: name and options.
        budget: seconds of computing, so that other jobs on the machine do not count.
        named: true text -> its named entities, where known.
        draw: number of the draw of noise, masks and starts. Steps with the same number have the same ones.
        aware: whether the attack knows the defence.
    """
    rng = torch.Generator().manual_seed(simulator.what.seed + DRAW * draw)
    seen = defended(snapshot, defense, rng)
    seen = seen if aware else seen.unaware()
    plugin, clock = attacks.create(attack.name, attack.options), Budget(budget, clock=time.process_time)
    try:
        seen, fits = readable(plugin, seen)
        guess = plugin(seen, rng, clock) if fits else None
    except AnatomyError as error:
        return Found(reason=str(error))
    except Exception as error:  # one attack's failure is a row of the table, not its end
        return Found(reason=type_and_place(error), seconds=clock.spent())
    if guess is None or guess.sequences is None:
        return Found(reason=fits.reason or "it guesses no sentences", seconds=clock.spent())
    return scored(
        guess, snapshot.truth.sequences(), simulator.tokenizer, seen.facts.vocabulary.wordless_ids, named, clock.spent()
    )


def defended(snapshot: Snapshot, defense: PluginSpec, rng: torch.Generator) -> Observation:
    """Return what an eavesdropper sees of a step under a defence."""
    observation: Observation = defenses.create(defense.name, defense.options)(
        ClientStep.of(snapshot), snapshot.observation, rng
    )
    return observation


def scored(
    guess: Reconstruction,
    truths: Sequence[Sequence[int]],
    tokenizer: Any,
    special: frozenset[int],
    named: Mapping[str, Sequence[str]],
    seconds: float,
) -> Found:
    """Return the numbers of a guess."""
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in truths]
    guesses = tuple(str(tokenizer.decode(each.token_ids, skip_special_tokens=True)) for each in guess.sequences or ())
    pairs = score(guess, truths, None, None, tokenizer, special, min_tokens=8).sequences
    numbers = {name: _mean(pair.numbers.get(name) for pair in pairs) for name in (*ROUGES, "exact")}
    overlaps = [pair.numbers.get("rougeL") or 0.0 for pair in pairs]
    numbers["found"] = fmean(overlap > FOUND for overlap in overlaps)
    numbers["best"] = max(overlaps)
    numbers["precision"] = sum(overlap > FOUND for overlap in overlaps) / len(guesses) if guesses else None
    numbers["nerr"] = _mean(nerr(named.get(pair.pair.true_text, ()), pair.pair.guess_text) for pair in pairs)
    return Found(nearest(guesses[0] if guesses else "", texts, named), _known(numbers), seconds, guesses=guesses)


def nearest(guess: str, texts: Sequence[str], named: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return each score's largest value over the texts, as FILM's code takes it."""
    numbers: dict[str, float | None] = {
        rouge: max((rouge_f(rouge, text, guess) or 0.0 for text in texts), default=None) for rouge in ROUGES
    }
    entities = [found for text in texts if (found := nerr(named.get(text, ()), guess)) is not None]
    return _known(numbers | {"nerr": max(entities, default=None)})


def nerr(entities: Iterable[str], guess: str) -> float | None:
    """Return the share of the named entities that a guess holds, FILM's NERR.

    >>> nerr(("New York", "Bo"), "they left new york")
    0.5
    """
    wanted = {f" {' '.join(_words(entity))} " for entity in entities if _words(entity)}
    held = f" {' '.join(_words(guess))} "
    return sum(entity in held for entity in wanted) / len(wanted) if wanted else None


def found_by_any(guesses: Sequence[str], texts: Sequence[str]) -> tuple[float, float]:
    """Return recall and precision of sentences as in FILM's Table 3.

    A text is found if any guess has a ROUGE-L above a quarter with it, and a guess is right if it finds any text.
    """
    hits = [[(rouge_f("rougeL", text, guess) or 0.0) > FOUND for text in texts] for guess in guesses]
    found = fmean(any(column) for column in zip(*hits, strict=True)) if hits else 0.0
    return found, fmean(map(any, hits)) if hits else 0.0


def tokens_of(snapshots: Iterable[Snapshot]) -> Iterator[int]:
    """Yield the number of tokens of each batch."""
    for snapshot in snapshots:
        yield sum(map(len, snapshot.truth.sequences()))


def means(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over batches that have it."""
    rows = list(found)
    return _known(
        {name: _mean(row.get(name) for row in rows) for name in dict.fromkeys(k for row in rows for k in row)}
    )


def cells(numbers: Mapping[str, float], names: Sequence[str]) -> list[str]:
    """Return table cells with two digits; a missing number is a dash.

    >>> cells({"rouge1": 0.5}, ("rouge1", "nerr"))
    ['.50', '-']
    """
    return ["-" if name not in numbers else f"{numbers[name]:.2f}".replace("0.", ".", 1) for name in names]


def line(values: Iterable[object]) -> str:
    """Return one row of a Markdown table.

    >>> line(("a", 1))
    '| a | 1 |'
    """
    return f"| {' | '.join(map(str, values))} |"


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _known(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if value is not None}
