"""The audit of steps into a folder, which `simulate` and `run` share."""

from __future__ import annotations

import hashlib
import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import click

from leakaudit.cli.common import public_command, say
from leakaudit.cli.progress import Pace, plan, shown
from leakaudit.cli.stopping import Request, Stopped, exit_code, stop_on_signals, time_is_up
from leakaudit.cli.threads import threads_to_take
from leakaudit.exit_codes import ExitCode
from leakaudit.results.wording import counted

if TYPE_CHECKING:
    import torch

    from leakaudit.audit.audit import Audit
    from leakaudit.audit.pairing import Pairing
    from leakaudit.audit.state import SavedShard
    from leakaudit.client.snapshot import Snapshot
    from leakaudit.config.audit import AuditConfig
    from leakaudit.config.secret_book import SecretBook
    from leakaudit.config.shard import Shard
    from leakaudit.results.journal import JournalEntry
    from leakaudit.results.origin import Origin
    from leakaudit.results.schema import Results


P = ParamSpec("P")
R = TypeVar("R")

SHORTEST_LIMIT = 10.0
"""Shortest time limit, in seconds. Our choice: writing results and report takes about two."""

OTHER_SHARDS = "other shards of this audit have them; `leakaudit merge` joins the shards"

RESUME_HELP = (
    "Continue the unfinished audit in --out, or move it aside and begin anew. Default: continue if command, data, model and "
    "version are the same, else begin anew."
)


def check_policy(path: Path) -> None:
    """Refuse a wrong policy, or wrong waivers of it, before the attacks start."""
    from leakaudit.gate.policy_source import PolicyFiles
    from leakaudit.plugins.names import registered_names

    files = PolicyFiles(path)
    files.load_waivers(files.load_policy(registered_names()))


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
    pairing: Pairing | None = None
    """Key of the marks by which another audit finds the same steps; None for no marks."""
    origin: Origin | None = None
    """What was known when the run began that made these steps; None if they are made now, or nothing was kept of it."""
    base_model: str = ""
    """The weights that the steps begin with; empty if unknown."""
    shard: Shard | None = None
    """The part of these steps that is audited; None for all."""
    secrets: SecretBook | None = None
    """The secrets that were put into these steps; None if there are none."""

    @property
    def own(self) -> Sequence[int]:
        """Numbers of the steps that are audited here."""
        if self.shard is None:
            return self.numbers
        places = self.shard.numbers(len(self.numbers))
        return self.numbers[places.start : places.stop : places.step]


LIMIT_HELP = "Time for the whole command, such as 2h or 90m. Before it ends, results and report of the finished attempts are written (exit 124). Default: none."


def time_limit(command: Callable[P, R]) -> Callable[P, R]:
    """Add the option `--time-limit` to a command."""
    return click.option("--time-limit", "limit", metavar="LENGTH", callback=seconds_of, help=LIMIT_HELP)(command)


