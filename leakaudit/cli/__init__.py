"""The command line: `leakaudit COMMAND`.

A module holds one command or a few related ones.

A command parses its options, does its work, prints, and ends with an exit code. stdout has the answer; stderr has progress and
diagnostics. Heavy imports are inside the commands, so that `--help` and the gate start fast. It may import every room.

Exit codes: 0 PASS or done, 1 crash, 2 usage or configuration error, 3 FAIL, 4 INCONCLUSIVE, 5 ERROR, 6 side process whose
trainer ended, 7 another process is at work on it, 124 end of a time limit, 128 + n stopped by signal n (130 Ctrl-C, 143 SIGTERM).
"""

from __future__ import annotations

import click

from leakaudit.cli import (
    baseline,
    catalogue,
    compare,
    doctor,
    export,
    frontier,
    gate,
    history,
    index,
    merge,
    preflight,
    prior,
    report,
    run,
    simulate,
    snapshots,
)
from leakaudit.cli.nights import command as nights

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="leakaudit")
def main() -> None:
    """Audit what could be read out of the updates of a training run on private text."""


for command in (
    simulate.simulate,
    frontier.frontier,
    merge.merge,
    nights.nightly,
    run.worker,
    run.run,
    report.report,
    gate.gate,
    export.export,
    index.index,
    doctor.doctor,
    preflight.preflight,
    catalogue.attacks_command,
    catalogue.defenses_command,
    catalogue.schema,
    snapshots.snapshots,
    prior.prior,
    history.history,
    compare.compare,
    baseline.baseline,
):
    main.add_command(command)
