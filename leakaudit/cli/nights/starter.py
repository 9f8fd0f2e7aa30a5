"""A first `nightly.yaml`, and an example that it can audit."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from leakaudit.config.described import described
from leakaudit.config.nightly import Nightly, SimulateSection, SnapshotsSection, TrainingSection
from leakaudit.errors import ConfigError
from leakaudit.files.private_files import create, write_all

EXAMPLE = "leakaudit-example"
"""Folder of the example's model and data, beside the configuration."""

EXAMPLE_TEXTS = 400
"""Sentences of the example. Our choice: twenty steps of two take forty, and a night draws other ones than the night before."""

_COLUMNS = 100
_SECTIONS: dict[str, type[BaseModel]] = {
    "simulate": SimulateSection,
    "snapshots": SnapshotsSection,
    "training": TrainingSection,
}
_SHOWN: dict[str, dict[str, Any]] = {
    "snapshots": {"folder": "leakaudit-audit"},
    "training": {"command": ["python", "train.py"]},
}
"""Values of the sections that a first configuration does not use."""


def write_starter(
    path: Path, model: Path | None = None, data: Path | None = None, names: Mapping[str, str] | None = None
) -> None:
    """Write the configuration; make an example of model and data if none are named.

    Args:
        path: the file.
        model: folder of the audited model.
        data: file of its texts.
        names: of the fields of the data, if they are not the default ones.

    Raises:
        ConfigError: the file exists, only one of model and data is named, or a file cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path}: exists and was not changed; name another file with --out")
    if (model is None) != (data is None):
        raise ConfigError("--model and --data belong together; give both, or neither for an example")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if model is None or data is None:
            _make_example(path.parent / EXAMPLE)
            places = {"model": f"{EXAMPLE}/model", "data": f"{EXAMPLE}/data.jsonl"}
        else:
            places = {"model": str(model.absolute()), "data": str(data.absolute())}
            places |= {
                key: name for key, name in (names or {}).items() if name != _default(SimulateSection.model_fields[key])
            }
        descriptor = create(path)
        try:
            write_all(descriptor, starter(places).encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def starter(places: dict[str, str]) -> str:
    """Return a configuration with every key, its description and its default.

    Args:
        places: values of `model`, `data` and names of fields in the section `simulate`.
    """
    lines = [
        "# Nights of leakaudit. A key behind # has its default.",
        "# Start a night with: leakaudit nightly --config THIS_FILE",
        "# Every key: leakaudit schema nightly",
        "",
        "schema: leakaudit.nightly/1",
        "",
    ]
    for name, field in described(Nightly).model_fields.items():
        if name == "schema_":
            continue
        lines += _comment(field.description or "", "")
        if section := _SECTIONS.get(name):
            used = name == "simulate"
            given = places if used else _SHOWN[name]
            lines.append(f"{'' if used else '# '}{name}:")
            lines += _keys(section, given, "  " if used else "#   ")
        else:
            lines.append(f"# {name}: {_value(_default(field))}")
        lines.append("")
    return "\n".join(lines)


def _keys(section: type[BaseModel], given: dict[str, Any], indent: str) -> Iterator[str]:
    for name, field in described(section).model_fields.items():
        yield from _comment(field.description or "", indent)
        if name in given:
            yield f"{indent}{name}: {_value(given[name])}"
        else:
            yield f"{indent}# {name}: {_value(_default(field))}"


def _comment(text: str, indent: str) -> list[str]:
    mark = f"{indent}# "
    return textwrap.wrap(
        " ".join(text.split()), _COLUMNS, initial_indent=mark, subsequent_indent=mark, break_long_words=False
    )


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        return [getattr(item, "label", item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _value(value: Any) -> str:
    """Return a value as YAML of one line; JSON is YAML."""
    plain = (
        isinstance(value, str) and value.replace("-", "").replace("_", "").replace("/", "").replace(".", "").isalnum()
    )
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def _make_example(folder: Path) -> None:
    """Make a tiny encoder with random weights and a file of labelled sentences.

    An example that is already there stays.

    Raises:
        ConfigError: the folder exists and is no example.
        OSError: a file cannot be written.
    """
    from transformers.utils import logging

    from leakaudit.models.tiny_encoder import tiny_encoder

    if (folder / "model").is_dir() and (folder / "data.jsonl").is_file():
        return
    if folder.exists():
        raise ConfigError(f"{folder}: is no example and was not changed; remove it, or name --model and --data")
    texts = _sentences()
    model, tokenizer = tiny_encoder(texts)
    folder.mkdir(parents=True)
    logging.disable_progress_bar()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [json.dumps({"text": text, "label": index % 2}) for index, text in enumerate(texts)]
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def _sentences() -> tuple[str, ...]:
    """Return sentences that ship with the built-in prior."""
    from importlib.resources import files

    lines = files("leakaudit.priors").joinpath("default.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if len(line.split()) >= 9)[:EXAMPLE_TEXTS]
