"""Which parameters told the attacks what leaked: data, words, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from leakaudit.gate.wording import percent
from leakaudit.reports.cells import OBSERVED
from leakaudit.reports.charts import LEAK, QUARTERS
from leakaudit.reports.escaping import plain
from leakaudit.reports.svg import (
    AXIS_ROOM,
    HAIRLINE,
    LETTER,
    MUTED,
    Margins,
    Tick,
    block,
    hairline,
    lower_axis,
    middle_text,
    picture,
    text,
)
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted

MOST_PARAMETERS = 5
"""Most parameters of an attack that are drawn; the others are one row. Our choice: the picture stays small."""

_MOST_LETTERS = 48
"""Most letters of a parameter's name that fit above its bar."""


@dataclass(frozen=True)
class ToldBy:
    """What told one attack the leaks that it found."""

    attack: str
    leaks: int
    """Attempts with a leak that say what told it."""
    shares: tuple[tuple[str, float], ...]
    """(Parameter, mean share over these attempts); the largest share comes first."""

    @property
    def drawn(self) -> tuple[tuple[str, float], ...]:
        """The rows of the picture: the largest shares, and the others together."""
        if len(self.shares) <= MOST_PARAMETERS + 1:
            return self.shares
        rest = self.shares[MOST_PARAMETERS:]
        others = (f"{len(rest)} other parameters", sum(share for _, share in rest))
        return (*self.shares[:MOST_PARAMETERS], others)


def told_by(results: Results) -> tuple[list[ToldBy], list[str]]:
    """Return what told each attack its leaks.

    The second value names the attacks that leaked and do not say it.

    Only leaks of the update as it was sent are counted.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for attempt in results.attempts:
        if attempt.defense == OBSERVED and attempt.leaked:
            found.setdefault(attempt.attack, []).append(attempt.told_by)
    told, silent = [], []
    for attack, every in found.items():
        known = [one for one in every if one]
        if not known:
            silent.append(attack)
            continue
        names = dict.fromkeys(name for one in known for name in one)
        means = [(name, sum(one.get(name, 0.0) for one in known) / len(known)) for name in names]
        told.append(ToldBy(attack, len(known), tuple(sorted(means, key=lambda pair: (-pair[1], pair[0])))))
    return told, silent


def in_words(told: Sequence[ToldBy], silent: Sequence[str]) -> str:
    """Return the answer of the picture in sentences.

    >>> in_words([ToldBy("span", 2, (("a.weight", 0.75), ("b.weight", 0.25)))], ["tag"])
    'span read 2 leaks from 2 parameters, most from a.weight (75%). tag does not say which parameters told it.'
    """
    said = []
    for one in told:
        name, share = one.shares[0]
        if len(one.shares) == 1:
            said.append(f"{one.attack} read {counted(one.leaks, 'leak')} from {name} alone.")
        else:
            most = f"most from {name} ({percent(share)})"
            said.append(
                f"{one.attack} read {counted(one.leaks, 'leak')} from {counted(len(one.shares), 'parameter')}, {most}."
            )
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        whom = "it" if len(silent) == 1 else "them"
        said.append(f"{', '.join(silent)} {verb} not say which parameters told {whom}.")
    return " ".join(said)


def told_by_chart(told: Sequence[ToldBy], title: str) -> Markup:
    """Draw the share that each parameter told, as bars below the parameter's name.

    Args:
        told: one attack or more.
        title: what the picture says, in a sentence.
    """
    width, row, head = 300, 40, 26
    drawn: list[str] = []
    y = 0.0
    for one in told:
        drawn.append(middle_text(f"{plain(one.attack)}, {counted(one.leaks, 'leak')}", (0, y + head / 2)))
        y += head
        for name, share in one.drawn:
            drawn.append(text(_end_of(plain(name)), (0, y + 14), "start", MUTED))
            drawn.append(block(0, y + 20, width, 12, HAIRLINE, 0.5))
            drawn.append(block(0, y + 20, max(1.0, width * min(1.0, share)), 12, LEAK))
            drawn.append(middle_text(percent(share), (width + 8, y + 26)))
            y += row
    drawn += [hairline((width * at, y), (width * at, y + 4), MUTED) for at in QUARTERS]
    drawn.append(lower_axis([Tick(width * at, f"{at:.0%}") for at in QUARTERS], width, y, "share that was told"))
    return picture(drawn, (width, y), Margins(LETTER * 2, 6, LETTER * 7, 2 * AXIS_ROOM + 4), title)


def _end_of(name: str) -> str:
    """Return a name without its beginning where it does not fit.

    The end tells one layer from another.
    """
    return name if len(name) <= _MOST_LETTERS else "…" + name[1 - _MOST_LETTERS :]
