"""`leakaudit attacks`, `defenses` and `schema`, which list and describe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Any

import click

from leakaudit.cli.common import clear_errors

_DESCRIBED = ("attacks", "defenses")
"""Kinds with a command that describes one plugin."""


def catalogue(kind: str, fields: tuple[str, ...], as_json: bool, name: str | None = None) -> None:
    """Print the plugins of one kind, or one of them with all that it says of itself."""
    from leakaudit import registry

    found = getattr(registry, kind)
    if name is not None:
        _show_one(kind, _row(kind, fields, found.current(name, {})[0], found[name]), as_json)
        return
    rows = [_row(kind, fields, each, plugin) for each, plugin in found]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        click.echo(_title(row))
        for key in ("what", *fields):
            _wrapped(key.replace("_", " "), str(row[key]))
        _wrapped("options", ", ".join(map(_short, row["knobs"])) or "none")
        click.echo()
    if kind in _DESCRIBED:
        click.echo(f"leakaudit {kind} NAME: what each option does, and an example")


def _short(knob: Mapping[str, str]) -> str:
    return knob["name"] if knob["default"] in ("", "None") else f"{knob['name']}={knob['default']}"


def _row(kind: str, fields: tuple[str, ...], name: str, plugin: Any) -> dict[str, Any]:
    """Return what one plugin says of itself."""
    import inspect

    from leakaudit.plugins.knobs import example_of, knobs_of

    knobs = knobs_of(plugin)
    first_line = (inspect.getdoc(plugin) or "").splitlines()[0]
    row = {"name": name, "what": first_line, **{field: getattr(plugin, field) for field in fields}}
    row["options"] = {knob.name: knob.default for knob in knobs if knob.default}
    row["knobs"] = [vars(knob) for knob in knobs]
    row["example"] = example_of(name, knobs)
    if kind == "attacks":
        row |= {"battery": _battery(name), "reads": plugin.reads, "needs": plugin.needs, "search": plugin.slow}
    return row


def _battery(name: str) -> list[str]:
    """Return for which data an attack is in the default battery.

    `texts`, `arrays`, both or none.
    """
    from leakaudit.config.audit import DEFAULT_ATTACKS, LABEL_ATTACKS

    batteries = {"texts": DEFAULT_ATTACKS, "arrays": LABEL_ATTACKS}
    return [data for data, specs in batteries.items() if name in [spec.name for spec in specs]]


def _title(row: Mapping[str, Any]) -> str:
    """Return the name with its marks.

    Whether it runs by default, and whether it is a search.
    """
    marks = [f"in the default battery for {' and '.join(row['battery'])}"] if row.get("battery") else []
    marks += ["a search: it may use its whole --budget"] if row.get("search") else []
    return click.style(str(row["name"]), bold=True) + (f"  ({'; '.join(marks)})" if marks else "")


def _wrapped(key: str, text: str) -> None:
    width = shutil.get_terminal_size((100, 24)).columns
    click.echo(click.wrap_text(f"{key}: {text}", width, initial_indent="  ", subsequent_indent="    "))


def _show_one(kind: str, row: Mapping[str, Any], as_json: bool) -> None:
    """Print one plugin: each option with its default and its sentence, and an example."""
    if as_json:
        click.echo(json.dumps(row, indent=1))
        return
    click.echo(_title(row))
    told = {
        "goal": "recovers",
        "threat_model": "adversary",
        "reads": "reads, if weights before and after are sent",
        "needs": "needs of the update",
    }
    for key in ("what", "goal", "threat_model", "reads", "needs", "protects", "cost", "source"):
        if key in row:
            _wrapped(told.get(key, key), str(row[key]))
    click.echo("  options:" + ("" if row["knobs"] else " none"))
    for knob in row["knobs"]:
        default = _default(knob)
        click.echo(f"    {knob['name']} ({knob['kind']}; {default})")
        if knob["sentence"]:
            width = shutil.get_terminal_size((100, 24)).columns
            click.echo(click.wrap_text(knob["sentence"], width, initial_indent="      ", subsequent_indent="      "))
    battery = row["example"] if kind == "attacks" or row["name"] == "none" else f"none,{row['example']}"
    click.echo(f'  example: leakaudit simulate --model PATH --data texts.jsonl --{kind} "{battery}"')


def _default(knob: Mapping[str, str]) -> str:
    """Return a default in words."""
    if knob["default"] != "None":
        return f"default: {knob['default']}" if knob["default"] else "must be given"
    return f"default: that of the preset, {knob['of_preset']}" if knob["of_preset"] else "not set by default"


@click.command("attacks", short_help="List the attacks, or describe one.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@clear_errors
def attacks_command(name: str | None, as_json: bool) -> None:
    """List the attacks: what each recovers, who could run it, where it comes from.

    With NAME, one attack: what it reads and needs, and every option with its default and its meaning.
    """
    catalogue("attacks", ("goal", "threat_model", "source"), as_json, name)


@click.command("defenses", short_help="List the defences, or describe one.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@clear_errors
def defenses_command(name: str | None, as_json: bool) -> None:
    """List the defences: what each protects, what it costs, where it comes from.

    With NAME, one defence: every option with its default and its meaning.
    """
    catalogue("defenses", ("protects", "cost", "source"), as_json, name)


@click.command(short_help="Print the JSON Schema of a file.")
@click.argument(
    "what", type=click.Choice(["results", "policy", "waivers", "config", "verdict", "subject", "nightly", "night"])
)
@clear_errors
def schema(what: str) -> None:
    """Print the JSON Schema of a file.

    The files are results.json, a policy, a file of waivers, an audit's configuration, verdict.json, subject.json, the configuration of the nights and the record of one.
    """
    from pydantic import BaseModel

    from leakaudit.config.audit import AuditConfig
    from leakaudit.config.described import described
    from leakaudit.config.nightly import Nightly
    from leakaudit.gate.policy import Policy
    from leakaudit.gate.verdict import Verdict
    from leakaudit.gate.waivers import Waivers
    from leakaudit.history.record import NightRecord
    from leakaudit.results.binding import Binding
    from leakaudit.results.schema import Results

    models: dict[str, type[BaseModel]] = {
        "results": Results,
        "policy": Policy,
        "config": AuditConfig,
        "verdict": Verdict,
        "waivers": Waivers,
        "subject": Binding,
        "nightly": Nightly,
        "night": NightRecord,
    }
    click.echo(json.dumps(described(models[what]).model_json_schema(by_alias=True), indent=1))
