"""Texts with a secret: `Patient number {digits:6}` has a million values.

A template has fields in braces. `{digits:N}` is N decimal digits. `{one_of:FILE}` is one line of a text file. A field of another name is one of the
values that the configuration gives under that name. The secret of a record is what stands in its fields, drawn uniformly.

No torch.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from leakaudit.errors import ConfigError
from leakaudit.files.regular_files import read_regular

MOST_DIGITS = 18
"""Most digits of one field. Our choice: their number of values fits into 64 bits."""

MOST_LISTED = 10_000
"""Most values of a field that lists them. Our choice: each guess of an attack is searched for all of them."""

_FIELD = re.compile(r"\{([^{}]*)\}")

Value = tuple[str, ...]
"""What stands in the fields of a record, in their order, as `plain` writes it."""


def plain(text: str) -> str:
    """Return a text as it survives most tokenizers.

    Without case, accents and white space, which a tokenizer may drop or add.

    >>> plain("Zoë  O'Brien")
    "zoeo'brien"
    """
    folded = unicodedata.normalize("NFKD", text).casefold()
    return "".join(one for one in folded if not unicodedata.combining(one) and not one.isspace())


@dataclass(frozen=True)
class Digits:
    """A field of decimal digits."""

    count: int

    @property
    def values(self) -> int:
        """Number of values."""
        return int(10**self.count)

    def drawn(self, rng: random.Random) -> str:
        """Return one value, drawn uniformly."""
        return f"{rng.randrange(self.values):0{self.count}d}"

    @property
    def pattern(self) -> str:
        """Regular expression of its values."""
        return f"[0-9]{{{self.count}}}"

    @property
    def alone(self) -> str:
        """Regular expression of a value with no further digit beside it."""
        return f"(?<![0-9]){self.pattern}(?![0-9])"


@dataclass(frozen=True)
class OneOf:
    """A field with a list of values."""

    listed: tuple[str, ...]

    @property
    def values(self) -> int:
        """Number of values."""
        return len(self.listed)

    def drawn(self, rng: random.Random) -> str:
        """Return one value, drawn uniformly."""
        return self.listed[rng.randrange(self.values)]

    @property
    def pattern(self) -> str:
        """Regular expression of its values in plain form, the longest first."""
        return "|".join(map(re.escape, sorted({plain(value) for value in self.listed}, key=len, reverse=True)))

    @property
    def alone(self) -> str:
        """The same: a value may stand inside a word of a plain text."""
        return self.pattern


Field = Digits | OneOf


@dataclass(frozen=True)
class Record:
    """A synthetic record."""

    text: str
    secret: Value


@dataclass(frozen=True)
class SecretTemplate:
    """A text with fields, and what is drawn for them."""

    parts: tuple[str | Field, ...]

    @classmethod
    def parse(
        cls, text: str, named: Mapping[str, Sequence[str]] | None = None, folder: Path | None = None
    ) -> SecretTemplate:
        """Read a template.

        Args:
            text: the template.
            named: values of fields by their names.
            folder: from which a file of `{one_of:FILE}` counts; None for the working folder.

        Raises:
            ConfigError: it has no field, a field is unknown, or two values could not be told apart. The message quotes no values.
        """
        parts: list[str | Field] = []
        begin = 0
        for found in _FIELD.finditer(text):
            if literal := text[begin : found.start()]:
                parts.append(literal)
            parts.append(_field(found[1].strip(), named or {}, folder or Path()))
            begin = found.end()
        if rest := text[begin:]:
            parts.append(rest)
        template = cls(tuple(parts))
        if not template.fields:
            raise ConfigError(f"a template of secrets needs a field {FORMS}; found none")
        if template.values < 2:
            raise ConfigError(
                "the template of secrets has a single value, which everybody knows; give a field more values"
            )
        if any(brace in str(part) for part in parts if isinstance(part, str) for brace in "{}"):
            raise ConfigError("the template of secrets has a brace that opens or closes no field")
        template._check_ends()
        return template

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields in order."""
        return tuple(part for part in self.parts if not isinstance(part, str))

    @property
    def values(self) -> int:
        """M: number of values of the secret."""
        return prod(field.values for field in self.fields)

    def draw(self, rng: random.Random) -> Record:
        """Return a record with a secret drawn uniformly."""
        return self._filled(field.drawn(rng) for field in self.fields)

    def corners(self) -> Iterator[Record]:
        """Yield records that hold every listed value and every digit at every place.

        A tokenizer that keeps the secret of each of them tells all values apart.
        """
        first = [field.listed[0] if isinstance(field, OneOf) else "0" * field.count for field in self.fields]
        for place, field in enumerate(self.fields):
            values = field.listed if isinstance(field, OneOf) else [digit * field.count for digit in "0123456789"]
            for value in values:
                yield self._filled(iter([*first[:place], value, *first[place + 1 :]]))

    def secret_in(self, text: str) -> Value | None:
        """Return the secret of a record that stands in a text as a whole.

        None if there is none. Case, accents and white space do not count.
        """
        found = self._whole.search(plain(text))
        return None if found is None else found.groups()

    def guess_in(self, text: str) -> Value | None:
        """Return the one value that a guessed text names; None if it names none.

        The rule is fixed by the template alone: the secret of the first whole record in the text, else for each field in order the first
        place after the field before it that has the field's form. A text therefore never names two values.
        """
        if (whole := self.secret_in(text)) is not None:
            return whole
        searched, begin, value = plain(text), 0, []
        for pattern in self._alone:
            found = pattern.search(searched, begin)
            if found is None:
                return None
            value.append(found[0])
            begin = found.end()
        return tuple(value)

    @cached_property
    def _whole(self) -> re.Pattern[str]:
        return re.compile(
            "".join(re.escape(plain(part)) if isinstance(part, str) else f"({part.pattern})" for part in self.parts)
        )

    @cached_property
    def _alone(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(field.alone) for field in self.fields)

    def _filled(self, drawn: Iterator[str]) -> Record:
        shown = [part if isinstance(part, str) else next(drawn) for part in self.parts]
        secret = tuple(plain(one) for one, part in zip(shown, self.parts, strict=True) if not isinstance(part, str))
        return Record("".join(shown), secret)

    def _check_ends(self) -> None:
        """Refuse fields of lists after which two values could give the same text.

        One such field is safe, because the other fields have fixed lengths.
        """
        lists = [place for place, part in enumerate(self.parts) if isinstance(part, OneOf)]
        for place in lists[:-1]:
            field, after = self.parts[place], self.parts[place + 1]
            end = plain(after)[:1] if isinstance(after, str) else ""
            if isinstance(field, OneOf) and (not end or any(end in plain(value) for value in field.listed)):
                raise ConfigError(
                    "the template of secrets has two lists, and the sign after the first one is missing or occurs in its values, so that two "
                    "secrets could give one text; write a sign between them that no value has, such as a comma"
                )


