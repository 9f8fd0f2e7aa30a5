"""What `leakaudit explain` prints on one thing: a title and a few short texts."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

COLUMNS = 80
"""Most columns of a line, as of a narrow terminal."""


@dataclass(frozen=True)
class Explanation:
    """Four texts on a thing, each one or two sentences.

    Tables of them stand beside the enum or the table of what they explain, because the docstring of an enum's member is lost at run time.
    """

    what: str
    """What it is."""
    tells: str
    """What one learns from it."""
    tells_not: str
    """What one might take it for, and must not."""
    do: str
    """What to do."""

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The texts with their headings, in the order of reading."""
        return (
            ("What it is", self.what),
            ("It tells", self.tells),
            ("It does not tell", self.tells_not),
            ("What to do", self.do),
        )


@dataclass(frozen=True)
class Topic:
    """A thing that can be explained."""

    kind: str
    """Its kind, such as `attack` or `exit code`."""
    name: str
    title: str
    """The first line: name and kind."""
    parts: tuple[tuple[str, str], ...]
    """Heading and text of each part."""

    @property
    def lines(self) -> list[str]:
        """The printed lines, of `COLUMNS` columns at most unless a single word is longer."""
        shown = wrap(self.title, COLUMNS, break_long_words=False, break_on_hyphens=False)
        for heading, text in self.parts:
            shown += wrap(
                f"{heading}: {text}",
                COLUMNS,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        return shown
