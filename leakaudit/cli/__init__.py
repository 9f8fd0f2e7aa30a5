"""The command line: one function per subcommand, each of them parse, one call, print, exit code.

stdout is the answer, stderr is progress and diagnostics. Heavy imports sit inside the commands.
Exit codes: 0 PASS or done, 1 crash, 2 usage or configuration error, 3 FAIL, 4 INCONCLUSIVE, 5 ERROR, 128 + n stopped by signal n
(130 Ctrl-C, 143 SIGTERM).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.common import EXISTING, IDENTITY_HELP, answering_nobody, clear_errors, public_command, say
from leakaudit.cli.prior import prior as prior_group
from leakaudit.cli.progress import Pace, plan, shown
from leakaudit.cli.snapshots import snapshots as snapshots_group
from leakaudit.cli.stopping import Request, Stopped, exit_code, stop_on_signals
from leakaudit.cli.threads import threads_to_take, wait_passively
from leakaudit.errors import ConfigError, RedactionError, ResultsError
from leakaudit.exit_codes import ExitCode
from leakaudit.results.wording import counted

__all__ = ["main"]

if TYPE_CHECKING:
    from leakaudit.audit.audit import Audit
    from leakaudit.client.snapshot import Snapshot
    from leakaudit.config.audit import AuditConfig, PluginSpec
    from leakaudit.results.schema import JournalEntry, Results

RESUME_HELP = (
    "Continue the unfinished audit in --out, or move it aside and begin anew. Default: continue if command, data, model and "
    "version are the same, else begin anew."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="leakaudit")
def main() -> None:
    """Audit what could be read out of the updates of a training run on private text."""


def _specs(text: str) -> tuple[PluginSpec, ...]:
    """Split `a,b(x=1,y=2),c` at the commas outside brackets.

    Raises:
        ConfigError: the brackets do not close, or the list is empty.
    """
    from leakaudit.config.audit import PluginSpec

    parts, depth, current = [], 0, ""
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += letter
    parts = [part.strip() for part in (*parts, current) if part.strip()]
    if depth or not parts:
        raise ConfigError(f"{text!r}: expected names separated by commas, such as span,tag(steps=300)")
    try:
        return tuple(PluginSpec.parse(part) for part in parts)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _with_options(specs: tuple[PluginSpec, ...], options: tuple[str, ...]) -> tuple[PluginSpec, ...]:
    """Add `name.knob=value` options to the plugins they name.

    Raises:
        ConfigError: an option has another form, or names a plugin that is not in the list.
    """
    added: dict[str, dict[str, str]] = {spec.name: {} for spec in specs}
    for option in options:
        target, equals, value = option.partition("=")
        name, dot, knob = target.rpartition(".")
        if not equals or not dot:
            raise ConfigError(f"{option!r}: expected name.option=value, such as tag.steps=300")
        if name not in added:
            raise ConfigError(f"{option!r}: {name!r} is not in this battery ({', '.join(added)})")
        added[name][knob] = value
    return tuple(spec.model_copy(update={"options": {**spec.options, **added[spec.name]}}) for spec in specs)


class BatteryOption(click.Option):
    """An option whose help names the default attacks of the configuration, which is read only when help is asked for."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option and its help with the default."""
        from leakaudit.config.audit import DEFAULT_ATTACKS, LABEL_ATTACKS

        record = super().get_help_record(ctx)
        if record is None:
            return None
        texts, arrays = (",".join(spec.label for spec in specs) for specs in (DEFAULT_ATTACKS, LABEL_ATTACKS))
        return record[0], f"{record[1]}  [default: {texts}; for arrays: {arrays}]"


def _battery(asked: str | None, data: Path) -> tuple[PluginSpec, ...]:
    """Return the attacks that were asked for, or the defaults: of text, or of labels where batches hold no text.

    Raises:
        ConfigError: the list cannot be read.
    """
    from leakaudit.config.audit import DEFAULT_ATTACKS, LABEL_ATTACKS

    if asked is not None:
        return _specs(asked)
    return LABEL_ATTACKS if data.suffix == ".safetensors" else DEFAULT_ATTACKS


