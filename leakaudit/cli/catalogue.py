"""`leakaudit attacks`, `defenses` and `schema`, which list and describe."""

from __future__ import annotations

import json
import shutil
from typing import Any

import click

from leakaudit.cli.common import clear_errors


def catalogue(kind: str, fields: tuple[str, ...], as_json: bool) -> None:
    """Print the plugins of one kind with some of their metadata."""
    import dataclasses
    import inspect

    from leakaudit import registry

    rows = []
    for name, plugin in getattr(registry, kind):
        knobs = {f.name: str(f.default) for f in dataclasses.fields(plugin) if f.default is not dataclasses.MISSING}
        first_line = (inspect.getdoc(plugin) or "").splitlines()[0]
        rows.append({"name": name, "what": first_line, **{f: getattr(plugin, f) for f in fields}, "options": knobs})
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    width = shutil.get_terminal_size((100, 24)).columns
    for row in rows:
        click.echo(click.style(str(row["name"]), bold=True))
        for key in ("what", *fields, "options"):
            value: Any = row[key]
            if isinstance(value, dict):
                value = ", ".join(f"{knob}={default}" for knob, default in value.items()) or "none"
            click.echo(
                click.wrap_text(
                    f"{key.replace('_', ' ')}: {value}", width, initial_indent="  ", subsequent_indent="    "
                )
            )
        click.echo()


@click.command("attacks", short_help="List the attacks.")
@click.option("--json", "as_json", is_flag=True)
@clear_errors
def attacks_command(as_json: bool) -> None:
    """List the attacks: what each recovers, who could run it, where it comes from."""
    catalogue("attacks", ("goal", "threat_model", "source"), as_json)


@click.command("defenses", short_help="List the defences.")
@click.option("--json", "as_json", is_flag=True)
@clear_errors
def defenses_command(as_json: bool) -> None:
    """List the defences: what each protects, what it costs, where it comes from."""
    catalogue("defenses", ("protects", "cost", "source"), as_json)


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
    click.echo(json.dumps(models[what].model_json_schema(by_alias=True), indent=1))
