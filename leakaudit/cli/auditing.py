"""The audit of steps into a folder, which `simulate` and `run` share."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.common import public_command, say
from leakaudit.cli.progress import Pace, plan, shown
from leakaudit.cli.stopping import Request, Stopped, exit_code, stop_on_signals
from leakaudit.cli.threads import threads_to_take
from leakaudit.exit_codes import ExitCode
from leakaudit.results.wording import counted

if TYPE_CHECKING:
    from leakaudit.audit.audit import Audit
    from leakaudit.client.snapshot import Snapshot
    from leakaudit.config.audit import AuditConfig
    from leakaudit.results.journal import JournalEntry
    from leakaudit.results.schema import Results


RESUME_HELP = (
    "Continue the unfinished audit in --out, or move it aside and begin anew. Default: continue if command, data, model and "
    "version are the same, else begin anew."
)


def check_policy(path: Path) -> None:
    """Refuse a wrong policy before the attacks start."""
    from leakaudit.gate.policy import load_policy
    from leakaudit.plugins.names import registered_names

    load_policy(path, registered_names())


@dataclass(frozen=True)
class Steps:
    """The client steps of an audit."""

    digest: str
    """Digest of everything that the steps depend on."""
    tokenizer: Any
    numbers: Sequence[int]
    snapshot: Callable[[int], Snapshot]
    """Function that makes or reads the step with a number."""
    planned: bool = True
    """Whether the run has exactly these steps; if False, the number of its steps is unknown."""


def audit_steps(
    config: AuditConfig,
    steps_of: Callable[[], Steps],
    *,
    resume: bool | None,
    as_json: bool,
    shown_options: Mapping[str, str] | None = None,
) -> None:
    """Audit steps, print the outcome, and end the command.

    Args:
        config: attacks, defences, folder and the rest.
        steps_of: makes or finds the steps.
        resume: whether to continue an unfinished audit; None to decide as `RESUME_HELP` says.
        as_json: whether to print one JSON document.
        shown_options: options without private values, which the results show as they are.
    """
    with stop_on_signals() as stop:
        try:
            steps = steps_of()
            results, stopped = _run(config, steps, stop, resume, _public_command(config, shown_options or {}))
        except Stopped as early:
            say("stopped before the first attempt was finished, so nothing was written")
            sys.exit(exit_code(early))
        _print_outcome(results, config.out_dir, as_json)
    sys.exit(ExitCode.PASS if stopped is None else exit_code(stopped))


def _run(
    config: AuditConfig, steps: Steps, stop: Request, resume: bool | None, command: str
) -> tuple[Results, KeyboardInterrupt | None]:
    """Attack every step and write results, verdict and report.

    Returns:
        The results, and the interrupt that stopped the audit before its end; None if it was complete.

    Raises:
        KeyboardInterrupt: a signal came before an attempt was finished.
    """
    import torch

    from leakaudit.audit.audit import Audit
    from leakaudit.audit.battery import battery_of
    from leakaudit.audit.devices import choose_device
    from leakaudit.audit.run_folder import run_folder
    from leakaudit.audit.state import Unfinished

    if (threads := threads_to_take()) is not None:
        torch.set_num_threads(threads)
    battery = battery_of(config)
    source = _source(config, steps)
    size = len(battery.attacks) * len(battery.defenses)
    wanted = Unfinished(battery.digest, source, len(steps.numbers) * size)
    device = choose_device(config.device)
    with run_folder(config.out_dir, wanted, resume) as note:
        audit = Audit(config.out_dir, config, steps.tokenizer, device=device, command=command, source=source)
        say(plan(len(steps.numbers), len(battery.attacks), len(battery.defenses), config.budget_s))
        say(f"computing on {device.type} with {counted(torch.get_num_threads(), 'CPU thread')}")
        if note:
            say(note)
        stopped = _run_steps(audit, steps, stop)
        if stopped is not None:
            say("stopping: writing results of what is finished; a second signal ends the command at once")
        total = len(steps.numbers) if steps.planned else None
        stop.finish()
        results = audit.finish(total_steps=total, interrupted=stopped is not None)
        if stopped is not None:
            done = f"{len(audit.entries)} of {counted(wanted.attempts, 'attempt')}"
            say(f"{done} are finished and written; the same command continues with the rest")
    return results, stopped


def _run_steps(audit: Audit, steps: Steps, stop: Request) -> KeyboardInterrupt | None:
    """Run the battery over the steps that are not audited yet.

    Returns:
        The interrupt that stopped it; None if all steps are done.

    Raises:
        KeyboardInterrupt: it was stopped before an attempt was finished.
    """
    pairs = [(attack, defense) for defense in audit.battery.defenses for attack in audit.battery.attacks]
    pace = Pace(len(steps.numbers), pairs, audit.controls_left)
    pace.resume([(entry.attempt.attack, entry.attempt.defense) for entry in audit.entries])
    try:
        with shown(pace) as finished:

            def report(entry: JournalEntry) -> None:
                finished(entry)
                stop.check()

            audit.report_to(report)
            for number in steps.numbers:
                stop.check()
                if not audit.has_audited(number):
                    pace.begin_step()
                    audit.step(steps.snapshot(number))
                    pace.end_step()
    except KeyboardInterrupt as interrupt:
        audit.catch_up()
        if not audit.entries:
            raise
        return interrupt
    return None


def _source(config: AuditConfig, steps: Steps) -> str:
    """Return the digest of everything that the journal depends on, except the battery."""
    asked = (config.text.value, config.controls, str(config.sentence_model), str(config.entity_tagger), config.device)
    return hashlib.sha256(repr((steps.digest, *asked)).encode()).hexdigest()


def _public_command(config: AuditConfig, more: Mapping[str, str]) -> str:
    """Return this command in the form that results may show.

    Of the options of plugins, only numbers and choices are shown.
    """
    from leakaudit.audit.battery import battery_of

    battery = battery_of(config)
    given = click.get_current_context().params
    shown_options = dict(more)
    if "attacks" in given:
        shown_options |= {"attacks": ",".join(battery.attacks), "defenses": ",".join(battery.defenses)}
        shown_options |= {
            "attack_options": "",
            "defense_options": "",
            "server": config.server.label if config.server else "",
        }
    return public_command(shown_options)


def _print_outcome(results: Results, out: Path, as_json: bool) -> None:
    verdict = json.loads((out / "verdict.json").read_text(encoding="utf-8"))
    if as_json:
        document = {
            "interrupted": results.run.interrupted,
            "summaries": [summary.model_dump() for summary in results.summaries],
            "controls": results.controls.model_dump(),
            "verdict": verdict["verdict"],
            "granted": list(results.threat_model.granted),
            "results": str(out / "results.json"),
            "report": str(out / "report.html"),
        }
        click.echo(json.dumps(document, indent=1))
        return
    from leakaudit.reports.terminal import print_summary

    print_summary(out)
