"""`leakaudit conformance`: does a run do what its accountant assumes?"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from leakaudit.cli.common import EXISTING, FACTORY_HELP, IDENTITY_HELP, clear_errors, say
from leakaudit.exit_codes import ExitCode

if TYPE_CHECKING:
    from leakaudit.results.conformance import Conformance
    from leakaudit.results.schema import Results

NOTHING = (
    "no noise is declared, so there is no mechanism to compare with; Opacus is read by itself, other loops name theirs in the audit's "
    "configuration: `shipped_defense: {name: dp-sgd, options: {noise_multiplier: 1.0, max_grad_norm: 1.0, expected_batch_size: 64}}`"
)
"""Said where a run declares no noise."""


@click.command(short_help="Compare a run's noise with what its accountant assumes.")
@click.argument("run_dir", metavar="RUN", type=EXISTING)
@click.option("--again", is_flag=True, help="Measure the kept snapshots again instead of reading results.json.")
@click.option(
    "--mechanism",
    help="Take this defence for the declared one, such as `dp-sgd(noise_multiplier=1,max_grad_norm=1)`; needs --again.",
)
@click.option(
    "--level",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.01,
    show_default=True,
    help="Largest probability that a correct run is contradicted; needs --again to change it.",
)
@click.option("--identity", type=EXISTING, help=IDENTITY_HELP)
@click.option("--allow-factory", "factories", multiple=True, metavar="PACKAGE.MODULE:NAME", help=FACTORY_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@clear_errors
def conformance(
    run_dir: Path,
    again: bool,
    mechanism: str | None,
    level: float,
    identity: Path | None,
    factories: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare the updates of the audit in RUN with what its accountant assumes.

    Every check ends as contradicted, not contradicted or not tested; none confirms an epsilon. Exit codes: 0 nothing is contradicted; 3 something
    is; 4 nothing could be tested; 2 usage error, or no snapshot is kept; 5 the results cannot be read.
    """
    from leakaudit.results.files import load_results

    if mechanism is not None and not again:
        raise click.UsageError("--mechanism needs --again, which measures the kept snapshots")
    results = load_results(run_dir)
    folder = run_dir if run_dir.is_dir() else run_dir.parent
    found = _again(folder, results, mechanism, level, identity, factories) if again else results.conformance
    if as_json:
        click.echo(json.dumps(None if found is None else found.model_dump(mode="json"), indent=1))
    else:
        for line in _lines(results.model_copy(update={"conformance": found})):
            click.echo(line)
    sys.exit(_exit_code(found))


def _again(
    folder: Path,
    results: Results,
    mechanism: str | None,
    level: float,
    identity: Path | None,
    factories: tuple[str, ...],
) -> Conformance | None:
    from leakaudit.parts import require_supported

    require_supported("`leakaudit conformance --again`")
    from leakaudit.audit.conformance.again import measured_again
    from leakaudit.audit.worker import quiet_libraries
    from leakaudit.cli.run import vouch_for_makers
    from leakaudit.cli.snapshots import private_keys
    from leakaudit.config.audit import PluginSpec
    from leakaudit.storage.parent_watch import keep_memory_private

    keep_memory_private()
    quiet_libraries()
    vouch_for_makers(factories)
    spec = None if mechanism is None else PluginSpec.parse(mechanism)
    say(f"measuring the kept snapshots in {folder / 'spool'}")
    return measured_again(folder, results, level, mechanism=spec, identities=private_keys(identity))


def _exit_code(found: Conformance | None) -> ExitCode:
    if found is not None and found.contradicted:
        return ExitCode.FAIL
    tested = found is not None and any(one.outcome != "not tested" for one in found.checks)
    return ExitCode.PASS if tested else ExitCode.INCONCLUSIVE


def _lines(results: Results) -> Iterator[str]:
    from leakaudit.reports.escaping import plain
    from leakaudit.results.privacy import shipped_in_words
    from leakaudit.results.wording import counted

    found, width = results.conformance, min(shutil.get_terminal_size().columns, 100)
    if found is None:
        yield textwrap.fill(f"not tested: {NOTHING}", width)
        return
    yield textwrap.fill(plain(shipped_in_words(results)), width, break_on_hyphens=False)
    yield ""
    yield plain(f"mechanism  {found.mechanism}")
    yield f"measured   {counted(len(found.steps), 'step')}; a correct run is contradicted with a probability of at most {found.level:g}"
    yield ""
    for one in found.checks:
        head = f"{one.outcome.upper() if one.outcome == 'contradicted' else one.outcome:<18}{one.about:<14}"
        yield textwrap.fill(
            plain(one.sentence), width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
        )
    for why in found.left_out:
        yield textwrap.fill(plain(f"not measured: {why}"), width)
