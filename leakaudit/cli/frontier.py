"""`leakaudit frontier`: what each defence hides, and what it costs."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.auditing import Steps, print_outcome, public_audit, run_audit, time_limit
from leakaudit.cli.common import clear_errors, say
from leakaudit.cli.dataclass_options import options_of, values_of
from leakaudit.cli.grouped_help import GroupedCommand
from leakaudit.cli.memory import keep_freed_memory
from leakaudit.cli.simulate import (
    audit_options,
    check_files,
    config_of,
    pairing_of,
    parsed_seeds,
    say_notices,
    secrets_of,
    simulator_of,
)
from leakaudit.cli.stopping import Request, Stopped, exit_code, stop_on_signals
from leakaudit.cli.threads import threads_to_take, wait_passively
from leakaudit.config.frontier import Trainings
from leakaudit.config.simulation import Simulation
from leakaudit.errors import ConfigError
from leakaudit.parts import require_supported
from leakaudit.results.wording import counted, duration

if TYPE_CHECKING:
    from leakaudit.audit.frontier.plan import Candidate
    from leakaudit.audit.frontier.work import Work
    from leakaudit.config.audit import AuditConfig
    from leakaudit.results.schema import Results

TRAININGS = "trainings"
"""Folder in the output folder with the finished trainings."""


@click.command(cls=GroupedCommand, short_help="Measure what each defence hides and what it costs.")
@options_of(Simulation)
@options_of(Trainings)
@click.option(
    "--seeds",
    callback=parsed_seeds,
    default="1..3",
    show_default=True,
    help="Seeds of the trainings; an interval of the cost needs two or more.",
)
@click.option(
    "--halving/--no-halving",
    default=True,
    help="After a third of the steps, drop a strength if another one of the same defence leaks no more and has a lower loss. Default: "
    "drop it.",
)
@click.option(
    "--command",
    "script",
    help="Your training script, such as 'python train.py', instead of the trainings here. It reads LEAKAUDIT_DEFENSE and "
    "LEAKAUDIT_SEED and writes LEAKAUDIT_METRICS_FILE. Default: the trainings here.",
)
@audit_options
@time_limit
@click.option("--dry-run", is_flag=True, help="Print the plan with an estimate of its time, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print utility, prices and summaries as one JSON document.")
@clear_errors
def frontier(
    seeds: tuple[int, ...],
    halving: bool,
    script: str | None,
    dry_run: bool,
    as_json: bool,
    limit: float | None,
    **given: Any,
) -> None:
    """Audit defences and train a model under each, from the same start.

    First the defences are audited as by `leakaudit simulate`. Then a model is trained under each defence and seed, on the same batches,
    with every gradient changed as the defence changes it. The results in --out say what leaks, how much worse the model gets (with a 95 %
    interval), and what the defence adds to time and traffic. `a|b|c` in an option of a defence is a list of strengths:
    --defenses "gaussian-noise(scale=0.01|0.1|1)".

    Of the options of `leakaudit simulate`, --learning-rate, --clients and data that are arrays are refused.

    If the command was stopped, the same command continues it: finished trainings are kept in OUT/trainings.
    """
    require_supported("`leakaudit frontier`")
    wait_passively()
    keep_freed_memory()
    trainings = Trainings(**values_of(Trainings, given))
    config, families = with_strengths(config_of(given | {"seeds": ()}))
    what = values_of(Simulation, given) | {"seed": config.seed}
    _check_run(what)
    check_files(config)
    asked = Asked(config, families, what, trainings, seeds, halving, script)
    with stop_on_signals(limit) as stop:
        try:
            results, stopped = asked.dry_run(stop) if dry_run else asked.run(stop)
        except Stopped as early:
            say("stopped before the first attempt was finished, so nothing was written")
            sys.exit(exit_code(early))
        if results is not None:
            _print(results, config.out_dir, as_json)
    if stopped is not None:
        say("stopped: results of what is finished are written; the same command continues with the rest")
        sys.exit(exit_code(stopped))


def with_strengths(config: AuditConfig) -> tuple[AuditConfig, tuple[int, ...]]:
    """Return the configuration with every strength, and each defence's family."""
    from leakaudit.audit.frontier.plan import strengths

    found = strengths(config.defenses)
    return config.model_copy(update={"defenses": tuple(spec for spec, _ in found)}), tuple(
        family for _, family in found
    )