FORMS = "such as {digits:6} or {one_of:names.txt}"


def _field(said: str, named: Mapping[str, Sequence[str]], folder: Path) -> Field:
    """Return the field of a template.

    Raises:
        ConfigError: it is unknown, or its values are.
    """
    kind, _, rest = said.partition(":")
    if kind == "digits":
        if not re.fullmatch(r"[0-9]{1,2}", rest) or not 1 <= int(rest) <= MOST_DIGITS:
            raise ConfigError(f"{{digits:N}} takes a number from 1 to {MOST_DIGITS}, as in {{digits:6}}")
        return Digits(int(rest))
    if kind == "one_of" and rest:
        return _listed(_lines(folder / rest), f"{{one_of:...}} reads {folder / rest}, which")
    if said in named:
        return _listed(named[said], f"the field {{{said}}}")
    known = f", or a name under `values` ({', '.join(sorted(named))})" if named else ""
    raise ConfigError(f"the template of secrets has an unknown field; write one {FORMS}{known}")


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in read_regular(path).decode("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the values of a secret cannot be read ({type(error).__name__})") from None


def _listed(values: Sequence[str], what: str) -> OneOf:
    """Return a field with a list of values.

    Raises:
        ConfigError: there are too many of them, or two are the same but for case, accents and white space.
    """
    if not 1 <= len(values) <= MOST_LISTED:
        raise ConfigError(f"{what} has {len(values)} values; give 1 to {MOST_LISTED:,}")
    if len({plain(value) for value in values} - {""}) < len(values):
        raise ConfigError(
            f"{what} has a value that is empty or the same as another one but for case, accents and white space: then guessing is easier than "
            "the bound assumes; remove it"
        )
    return OneOf(tuple(values))
