"""Every key and every option has a sentence and a default."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner

from leakaudit import registry
from leakaudit.cli import main
from leakaudit.cli.catalogue import schema
from leakaudit.plugins.knobs import knobs_of

FILES = next(list(p.type.choices) for p in schema.params if isinstance(p.type, click.Choice))
LONG = ("simulate", "frontier", "run", "worker", "doctor", "preflight")
"""Commands whose options are keys of a configuration."""


def keys_of(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield each key of a schema: place, description, whether it is required."""
    models = {document["title"]: document, **document.get("$defs", {})}
    for name, model in models.items():
        for key, told in model.get("properties", {}).items():
            kind = models[told["$ref"].rpartition("/")[2]] if "$ref" in told else {}
            yield f"{name}.{key}", {**kind, **told}, key in model.get("required", ())


@pytest.mark.parametrize("what", FILES)
def test_every_key_of_a_file_has_a_sentence_and_a_default(what: str) -> None:
    """Unless it must be given.

    Where a key holds a part of the file, the sentence of that part counts.
    """
    document = json.loads(CliRunner().invoke(main, ["schema", what]).stdout)
    keys = list(keys_of(document))
    assert len(keys) > 3
    assert [place for place, told, _ in keys if not told.get("description", "").endswith((".", "`"))] == []
    assert [place for place, told, must in keys if not must and "default" not in told] == []


@pytest.mark.parametrize("kind", ["attacks", "defenses", "metrics", "priors"])
def test_every_option_of_a_plugin_has_a_sentence(kind: str) -> None:
    """`leakaudit attacks NAME` prints it, with the default."""
    plugins: list[tuple[str, Any]] = [
        (name, one)
        for name, one in getattr(registry, kind)
        if dataclasses.is_dataclass(one)
        and one.__module__.startswith("leakaudit.")  # tests register plugins of their own
    ]
    assert plugins
    assert [f"{name}.{knob.name}" for name, plugin in plugins for knob in knobs_of(plugin) if not knob.sentence] == []


def options_of(command: click.Command, path: str) -> Iterator[tuple[str, click.Option]]:
    """Yield the options of a command and of those below it."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from options_of(inner, f"{path} {name}".strip())
    for one in command.params:
        if isinstance(one, click.Option) and not one.hidden:
            yield path, one


def every_option() -> list[tuple[str, click.Option]]:
    """Return the options of all commands, which are imported here."""
    context = click.Context(main, info_name="leakaudit")
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    return [pair for name, one in commands.items() if one is not None for pair in options_of(one, name)]


def test_every_option_of_a_command_has_a_sentence() -> None:
    """In `--help`."""
    found = every_option()
    assert len(found) > 100
    assert [f"{path} {one.opts[-1]}" for path, one in found if not (one.help or "").rstrip().endswith((".", ")"))] == []


@pytest.mark.parametrize("command", LONG)
def test_every_option_that_is_a_key_says_its_default(command: str) -> None:
    """Unless it must be given, is a switch, or may be given several times."""
    own = [one for path, one in every_option() if path == command]
    silent = [
        one.opts[-1]
        for one in own
        if not (
            one.required or one.is_flag or one.multiple or one.show_default or "default" in (one.help or "").lower()
        )
    ]
    assert own and silent == []
