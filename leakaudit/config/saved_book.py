"""The file by which an audit knows the invented records of a training again.

It holds the template, a keyed hash of each secret and the key. With it anybody can test a guess, so only its owner may read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leakaudit.config.secret_book import SecretBook
from leakaudit.config.secret_template import MOST_DIGITS, Digits, OneOf, SecretTemplate
from leakaudit.errors import ConfigError
from leakaudit.files.private_files import write_atomic
from leakaudit.files.regular_files import read_regular

SCHEMA = "leakaudit.canaries/1"

LARGEST = 900_000
"""Most bytes of the file. Our choice: it is a part of `audit.json`, which is read up to a mebibyte."""


class SavedDigits(BaseModel):
    """A field of digits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digits: Annotated[int, Field(ge=1, le=MOST_DIGITS)]


class SavedList(BaseModel):
    """A field with a list of values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    one_of: tuple[str, ...]


class SavedBook(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: str = Field(default=SCHEMA, alias="schema")
    parts: tuple[str | SavedDigits | SavedList, ...]
    """The template: literal texts and fields."""
    marks: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")], ...]
    """Keyed hash of each secret."""
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Key of the hashes, in hex."""
    total: Annotated[int, Field(ge=1)] | None = None
    """Rows of these data; None if unknown."""
    rows: tuple[int, ...] = ()
    """Places of the records in the data that the training got, counted from 0."""

    @classmethod
    def of(cls, book: SecretBook, rows: tuple[int, ...]) -> SavedBook:
        """Return what is written of a book."""
        parts = (
            part
            if isinstance(part, str)
            else SavedDigits(digits=part.count)
            if isinstance(part, Digits)
            else SavedList(one_of=part.listed)
            for part in book.template.parts
        )
        return cls(parts=tuple(parts), marks=tuple(sorted(book.marks)), key=book.key.hex(), total=book.total, rows=rows)

    def book(self) -> SecretBook:
        """Return the book."""
        parts = (
            part
            if isinstance(part, str)
            else Digits(part.digits)
            if isinstance(part, SavedDigits)
            else OneOf(part.one_of)
            for part in self.parts
        )
        return SecretBook(SecretTemplate(tuple(parts)), frozenset(self.marks), bytes.fromhex(self.key), self.total)

    def write(self, path: Path) -> None:
        """Write the file, which only its owner can read (mode 0600).

        Raises:
            ConfigError: it would be too large, or cannot be written.
        """
        content = self.model_dump_json(by_alias=True)
        if len(content.encode()) > LARGEST:
            raise ConfigError(
                f"{len(self.marks):,} records and the values of their fields do not fit into {LARGEST:,} bytes: lower `rate`, or list fewer values"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be written ({error.strerror}); set `out_dir` to a folder that can"
            ) from None

    @classmethod
    def read(cls, path: Path) -> SavedBook:
        """Read the file.

        Raises:
            ConfigError: it is missing or damaged.
        """
        try:
            return cls.model_validate_json(read_regular(path))
        except FileNotFoundError:
            raise ConfigError(
                f"{path}: no such file, and `canaries` asks for records in the training data: put them there with `leakaudit.with_canaries(dataset, config)` "
                "before training"
            ) from None
        except (OSError, ValidationError) as error:
            raise ConfigError(
                f"{path}: cannot be read ({type(error).__name__}); call `leakaudit.with_canaries` again"
            ) from None