def seconds_of(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """Return the seconds of a length of time; None gives None.

    Raises:
        BadParameter: it is no length of time, or is shorter than ten seconds.
    """
    if value is None:
        return None
    from leakaudit.config.duration import length_of

    try:
        seconds = length_of(value).total_seconds()
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if seconds < SHORTEST_LIMIT:
        raise click.BadParameter(f"{value} is too short to write results; give {SHORTEST_LIMIT:g}s or more")
    return seconds


def audit_steps(
    config: AuditConfig,
    steps_of: Callable[[], Steps],
    *,
    resume: bool | None,
    as_json: bool,
    limit_s: float | None = None,
    shown_options: Mapping[str, str] | None = None,
) -> None:
    """Audit steps, print the outcome, and end the command.

    Args:
        config: attacks, defences, folder and the rest.
        steps_of: makes or finds the steps.
        resume: whether to continue an unfinished audit; None to decide as `RESUME_HELP` says.
        as_json: whether to print one JSON document.
        limit_s: seconds that the command may take; None for no limit.
        shown_options: options without private values, which the results show as they are.
    """
    with stop_on_signals(limit_s) as stop:
        try:
            steps = steps_of()
            results, stopped = run_audit(config, steps, stop, resume, public_audit(config, shown_options or {}))
        except Stopped as early:
            say("stopped before the first attempt was finished, so nothing was written")
            sys.exit(exit_code(early))
        print_outcome(results, config.out_dir, as_json)
    sys.exit(ExitCode.PASS if stopped is None else exit_code(stopped))


class Nights(Protocol):
    """What a night adds to an audit: it may end before all steps are audited."""

    def enough(self, audit: Audit) -> str:
        """Return why no further attempt is needed; empty if one is.

        It is called after every step.
        """

    def out_of_time(self, audit: Audit) -> str:
        """Return why the audit ends although its time is up; it then is complete."""


def run_audit(
    config: AuditConfig,
    steps: Steps,
    stop: Request,
    resume: bool | None,
    command: str,
    night: Nights | None = None,
) -> tuple[Results, KeyboardInterrupt | None]:
    """Attack every step and write results, verdict and report.

    Args:
        config: attacks, defences, folder and the rest.
        steps: the client steps.
        stop: the request to stop, if a signal makes one.
        resume: whether to continue an unfinished audit; None to decide as `RESUME_HELP` says.
        command: how the audit was started, without private values.
        night: may end the audit early; None for an audit that runs to its end.

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
    wanted = Unfinished(battery.digest, source, len(steps.own) * size)
    device = choose_device(config.device)
    with run_folder(config.out_dir, wanted, resume) as note:
        audit = Audit(
            config.out_dir,
            config,
            steps.tokenizer,
            device=device,
            command=command,
            source=source,
            pairing=steps.pairing,
            shard=_saved_shard(config, steps, command, device),
            origin=steps.origin or _origin_now(config, steps),
            secrets=steps.secrets,
        )
        say(plan(len(steps.own), len(battery.attacks), len(battery.defenses), config.budget_s, stop.limit_s))
        say(f"computing on {device.type} with {counted(torch.get_num_threads(), 'CPU thread')}")
        if note:
            say(note)
        stopped, enough = _run_steps(audit, steps, stop, night)
        if night is not None and time_is_up(stopped):
            stop.finish()  # closing what is left reports every attempt, which must not stop it again
            stopped, enough = None, night.out_of_time(audit)
        missing = len(steps.own) - audit.audited
        not_kept = [(missing, enough)] if enough and missing else []
        if others := len(steps.numbers) - len(steps.own):
            not_kept.append((others, OTHER_SHARDS))
        if stopped is not None:
            say("stopping: writing results of what is finished; a second signal ends the command at once")
        total = len(steps.numbers) if steps.planned else None
        stop.finish()
        results = audit.finish(
            total_steps=total, not_kept=not_kept, interrupted=stopped is not None, simulated=steps.planned
        )
        if stopped is not None:
            done = f"{len(audit.entries)} of {counted(wanted.attempts, 'attempt')}"
            say(f"{done} are finished and written; the same command continues with the rest")
    return results, stopped


def _run_steps(
    audit: Audit, steps: Steps, stop: Request, night: Nights | None = None
) -> tuple[KeyboardInterrupt | None, str]:
    """Run the battery over the steps that are not audited yet.

    Quick attacks run on all of them first, then the slow ones.

    Returns:
        The interrupt that stopped it, None if nothing did; and why a night has enough, empty if all steps are done.

    Raises:
        KeyboardInterrupt: it was stopped before an attempt was finished.
    """
    from leakaudit.audit.audit import announce_to

    pairs = [(attack, defense) for defense in audit.battery.defenses for attack in audit.battery.attacks]
    pace = Pace(len(steps.own), pairs, audit.controls_left)
    before = [entry.attempt for entry in audit.entries]
    pace.resume([(attempt.attack, attempt.defense) for attempt in before], sum(attempt.leaked for attempt in before))
    try:
        with shown(pace) as finished:

            def report(entry: JournalEntry) -> None:
                finished(entry)
                stop.check()

            audit.report_to(report)
            announce_to(audit, lambda which: pace.begin(which.attack))
            for slow in (False, True):
                for number in steps.own:
                    stop.check()
                    if audit.has_audited(number) or (not slow and audit.only_slow_left(number)):
                        continue
                    pace.begin_step()
                    if audit.step(steps.snapshot(number), partial(operator.not_, slow)):
                        pace.end_step()
                    if night is not None and (enough := night.enough(audit)):
                        return None, enough
    except KeyboardInterrupt as interrupt:
        audit.catch_up()
        if not audit.entries:
            raise
        return interrupt, ""
    return None, ""


def _source(config: AuditConfig, steps: Steps) -> str:
    """Return the digest of everything that the journal depends on, except the battery."""
    shard = () if steps.shard is None else (str(steps.shard),)
    return hashlib.sha256(repr((_source_of_all(config, steps), *shard)).encode()).hexdigest()


def _source_of_all(config: AuditConfig, steps: Steps) -> str:
    """Return the digest that all shards of an audit have in common."""
    asked = (config.text.value, config.controls, str(config.sentence_model), str(config.entity_tagger), config.device)
    return hashlib.sha256(repr((steps.digest, *asked)).encode()).hexdigest()


def _origin_now(config: AuditConfig, steps: Steps) -> Origin:
    """Return what is known when an audit begins here.

    Raises:
        ConfigError: the policy cannot be read.
    """
    from leakaudit.gate.origin import origin_of
    from leakaudit.gate.policy import default_policy, load_policy

    policy = load_policy(config.policy) if config.policy else default_policy()
    return origin_of(
        policy,
        config.out_dir,
        data=config.data_name,
        data_invented=config.data_invented,
        base_model=steps.base_model,
    )


def _saved_shard(config: AuditConfig, steps: Steps, command: str, device: torch.device) -> SavedShard | None:
    """Return what `leakaudit merge` must know of this audit; None for a whole one."""
    from leakaudit.audit.results import environment_of
    from leakaudit.audit.state import SavedShard

    if steps.shard is None or steps.pairing is None:
        return None
    mark = steps.pairing.mark_of_audit(_source_of_all(config, steps))
    without = command.replace(f" --shard {steps.shard}", "")
    return SavedShard(
        shard=steps.shard,
        total=len(steps.numbers),
        audit=mark,
        command=without,
        config=config,
        pairing=steps.pairing.id,
        environment=environment_of(device),
    )


def public_audit(config: AuditConfig, more: Mapping[str, str]) -> str:
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


def print_outcome(results: Results, out: Path, as_json: bool) -> None:
    """Print the summaries of a finished audit, as a table or as one JSON document."""
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