@main.command(short_help="Attack client steps made of a model and a data file.")
@click.option(
    "--model",
    "model",
    type=EXISTING,
    required=True,
    help="Folder as `save_pretrained` writes it; for arrays `package.module:function` that makes the classifier.",
)
@click.option(
    "--data",
    "data",
    type=EXISTING,
    required=True,
    help="JSONL with the fields `text` and `label`, or arrays as `save_auxiliary` writes them (.safetensors).",
)
@click.option("--task", type=click.Choice(["classification", "causal-lm"]), default="classification", show_default=True)
@click.option("--num-labels", type=click.IntRange(2, 100_000), help="Classes; default: the largest label plus one.")
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of fresh head, shuffle, dropout and attacks."
)
@click.option(
    "--mode", type=click.Choice(["eval", "train"]), default="eval", show_default=True, help="train: dropout on."
)
@click.option("--freeze", default="", help="`embeddings`, or patterns of parameter names, comma-separated.")
@click.option(
    "--lora-rank", type=click.IntRange(min=1), help="Train low-rank adapters and the head instead of the weights."
)
@click.option(
    "--lora-targets", default="", help="Ends of the names of the layers with adapters; default: peft's choice."
)
@click.option("--lora-warmup", type=click.IntRange(min=0), default=0, show_default=True, help="Steps before the audit.")
@click.option(
    "--local-steps", type=click.IntRange(min=1), default=1, show_default=True, help="SGD steps a client takes."
)
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Learning rate of the local steps; the update is then a difference of weights.",
)
@click.option(
    "--attacks",
    cls=BatteryOption,
    help="Comma-separated, with knobs such as tag(steps=300); default: those of the callback.",
)
@click.option(
    "--defenses", default="none", show_default=True, help="Comma-separated, such as none,gaussian-noise(scale=0.1)."
)
@click.option("--attack-option", "attack_options", multiple=True, metavar="NAME.KNOB=VALUE")
@click.option("--defense-option", "defense_options", multiple=True, metavar="NAME.KNOB=VALUE")
@click.option(
    "--server", help="Active server that changes the model, such as wide-pooler(dimension=100); default: none."
)
@click.option("--grant", default="", help="What the threat model gives the attacks: labels, lengths.")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds per attempt.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--text", "text", type=click.Choice(["hash", "masked", "full"]), default="masked", show_default=True)
@click.option("--sentence-model", type=EXISTING, help="Folder of an encoder; adds a score of likeness in meaning.")
@click.option("--controls", type=click.IntRange(min=0), default=3, show_default=True, help="Control steps to run.")
@click.option("--policy", type=EXISTING, help="YAML policy of the gate; default: the built-in one.")
@click.option("--out", type=EXISTING, default=Path("leakaudit-out"), show_default=True, help="Folder for the results.")
@click.option("--resume/--fresh", "resume", default=None, help=RESUME_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print the summaries as one JSON document.")
@clear_errors
def simulate(
    model: Path,
    data: Path,
    task: Any,
    num_labels: int | None,
    batch_size: int,
    steps: int,
    seed: int,
    mode: Any,
    freeze: str,
    lora_rank: int | None,
    lora_targets: str,
    lora_warmup: int,
    local_steps: int,
    learning_rate: float | None,
    attacks: str | None,
    defenses: str,
    attack_options: tuple[str, ...],
    defense_options: tuple[str, ...],
    server: str | None,
    grant: str,
    budget: float,
    device: Any,
    text: str,
    sentence_model: Path | None,
    controls: int,
    policy: Path | None,
    out: Path,
    resume: bool | None,
    as_json: bool,
) -> None:
    """Make client steps from a model and a data file, attack them, and write results.json and report.html.

    Nothing in --out is overwritten: an earlier audit there moves to OUT.1, OUT.2 and so on. If an audit was stopped, the same
    command continues it. After Ctrl-C, SIGTERM or SIGHUP the command writes results and a report of what is finished and stops
    (exit 130, 143, 129); a second signal ends it at once. Attacks use the CPU threads that are idle, or OMP_NUM_THREADS if it is
    set.
    """
    wait_passively()
    from leakaudit.config.audit import AuditConfig
    from leakaudit.config.strict_yaml import validate_mapping
    from leakaudit.results.schema import TextMode

    config: AuditConfig = validate_mapping(
        {
            "out_dir": str(out),
            "attacks": [s.model_dump() for s in _with_options(_battery(attacks, data), attack_options)],
            "defenses": [s.model_dump() for s in _with_options(_specs(defenses), defense_options)],
            "server": server,
            "budget_s": budget,
            "seed": seed,
            "text": text,
            "allow_full": text == TextMode.FULL,
            "device": device,
            "sentence_model": str(sentence_model) if sentence_model else None,
            "controls": controls,
            "policy": str(policy) if policy else None,
        },
        AuditConfig,
        "command line",
    )
    if policy is not None:
        _check_policy(policy)
    if sentence_model is not None:
        from leakaudit.metrics.semantic_similarity import check_sentence_model

        check_sentence_model(sentence_model)
    if config.text is TextMode.FULL:
        from leakaudit.reports.redaction import refuse_full_in_ci

        refuse_full_in_ci()
    given = {
        "model": model,
        "data": data,
        "task": task,
        "num_labels": num_labels,
        "batch_size": batch_size,
        "steps": steps,
        "seed": seed,
        "mode": mode,
        "freeze": _words(freeze),
        "grant": _words(grant),
        "lora_rank": lora_rank,
        "lora_targets": _words(lora_targets),
        "lora_warmup": lora_warmup,
        "local_steps": local_steps,
        "learning_rate": learning_rate,
    }

    def steps_of() -> Steps:
        simulator = _simulator(**given)
        if len(simulator) < steps:
            full = counted(len(simulator), "full batch", "full batches")
            click.echo(
                f"--steps {steps}: the data has only {full} of {batch_size * local_steps}; all of them are audited",
                err=True,
            )
        return Steps(simulator.digest, simulator.tokenizer, range(len(simulator)), simulator.snapshot)

    _audit(config, steps_of, resume=resume, as_json=as_json, shown_options={"grant": grant})


def _simulator(**given: Any) -> Any:
    """Return what makes the client steps: of texts, or of arrays where the data is a file of tensors."""
    from leakaudit.audit.simulation.texts import Simulation, Simulator

    if given["data"].suffix != ".safetensors":
        return Simulator(Simulation(**given))
    from leakaudit.audit.simulation.arrays import ArraySimulation, ArraySimulator

    of_text = [name for name in ("grant", "lora_rank", "lora_targets", "lora_warmup") if given.pop(name)]
    if of_text or given.pop("task") != "classification":
        raise ConfigError("arrays are classified as they are: --task, --grant and --lora-... are for texts")
    return ArraySimulator(ArraySimulation(**given | {"model": str(given["model"])}))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _check_policy(path: Path) -> None:
    """Fail on a wrong policy before hours of attacks, not after."""
    from leakaudit.gate.policy import load_policy
    from leakaudit.plugins.names import registered_names

    load_policy(path, registered_names())


@dataclass(frozen=True)
class Steps:
    """The client steps of an audit."""

    digest: str
    """Of all that they depend on."""
    tokenizer: Any
    numbers: Sequence[int]
    snapshot: Callable[[int], Snapshot]
    """Makes or reads the step of a number."""
    planned: bool = True
    """The run has these steps and no more; else it is not known how many it had."""


def _audit(
    config: AuditConfig,
    steps_of: Callable[[], Steps],
    *,
    resume: bool | None,
    as_json: bool,
    shown_options: Mapping[str, str] | None = None,
) -> None:
    """Audit steps into the configuration's folder, print what came of it, and end the command.

    Args:
        config: attacks, defences, folder and the rest.
        steps_of: makes or finds the steps.
        resume: as the option says.
        as_json: print one JSON document.
        shown_options: options of closed types that are kept in the results as they are.
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
        The results, and what stopped the audit before its end.

    Raises:
        Stopped: before an attempt was finished.
    """
    import torch

    from leakaudit.audit.audit import Audit, Unfinished, battery_of
    from leakaudit.audit.devices import choose_device
    from leakaudit.audit.run_folder import run_folder

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
        What stopped it, None if it came to its end.

    Raises:
        KeyboardInterrupt: stopped before an attempt was finished.
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
    """Return the digest of what is audited and of what else the journal depends on beside the battery."""
    asked = (config.text.value, config.controls, str(config.sentence_model), config.device)
    return hashlib.sha256(repr((steps.digest, *asked)).encode()).hexdigest()


def _public_command(config: AuditConfig, more: Mapping[str, str]) -> str:
    """Return this command as results may show it; plugins with the knobs that are numbers and choices."""
    from leakaudit.audit.audit import battery_of

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


@main.command(short_help="Audit a spool's snapshots, beside training or after it.")
@click.argument("spool", type=EXISTING)
@click.option("--once", is_flag=True, help="Audit what is there and stop, without waiting for more.")
@click.option("--device", help="cpu, cuda, cuda:1 or auto; overrides the audit's own setting.")
@click.option("--identity", type=EXISTING, help=IDENTITY_HELP)
@click.option(
    "--idle-limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop when nothing new has come for so long: a trainer that died on another machine cannot say so.",
)
@clear_errors
def worker(spool: Path, once: bool, device: str | None, identity: Path | None, idle_limit: float | None) -> None:
    """Audit the snapshots of SPOOL (an audit's folder or the spool in it) while training goes on, or after it.

    The callback starts this by itself. As a job of its own, on this machine or another that sees the folder, it takes over what
    `schedule: deferred` and `at_end: leave` keep; started again, it goes on where it was.
    """
    from leakaudit.audit.devices import check_device
    from leakaudit.audit.worker import run_worker
    from leakaudit.cli.snapshots import private_keys, spool_of
    from leakaudit.storage.parent_watch import keep_memory_private

    keep_memory_private()
    if device is not None:
        check_device(device)
    keys = private_keys(identity)
    with answering_nobody():
        code = run_worker(spool_of(spool), once=once, device=device, identities=keys, idle_limit_s=idle_limit)
    sys.exit(code)


@main.command(short_help="Attack kept snapshots once.")
@click.argument("snapshots", type=EXISTING, nargs=-1, required=True)
@click.option("--tokenizer", type=EXISTING, help="Folder of the tokenizer; default: the one kept in the spool.")
@click.option("--config", "config_path", type=EXISTING, help="YAML of the audit: attacks, defences, budget.")
@click.option("--out", type=EXISTING, default=Path("leakaudit-out"), show_default=True)
@click.option("--identity", type=EXISTING, help=IDENTITY_HELP)
@click.option("--resume/--fresh", "resume", default=None, help=RESUME_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print the summaries as one JSON document.")
@clear_errors
def run(
    snapshots: tuple[Path, ...],
    tokenizer: Path | None,
    config_path: Path | None,
    out: Path,
    identity: Path | None,
    resume: bool | None,
    as_json: bool,
) -> None:
    """Attack kept SNAPSHOTS once: snapshot folders, or a spool or folder that holds some.

    An earlier audit in --out moves to OUT.1, OUT.2 and so on, and one that was stopped is continued, as by `simulate`.
    """
    wait_passively()
    from leakaudit.cli.snapshots import private_keys
    from leakaudit.config.audit import AuditConfig, load_config
    from leakaudit.models.array_classifier import reader_in
    from leakaudit.storage.parent_watch import keep_memory_private
    from leakaudit.storage.snapshots import read_manifest, read_snapshot

    keep_memory_private()
    keys = private_keys(identity)
    folders = _snapshot_folders(snapshots)
    kept_tokenizer = tokenizer or _kept_tokenizer(folders[0])
    config = (load_config(config_path) if config_path else AuditConfig()).model_copy(update={"out_dir": out})
    if config.policy is not None:
        _check_policy(config.policy)

    def steps_of() -> Steps:
        numbered: dict[int, Path] = {}
        for folder in folders:
            step = read_manifest(folder).provenance.step
            if step in numbered:
                raise ConfigError(
                    f"{numbered[step]} and {folder} are both step {step}; an audit has every step once: audit them one by one"
                )
            numbered[step] = folder
        described = b"".join((folder / "snapshot.json").read_bytes() for folder in folders)
        return Steps(
            hashlib.sha256(described).hexdigest(),
            reader_in(kept_tokenizer),
            sorted(numbered),
            lambda step: read_snapshot(numbered[step], keys),
            planned=False,
        )

    _audit(config, steps_of, resume=resume, as_json=as_json)


def _snapshot_folders(paths: tuple[Path, ...]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if (path / "snapshot.json").is_file():
            found.append(path)
        elif path.is_dir():
            found += sorted(child.parent for child in path.glob("**/snapshot.json") if child.parent.suffix != ".tmp")
    if not found:
        raise ConfigError(
            f"no snapshot in {', '.join(map(str, paths))}: looked for folders with a snapshot.json; "
            "`keep_snapshots: true` keeps them after the audit"
        )
    return found


def _kept_tokenizer(snapshot: Path) -> Path:
    for folder in (snapshot.parent / "tokenizer", snapshot.parent.parent / "tokenizer"):
        if folder.is_dir():
            return folder
    raise ConfigError(f"{snapshot}: no tokenizer folder beside it; give one with --tokenizer")


@main.command(short_help="Render the HTML report of a run again.")
@click.argument("run_dir", type=EXISTING)
@click.option("--text", "text", type=click.Choice(["hash", "masked", "full"]), default="masked", show_default=True)
@click.option("--policy", type=EXISTING, help="YAML policy; default: the built-in one.")
@click.option("-o", "--output", type=EXISTING, help="The HTML file; default: report.html in RUN_DIR.")
@click.option("--allow-full-in-ci", is_flag=True, help="Allow --text full if the variable CI is set.")
@clear_errors
def report(run_dir: Path, text: str, policy: Path | None, output: Path | None, allow_full_in_ci: bool) -> None:
    """Render the HTML report of RUN_DIR (a folder with results.json)."""
    from datetime import UTC, datetime

    from leakaudit.gate.policy import default_policy, load_policy
    from leakaudit.plugins.names import names_for
    from leakaudit.reports.page import write_report
    from leakaudit.results.schema import TextMode, load_results

    if not run_dir.is_dir():
        raise ResultsError(f"{run_dir}: no such folder; give the folder that holds results.json")
    mode = TextMode(text)
    rules = load_policy(policy, names_for(load_results(run_dir))) if policy else default_policy()
    if mode is TextMode.FULL and policy is not None and not rules.report.allow_full:
        raise RedactionError(f"{policy}: does not allow text mode full (report.allow_full: true)")
    path = write_report(
        run_dir,
        mode,
        now=datetime.now(UTC),
        policy=rules,
        output=output,
        allow_full=mode is TextMode.FULL,  # asking by name is the leave, unless a policy says otherwise
        allow_full_in_ci=allow_full_in_ci,
    )
    click.echo(str(path))


@main.command(short_help="Judge a run by a policy; the exit code is the verdict.")
@click.argument("run_dir", type=EXISTING)
@click.option("--policy", type=EXISTING, help="YAML policy; default: the built-in one.")
@click.option("--soft-fail", is_flag=True, help="Exit 0 whatever the verdict; the verdict itself stays.")
@click.option("-q", "--quiet", is_flag=True, help="Print the verdict line only.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON document.")
@clear_errors
def gate(run_dir: Path, policy: Path | None, soft_fail: bool, quiet: bool, as_json: bool) -> None:
    """Judge RUN_DIR (a folder with results.json, or the file) by a policy.

    Exit codes: 0 PASS, 2 wrong policy or usage, 3 FAIL, 4 INCONCLUSIVE, 5 ERROR (the evidence cannot be judged).
    """
    from datetime import UTC, datetime

    from leakaudit.files.private_files import write_atomic
    from leakaudit.gate.evaluate import evaluate, unreadable
    from leakaudit.gate.policy import default_policy, load_policy
    from leakaudit.gate.verdict import to_json
    from leakaudit.plugins.names import names_for
    from leakaudit.results.schema import read_results

    file = run_dir / "results.json" if run_dir.is_dir() else run_dir
    now = datetime.now(UTC)
    try:
        results, sha256 = read_results(file)
    except ResultsError as error:
        verdict = unreadable(str(error), load_policy(policy) if policy else default_policy(), now=now)
    else:
        rules = load_policy(policy, names_for(results)) if policy else default_policy()
        verdict = evaluate(results, rules, now=now, results_sha256=sha256)
    try:
        if file.exists():
            write_atomic(file.parent / "verdict.json", json.dumps(to_json(verdict), indent=1))
    except OSError as error:
        click.echo(f"verdict.json was not written ({error.strerror or type(error).__name__})", err=True)
    if as_json:
        click.echo(json.dumps(to_json(verdict), indent=1))
    else:
        from leakaudit.reports.terminal import print_verdict

        print_verdict(verdict, quiet=quiet)
    sys.exit(ExitCode.PASS if soft_fail else verdict.verdict.exit_code)


@main.command(short_help="Check this machine and a configuration.")
@click.option("--config", "config_path", type=EXISTING, help="YAML of the audit to check as well.")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as one JSON document.")
@clear_errors
def doctor(config_path: Path | None, as_json: bool) -> None:
    """Check this machine and a configuration, and recover a known sentence from a tiny model: exit 0 or 2."""
    from leakaudit.cli.doctor import examine

    checks = examine(config_path)
    if as_json:
        click.echo(json.dumps([vars(check) for check in checks], indent=1))
    else:
        for check in checks:
            click.echo(f"{check.state:5} {check.sentence}")
    sys.exit(ExitCode.USAGE if any(check.state == "fail" for check in checks) else ExitCode.PASS)


def catalogue(kind: str, fields: tuple[str, ...], as_json: bool) -> None:
    """Print what plugins of one kind there are, with the metadata they carry."""
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


@main.command("attacks", short_help="List the attacks.")
@click.option("--json", "as_json", is_flag=True)
@clear_errors
def attacks_command(as_json: bool) -> None:
    """List the attacks: what each recovers, who could run it, where it comes from."""
    catalogue("attacks", ("goal", "threat_model", "source"), as_json)


@main.command("defenses", short_help="List the defences.")
@click.option("--json", "as_json", is_flag=True)
@clear_errors
def defenses_command(as_json: bool) -> None:
    """List the defences: what each protects, what it costs, where it comes from."""
    catalogue("defenses", ("protects", "cost", "source"), as_json)


@main.command(short_help="Print the JSON Schema of a file.")
@click.argument("what", type=click.Choice(["results", "policy", "config", "verdict"]))
@clear_errors
def schema(what: str) -> None:
    """Print the JSON Schema of results.json, a policy, an audit's configuration, or verdict.json."""
    from pydantic import BaseModel

    from leakaudit.config.audit import AuditConfig
    from leakaudit.gate.policy import Policy
    from leakaudit.gate.verdict import Verdict
    from leakaudit.results.schema import Results

    models: dict[str, type[BaseModel]] = {
        "results": Results,
        "policy": Policy,
        "config": AuditConfig,
        "verdict": Verdict,
    }
    click.echo(json.dumps(models[what].model_json_schema(by_alias=True), indent=1))


main.add_command(snapshots_group)
main.add_command(prior_group)


if __name__ == "__main__":
    main()