def _check_run(what: Mapping[str, Any]) -> None:
    """Refuse what no training of a frontier can repeat.

    Raises:
        ConfigError: the data are arrays, or what is sent is a difference of weights.
    """
    if what["data"].suffix == ".safetensors":
        raise ConfigError(
            f"{what['data']}: a frontier trains on texts; give a file of texts and labels, such as JSONL or CSV"
        )
    if what["clients"] > 1 or what["window"] > 1:
        raise ConfigError(
            "--clients and --window make the mean of several updates; a frontier sends one. Leave them out"
        )
    if what["learning_rate"] is not None:
        raise ConfigError(
            "--learning-rate sends differences of weights after local steps; a frontier changes the gradient of each step. "
            "Leave it out; --train-rate is the learning rate of the trainings"
        )


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    config: AuditConfig
    families: Sequence[int]
    """Family of each defence of the configuration."""
    what: dict[str, Any]
    """Options of the simulation."""
    trainings: Trainings
    seeds: tuple[int, ...]
    drop: bool
    script: str | None = None
    """Command line of the user's training script; None for the trainings of this package."""

    def dry_run(self, stop: Request) -> tuple[None, None]:
        """Print the plan."""
        with tempfile.TemporaryDirectory() as folder:
            work = self._work(self._steps(), Path(folder))
            work.trainer.check = stop.check
            work.estimate_all()
            print_plan(work)
        return None, None

    def run(self, stop: Request) -> tuple[Results, KeyboardInterrupt | None]:
        """Audit, train and write the results.

        Returns:
            The results, and the interrupt that stopped the command; None if it is complete.

        Raises:
            KeyboardInterrupt: a signal came before an attempt was finished.
        """
        steps = self._steps()
        work = self._work(steps, self.config.out_dir / TRAININGS)  # refuses wrong data before the audit
        results, stopped = self._leak(steps, stop)
        if stopped is not None:
            return results, stopped
        with locked(self.config.out_dir):
            return self._train(work, results, stop)

    def _steps(self) -> Steps:
        simulator = simulator_of(self.what)
        say_notices(simulator)
        return Steps(
            simulator.digest,
            simulator.tokenizer,
            range(len(simulator)),
            simulator.snapshot,
            pairing=pairing_of(self.what["data"]),
            secrets=secrets_of(simulator),
        )

    def _leak(self, steps: Steps, stop: Request) -> tuple[Results, KeyboardInterrupt | None]:
        """Return the results of the audit; if this very audit is finished, read them."""
        from leakaudit.files.private_files import write_atomic
        from leakaudit.results.files import load_results

        asked = self.config.model_dump_json(exclude={"out_dir", "policy"})
        key = hashlib.sha256(f"{steps.digest} {asked}".encode()).hexdigest()
        mark, out = self.config.out_dir / TRAININGS / "audit.json", self.config.out_dir
        if mark.exists() and (out / "results.json").exists():
            earlier = load_results(out)
            if json.loads(mark.read_text(encoding="utf-8")) == {"audit": key, "run": earlier.run.id}:
                say("the audit of the defences is finished; its results are kept")
                return earlier, None
        command = public_audit(self.config, {"grant": ",".join(self.what["grant"])})
        results, stopped = run_audit(self.config, steps, stop, None, command)
        if stopped is None:
            mark.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomic(mark, json.dumps({"audit": key, "run": results.run.id}))
        return results, stopped

    def _work(self, steps: Steps, folder: Path) -> Work:
        import torch

        from leakaudit.audit.devices import choose_device
        from leakaudit.audit.frontier.own_script import ScriptWork
        from leakaudit.audit.frontier.store import Store
        from leakaudit.audit.frontier.training import Trainer
        from leakaudit.audit.frontier.work import Work

        if (threads := threads_to_take()) is not None:
            torch.set_num_threads(threads)
        trainer = Trainer(Simulation(**self.what), self.trainings, choose_device(self.config.device))
        asked = (trainer, Store(folder), self._candidates(), self.seeds, steps.digest, self.drop)
        return Work(*asked, tell=say) if self.script is None else ScriptWork(*asked, tell=say, script=self.script)

    def _candidates(self) -> tuple[Candidate, ...]:
        from leakaudit.audit.battery import Plugins
        from leakaudit.audit.frontier.plan import Candidate

        defenses = Plugins.of(self.config).defenses
        return tuple(
            Candidate(label, None if defense.is_identity() else defense, family, spec.label)
            for (label, defense), family, spec in zip(defenses, self.families, self.config.defenses, strict=True)
        )

    def _train(self, work: Work, results: Results, stop: Request) -> tuple[Results, KeyboardInterrupt | None]:
        from leakaudit.audit.frontier.rows import with_frontier
        from leakaudit.audit.publish import publish

        stopped: KeyboardInterrupt | None = None

        def begin(name: str) -> None:
            stop.check()
            left = work.seconds() - work.begun_s if len(work.prices) == len(work.candidates) else 0.0
            say(f"{name}; at most about {duration(left)} left after it" if left > 0 else name)

        work.notice, work.trainer.check = begin, stop.check
        try:
            stop.work_again()  # the audit has written its results
            work.price_all()
            print_plan(work)
            work.run(results)
        except KeyboardInterrupt as interrupt:
            stopped = interrupt
        stop.finish()
        finished = with_frontier(results, work.found(), work.candidates[0].label)
        publish(self.config.out_dir, finished, self.config)
        return finished, stopped


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the output folder for the trainings.

    Raises:
        ConfigError: another command is at work there.
    """
    from leakaudit.storage.locks import is_folder_locked, lock_folder

    if is_folder_locked(folder):
        raise ConfigError(f"--out {folder}: another audit is at work there; wait for it, or give another folder")
    descriptor = lock_folder(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def print_plan(work: Work) -> None:
    """Print the trainings of a frontier and an estimate of their time, on stderr."""
    steps = work.trainer.trainings.train_steps
    rows = work.trainer.rows
    say(
        f"rows: {len(rows.train)} to train on, {len(rows.choice)} for choices, {len(rows.evaluation)} to evaluate; "
        f"batches of {work.trainer.trainings.train_batch_size}"
    )
    for candidate in work.candidates:
        need, price = work.need(candidate), work.prices[candidate.label]
        if price.unfit:
            say(f"  {candidate.label}: cannot be trained with: {price.unfit}")
            continue
        short = f"{counted(need.short, 'short training')} and " if need.short else ""
        each = f"{short}{counted(need.whole, 'training')}"
        if work.seconds():
            taken = need.steps(steps)
            each += f", {taken} steps at {price.step_s:.3g} s, about {duration(taken * price.step_s)}"
        say(f"  {candidate.label}: {each}")
    if work.seconds():
        say(f"plan: at most about {duration(work.seconds())} of training, without the evaluations")


def _print(results: Results, out: Path, as_json: bool) -> None:
    """Print the outcome, as tables or as one JSON document."""
    if as_json:
        verdict = json.loads((out / "verdict.json").read_text(encoding="utf-8"))
        document = {
            "utility": [row.model_dump() for row in results.utility],
            "prices": [row.model_dump() for row in results.prices],
            "not_tested": [one.model_dump() for one in results.coverage.not_tested],
            "summaries": [summary.model_dump() for summary in results.summaries],
            "verdict": verdict["verdict"],
            "results": str(out / "results.json"),
            "report": str(out / "report.html"),
        }
        click.echo(json.dumps(document, indent=1))
        return
    print_outcome(results, out, as_json)
    click.echo("")
    for line in cost_lines(results):
        click.echo(line)


def cost_lines(results: Results) -> Iterator[str]:
    """Yield one line for each defence and metric, and for each price."""
    from leakaudit.results.utility import UTILITY_OF

    for row in results.utility:
        change = "" if row.difference is None else f", {row.difference:+.3g} against no defence"
        if row.lower is not None and row.upper is not None:
            change += f" (95 % interval {row.lower:+.3g} to {row.upper:+.3g})"
        seeds = f"{counted(len(row.seeds), 'seed')}" + (f", {row.diverged} diverged" if row.diverged else "")
        yield f"{row.defense}: {row.metric} {row.value:.4g}{change}; {seeds}"
    for price in results.prices:
        if price.seconds is not None and price.traffic is not None:
            yield f"{price.defense}: {price.seconds:.3g} times the time of a step, {price.traffic:.3g} times the traffic"
    for missing in results.coverage.not_tested:
        if missing.what.startswith(UTILITY_OF):
            yield f"{missing.what.removeprefix(UTILITY_OF)}: {missing.why}"
