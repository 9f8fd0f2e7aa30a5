"""`leakaudit preflight`: what an audit will make of a configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.exit_codes import ExitCode

MARKS = {"refused": "refused ", "untested": "untested", "weaker": "weaker  ", "note": "note    "}


@click.command(short_help="Say what an audit will make of a configuration, without torch.")
@click.argument("configuration", type=EXISTING)
@click.option(
    "--model",
    type=EXISTING,
    help="Folder of the model: its config.json tells hidden size and packing. Default: as the configuration names it.",
)
@click.option(
    "--hidden-size", type=click.IntRange(min=1), help="D of the model, if there is no folder; default: unknown."
)
@click.option(
    "--adapter", type=EXISTING, help="peft's adapter_config.json, or its folder; default: as the configuration says."
)
@click.option(
    "--local-steps",
    type=click.IntRange(min=1),
    help="The client sends what changed after K steps; default: as the configuration says.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@clear_errors
def preflight(
    configuration: Path,
    model: Path | None,
    hidden_size: int | None,
    adapter: Path | None,
    local_steps: int | None,
    as_json: bool,
) -> None:
    """Say what will be captured, refused and read of a training.

    CONFIGURATION is a YAML file of axolotl, TrainingArguments as JSON (`trainer.args.to_json_string()`), or the pyproject.toml of a Flower
    app. Nothing is loaded or downloaded. Exit code 0: captured, or nobody tried it; 2: refused, or no such configuration.
    """
    from dataclasses import replace

    from leakaudit.preflight.answer import LIMIT, SENTENCES
    from leakaudit.preflight.answer import preflight as answer_of
    from leakaudit.preflight.files import read_recipe, with_adapter, with_model, with_rounds

    recipe = read_recipe(configuration)
    recipe = with_model(recipe, model) if model else recipe
    recipe = with_adapter(recipe, adapter) if adapter else recipe
    recipe = replace(recipe, hidden_size=hidden_size) if hidden_size else recipe
    recipe = with_rounds(recipe, local_steps) if local_steps else recipe
    answer = answer_of(recipe)
    if as_json:
        click.echo(json.dumps(answer.to_json(), indent=1))
    else:
        click.echo(f"{recipe.source}: {SENTENCES[answer.outlook]}")
        for one in answer.findings:
            click.echo(f"  {MARKS[one.kind]}  {one.said}: {one.why}")
        for change in answer.changes:
            click.echo(f"  change    {change}")
        if answer.reads is not None:
            click.echo("What is read of such an update:")
            for line in answer.reads.lines:
                click.echo(f"  {line}")
        click.echo(LIMIT)
    sys.exit(ExitCode.USAGE if answer.outlook == "refused" else ExitCode.PASS)
