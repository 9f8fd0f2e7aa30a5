"""Every knob and every key has a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import click
import pytest
from pydantic import BaseModel

from leakaudit import registry
from leakaudit.cli import main
from leakaudit.config.audit import AuditConfig
from leakaudit.config.described import described, field_texts
from leakaudit.config.nightly import Nightly, SimulateSection, SnapshotsSection, TrainingSection
from leakaudit.gate.policy import Policy
from leakaudit.gate.waivers import Waivers
from leakaudit.plugins.knobs import example_of, knobs_of

PLUGINS = [
    pytest.param(plugin, id=f"{kind}-{name}")
    for kind in ("attacks", "defenses", "metrics", "priors")
    for name, plugin in getattr(registry, kind)
    if plugin.__module__.startswith("leakaudit.")
]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_every_knob_that_is_shipped_has_a_sentence_and_a_default(plugin: type) -> None:
    """A number without a meaning cannot be chosen."""
    knobs = knobs_of(plugin)
    assert [knob.name for knob in knobs] == [field.name for field in fields(plugin) if field.init]
    assert [knob.name for knob in knobs if not knob.sentence.endswith((".", ")")) or not knob.kind] == []
    assert [knob.name for knob in knobs if knob.default == "None" and "None" not in knob.kind] == []


@pytest.mark.parametrize("kind", ["attacks", "defenses"])
def test_every_example_makes_the_plugin(kind: str) -> None:
    """What is printed can be copied."""
    from leakaudit.cli.battery import specs_of

    found = getattr(registry, kind)
    for name, plugin in found:
        [spec] = specs_of(example_of(name, knobs_of(plugin)))
        assert found.create(spec.name, spec.options) == plugin()


@dataclass
class _Base:
    first: int = 1
    """Of the base
    class."""
    second: int = 2
    """Old."""


@dataclass
class _Plugin(_Base):
    second: int = 3
    """New."""
    third: float | None = None


def test_texts_below_fields_are_inherited_and_may_be_missing() -> None:
    """A plugin of another package needs none."""
    assert field_texts(_Plugin) == {"first": "Of the base class.", "second": "New."}
    assert [(knob.default, knob.kind, knob.sentence) for knob in knobs_of(_Plugin)][1:] == [
        ("3", "int", "New."),
        ("None", "float | None", ""),
    ]
    made: Any = dataclass(type("Made", (), {"__annotations__": {"size": int}, "size": 1}))
    assert [knob.sentence for knob in knobs_of(made)] == [""]


MODELS = (AuditConfig, Nightly, SimulateSection, SnapshotsSection, TrainingSection, Policy, Waivers)


@pytest.mark.parametrize("model", MODELS)
def test_every_key_of_a_configuration_has_a_sentence(model: type[BaseModel]) -> None:
    """`leakaudit schema` prints it."""
    assert [name for name, field in described(model).model_fields.items() if not field.description] == []


def _options(command: click.Command, path: str) -> Iterator[tuple[str, click.Option]]:
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield f"{path} {parameter.opts[0]}", parameter
    for name, inner in getattr(command, "commands", {}).items():
        yield from _options(inner, f"{path} {name}")


def test_every_option_of_a_command_has_a_help_text() -> None:
    """Also `--json`."""
    found = list(_options(main, "leakaudit"))
    assert len(found) > 100
    assert [where for where, option in found if not option.help] == []
