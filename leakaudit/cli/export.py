"""`leakaudit export`: an audit in the forms of other tools."""

from __future__ import annotations

from pathlib import Path

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.errors import ResultsError


@click.group(short_help="Write an audit for other tools.")
def export() -> None:
    """Write an audit in the forms of other tools. None holds training text.

    What pipelines read has options of its own at `leakaudit gate`.
    """


@export.command("model-card", short_help="Write a Markdown section for a model's card.")
@click.argument("run_dir", type=EXISTING)
@click.option("--policy", type=EXISTING, help="YAML policy; default: the built-in one.")
@click.option("-o", "--output", type=EXISTING, help="The Markdown file; default: standard output.")
@clear_errors
def model_card(run_dir: Path, policy: Path | None, output: Path | None) -> None:
    """Write a section for a model's card from RUN_DIR, a folder with results.json.

    It says in ten lines what was attacked, what came back, the worst bound, and what was not tested. It judges anew by the policy, and never
    calls a model private.
    """
    from datetime import UTC, datetime

    from leakaudit.gate.evaluate import evaluate
    from leakaudit.gate.policy import default_policy, load_policy
    from leakaudit.gate.subject import Claim
    from leakaudit.plugins.names import names_for
    from leakaudit.reports import outputs
    from leakaudit.results.binding import read_binding
    from leakaudit.results.files import read_results

    results, sha256 = read_results(run_dir)
    rules = load_policy(policy, names_for(results)) if policy else default_policy()
    claim = Claim(binding=read_binding(run_dir if run_dir.is_dir() else run_dir.parent, results))
    text = outputs.model_card(
        results, evaluate(results, rules, now=datetime.now(UTC), results_sha256=sha256, claim=claim)
    )
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{output}: was not written ({error.strerror or type(error).__name__})") from None
    click.echo(str(output))
