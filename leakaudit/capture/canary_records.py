"""Puts the invented records of a configuration into the data of a training.

No torch: it works on texts before they become tokens.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from leakaudit.config.audit import RUN_NAME, AuditConfig, for_tonight, load_config
from leakaudit.config.canaries import CanariesConfig, keys_file
from leakaudit.config.saved_book import SavedBook
from leakaudit.config.secret_book import SecretBook, check_tokenizer
from leakaudit.config.secret_template import Record
from leakaudit.errors import ConfigError, DataError

Data = TypeVar("Data")


def with_canaries(
    dataset: Data,
    config: Path | str | AuditConfig,
    *,
    text_field: str = "text",
    label_field: str = "label",
    tokenizer: Any = None,
    rng: random.Random | None = None,
) -> Data:
    """Return training data with the invented records of the configuration.

    Call it once, on texts, before they are tokenised, in the process that trains. It writes a private file beside `out_dir`, by which the audit of
    that training knows the records again; a second call replaces it. Every other row stays as it is and in its order.

    Args:
        dataset: a list of dictionaries, or a `datasets.Dataset`, of N rows.
        config: the audit's configuration, with the key `canaries`. Files in its template count from the folder of the YAML file.
        text_field: field of a row that holds the text.
        label_field: field of a row that holds the class, if `canaries` names one.
        tokenizer: of the training, to check that it tells all secrets apart; None to leave that to the audit.
        rng: source of the secrets and of the places; None for the system's, which nobody can repeat.

    Returns:
        The same type, with at least one record more. Fields that a record does not have are None.

    Raises:
        ConfigError: the configuration has no `canaries`, something in it is wrong, or several processes train: each would draw other records.
        DataError: the data is neither of the two, is empty, or has no such field.
    """
    folder = Path() if isinstance(config, AuditConfig) else Path(config).parent
    audit = for_tonight(load_config(config))
    asked = _asked(audit)
    template = asked.parsed(folder)
    if tokenizer is not None:
        check_tokenizer(template, lambda text: _through(tokenizer, text))
    rows = _rows_of(dataset, text_field)
    draw = rng or random.SystemRandom()
    records = [template.draw(draw) for _ in range(max(1, round(len(rows) * asked.rate / (1 - asked.rate))))]
    places = tuple(sorted(draw.sample(range(len(rows) + len(records)), len(records))))
    book = SecretBook.of(template, [record.secret for record in records], secrets.token_bytes(32))
    made = [_as_row(record, asked, (text_field, label_field)) for record in records]
    mixed: Any = _mixed_list(rows, made, places) if isinstance(dataset, list) else _mixed(dataset, made, places)
    SavedBook.of(replace(book, total=len(rows) + len(records)), places).write(keys_file(audit.out_dir))
    found: Data = mixed
    return found


def _asked(config: AuditConfig) -> CanariesConfig:
    """Return what the configuration asks for.

    Raises:
        ConfigError: it asks for no records, or the audit could not find its file.
    """
    if config.canaries is None:
        raise ConfigError("the configuration has no `canaries`, so there are no records to put into the data")
    if RUN_NAME in str(config.out_dir):
        raise ConfigError(
            f"`out_dir: {config.out_dir}` has no name before training begins, and `canaries` needs one: write a folder without {RUN_NAME}"
        )
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            f"{os.environ['WORLD_SIZE']} processes train, and each would draw other records: make the data once in one process, save it, and load it "
            "in the training"
        )
    return config.canaries


def _through(tokenizer: Any, text: str) -> str:
    return str(tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True))


def _rows_of(dataset: Any, text_field: str) -> Sequence[Any]:
    """Return the data as a sequence of rows.

    Raises:
        DataError: it is neither a list of dictionaries nor a `datasets.Dataset`, is empty, or has no such field.
    """
    is_list = isinstance(dataset, list) and all(isinstance(row, dict) for row in dataset)
    if not is_list and not hasattr(dataset, "column_names"):
        raise DataError(
            f"with_canaries takes a list of dictionaries or a datasets.Dataset of texts, found {type(dataset).__name__}; call it before the texts become "
            "tokens"
        )
    if not len(dataset):
        raise DataError("with_canaries got data without rows")
    names = set(dataset[0]) if is_list else set(dataset.column_names)
    if text_field not in names:
        raise DataError(
            f"with_canaries looked for the field {text_field!r} in the data, found {', '.join(map(repr, sorted(map(str, names))))}; name it with text_field="
        )
    rows: Sequence[Any] = dataset
    return rows


def _as_row(record: Record, asked: CanariesConfig, fields: tuple[str, str]) -> dict[str, Any]:
    """Return a record as a row with a text and, if it has one, a class."""
    row: dict[str, Any] = {fields[0]: record.text}
    return row if asked.label is None else row | {fields[1]: asked.label}


def _mixed_list(rows: Sequence[Any], made: list[dict[str, Any]], places: tuple[int, ...]) -> list[Any]:
    """Return a list with the records at their places."""
    fields = dict.fromkeys(rows[0])
    mixed = list(rows)
    for place, row in zip(places, made, strict=True):  # in rising order, so each place is the final one
        mixed.insert(place, fields | row)
    return mixed


def _mixed(dataset: Any, made: list[dict[str, Any]], places: tuple[int, ...]) -> Any:
    """Return a `datasets.Dataset` with the records at their places."""
    library = sys.modules[type(dataset).__module__.partition(".")[0]]  # `datasets`, which the caller has imported
    fields = dict.fromkeys(dataset.column_names)
    records = type(dataset).from_list([fields | row for row in made], features=dataset.features)
    order = _mixed_list(
        [{"at": n} for n in range(len(dataset))], [{"at": len(dataset) + n} for n in range(len(made))], places
    )
    return library.concatenate_datasets([dataset, records]).select([row["at"] for row in order])
