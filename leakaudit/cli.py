"""The command line: one function per subcommand, each of them parse, one call, print, exit code.

stdout is the answer, stderr is progress and diagnostics. Heavy imports sit inside the commands.
Exit codes: 0 PASS or done, 1 crash, 2 usage or configuration error, 3 FAIL, 4 INCONCLUSIVE, 5 ERROR, 130 interrupted.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli_prior import prior as prior_group
from leakaudit.cli_snapshots import snapshots as snapshots_group
from leakaudit.command import EXISTING, IDENTITY_HELP, answering_nobody, clear_errors
from leakaudit.errors import ConfigError, RedactionError, ResultsError

if TYPE_CHECKING:
    from leakaudit.battery import Audit
    from leakaudit.config import PluginSpec
    from leakaudit.scores import JournalEntry, Results

PLAIN_LINE_SECONDS = 30.0
"""Off a terminal, progress is one line per this many seconds: enough to see it live in a log, few enough to read."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="leakaudit")
def main() -> None:
    """Audit what could be read out of the updates of a training run on private text."""


def _specs(text: str) -> tuple[PluginSpec, ...]:
    """Split `a,b(x=1,y=2),c` at the commas outside brackets.

    Raises:
        ConfigError: the brackets do not close, or the list is empty.
    """
    from leakaudit.config import PluginSpec

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


@main.command()
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
@click.option("--num-labels", type=click.IntRange(min=2), help="Classes; default: the largest label plus one.")
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of fresh head, shuffle, dropout and attacks.")
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
    help="Of the local steps; the update is then a difference of weights.",
)
@click.option("--attacks", default="embedding-rows,span,tag,idlg,llg", show_default=True)
@click.option("--defenses", default="none", show_default=True, help="Such as none,gaussian-noise(scale=0.1).")
@click.option("--attack-option", "attack_options", multiple=True, metavar="NAME.KNOB=VALUE")
@click.option("--defense-option", "defense_options", multiple=True, metavar="NAME.KNOB=VALUE")
@click.option(
    "--server", help="Active server that changes the model, such as wide-pooler(dimension=100); default: none."
)
@click.option("--grant", default="", help="What the threat model gives the attacks: labels, lengths.")
@click.option(
    "--budget", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True, help="Seconds an attempt."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--text", "text", type=click.Choice(["hash", "masked", "full"]), default="masked", show_default=True)
@click.option("--sentence-model", type=EXISTING, help="Folder of an encoder that scores likeness in meaning, too.")
@click.option("--controls", type=click.IntRange(min=0), default=3, show_default=True, help="Control steps to run.")
@click.option("--policy", type=EXISTING, help="YAML policy of the gate; default: the built-in one.")
@click.option("--out", type=EXISTING, default=Path("leakaudit-out"), show_default=True, help="Folder for the results.")
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
    attacks: str,
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
    as_json: bool,
) -> None:
    """Make client steps from a model and a data file, attack them, and write results.json and report.html."""
    from leakaudit.config import AuditConfig
    from leakaudit.scores import TextMode
    from leakaudit.strict_yaml import validate_mapping

    config: AuditConfig = validate_mapping(
        {
            "out_dir": str(out),
            "attacks": [s.model_dump() for s in _with_options(_specs(attacks), attack_options)],
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
    if config.text is TextMode.FULL:
        from leakaudit.reports.redaction import refuse_full_in_ci

        refuse_full_in_ci()
    simulator = _simulator(
        model=model,
        data=data,
        task=task,
        num_labels=num_labels,
        batch_size=batch_size,
        steps=steps,
        seed=seed,
        mode=mode,
        freeze=_words(freeze),
        grant=_words(grant),
        lora_rank=lora_rank,
        lora_targets=_words(lora_targets),
        lora_warmup=lora_warmup,
        local_steps=local_steps,
        learning_rate=learning_rate,
    )
    if len(simulator) < steps:
        size = batch_size * local_steps
        click.echo(f"the data has {len(simulator)} full batches of {size}; {steps} were asked for", err=True)
    _clear_old_run(out)
    audit = _audit(config, simulator.tokenizer, as_json)
    with _progress(audit, len(simulator)):
        interrupted = _run_steps(audit, simulator)
    results = audit.finish(total_steps=len(simulator), interrupted=interrupted)
    _print_outcome(results, out, as_json)
    sys.exit(130 if interrupted else 0)


def _simulator(**given: Any) -> Any:
    """Return what makes the client steps: of texts, or of arrays where the data is a file of tensors."""
    from leakaudit.simulate import Simulation, Simulator

    if given["data"].suffix != ".safetensors":
        return Simulator(Simulation(**given))
    from leakaudit.simulate_arrays import ArraySimulation, ArraySimulator

    of_text = [name for name in ("grant", "lora_rank", "lora_targets", "lora_warmup") if given.pop(name)]
    if of_text or given.pop("task") != "classification":
        raise ConfigError("arrays are classified as they are: --task, --grant and --lora-... are for texts")
    return ArraySimulator(ArraySimulation(**given | {"model": str(given["model"])}))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _check_policy(path: Path) -> None:
    """Fail on a wrong policy before hours of attacks, not after."""
    from leakaudit.gate import load_policy

    load_policy(path)


RUN_FILES = ("journal.jsonl", "state.json", "results.json", "verdict.json", "report.html")


def _clear_old_run(out: Path) -> None:
    """Remove the files of an earlier run from the folder, and nothing else.

    Raises:
        ConfigError: the folder is a file, or holds a training run's audit.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is a file; give a folder")
    if (out / "spool").exists():
        raise ConfigError(f"--out {out}: holds the audit of a training run; give another folder")
    for name in RUN_FILES:
        (out / name).unlink(missing_ok=True)


def _audit(config: Any, tokenizer: Any, as_json: bool) -> Audit:
    from leakaudit.battery import Audit
    from leakaudit.devices import choose_device

    command = shlex.join(["leakaudit", *sys.argv[1:]])
    try:
        return Audit(config.out_dir, config, tokenizer, device=choose_device(config.device), command=command)
    except OSError as error:
        raise ConfigError(f"--out {config.out_dir}: cannot be written ({error.strerror})") from None


def _run_steps(audit: Audit, snapshots: Any) -> bool:
    """Run the battery over snapshots; on Ctrl-C stop after saving what is finished and return True."""
    try:
        for snapshot in snapshots:
            audit.step(snapshot)
    except KeyboardInterrupt:
        if not audit.entries:
            raise
        click.echo("interrupted: writing the results so far", err=True)
        return True
    return False


@contextmanager
def _progress(audit: Audit, steps: int) -> Iterator[None]:
    """Show progress on stderr: a bar on a terminal, a plain line now and then otherwise."""
    total = steps * len(audit.battery.attacks) * len(audit.battery.defenses)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description:32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("attempts", total=total)

            def advance(entry: JournalEntry) -> None:
                bar.update(task, advance=1, description=f"{entry.attempt.attack} / {entry.attempt.defense}"[:32])

            audit.report_to(advance)
            yield
        return
    click.echo(f"plan: {steps} steps, {total} attempts", err=True)
    last = time.monotonic()
    done = 0

    def line(entry: JournalEntry) -> None:
        nonlocal last, done
        done += 1
        if time.monotonic() - last >= PLAIN_LINE_SECONDS:
            last = time.monotonic()
            click.echo(f"{done}/{total} attempts, now {entry.attempt.step} {entry.attempt.attack}", err=True)

    audit.report_to(line)
    yield


def _print_outcome(results: Results, out: Path, as_json: bool) -> None:
    verdict = json.loads((out / "verdict.json").read_text(encoding="utf-8"))
    if as_json:
        document = {
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


@main.command()
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
    from leakaudit.cli_snapshots import private_keys, spool_of
    from leakaudit.devices import check_device
    from leakaudit.leash import keep_memory_private
    from leakaudit.worker import run_worker

    keep_memory_private()
    if device is not None:
        check_device(device)
    keys = private_keys(identity)
    with answering_nobody():
        code = run_worker(spool_of(spool), once=once, device=device, identities=keys, idle_limit_s=idle_limit)
    sys.exit(code)


@main.command()
@click.argument("snapshots", type=EXISTING, nargs=-1, required=True)
@click.option("--tokenizer", type=EXISTING, help="Folder of the tokenizer; default: the one kept in the spool.")
@click.option("--config", "config_path", type=EXISTING, help="YAML of the audit: attacks, defences, budget.")
@click.option("--out", type=EXISTING, default=Path("leakaudit-out"), show_default=True)
@click.option("--identity", type=EXISTING, help=IDENTITY_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print the summaries as one JSON document.")
@clear_errors
def run(
    snapshots: tuple[Path, ...],
    tokenizer: Path | None,
    config_path: Path | None,
    out: Path,
    identity: Path | None,
    as_json: bool,
) -> None:
    """Attack kept SNAPSHOTS once: snapshot folders, or a spool or folder that holds some."""
    from leakaudit.classifiers import reader_in
    from leakaudit.cli_snapshots import private_keys
    from leakaudit.config import AuditConfig, load_config
    from leakaudit.leash import keep_memory_private
    from leakaudit.snapshot import read_snapshot

    keep_memory_private()
    keys = private_keys(identity)
    folders = _snapshot_folders(snapshots)
    kept_tokenizer = tokenizer or _kept_tokenizer(folders[0])
    config = (load_config(config_path) if config_path else AuditConfig()).model_copy(update={"out_dir": out})
    if config.policy is not None:
        _check_policy(config.policy)
    _clear_old_run(out)
    audit = _audit(config, reader_in(kept_tokenizer), as_json)
    with _progress(audit, len(folders)):
        interrupted = _run_steps(audit, (read_snapshot(folder, keys) for folder in folders))
    results = audit.finish(interrupted=interrupted)
    _print_outcome(results, out, as_json)
    sys.exit(130 if interrupted else 0)


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


@main.command()
@click.argument("run_dir", type=EXISTING)
@click.option("--text", "text", type=click.Choice(["hash", "masked", "full"]), default="masked", show_default=True)
@click.option("--policy", type=EXISTING, help="YAML policy; default: the built-in one.")
@click.option("-o", "--output", type=EXISTING, help="The HTML file; default: report.html in RUN_DIR.")
@click.option("--allow-full-in-ci", is_flag=True, help="Allow --text full where CI is set.")
@clear_errors
def report(run_dir: Path, text: str, policy: Path | None, output: Path | None, allow_full_in_ci: bool) -> None:
    """Render the HTML report of RUN_DIR (a folder with results.json)."""
    from datetime import UTC, datetime

    from leakaudit.gate import default_policy, load_policy
    from leakaudit.reports.page import write_report
    from leakaudit.scores import TextMode

    if not run_dir.is_dir():
        raise ResultsError(f"{run_dir}: no such folder; give the folder that holds results.json")
    mode = TextMode(text)
    rules = load_policy(policy) if policy else default_policy()
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


@main.command()
@click.argument("run_dir", type=EXISTING)
@click.option("--policy", type=EXISTING, help="YAML policy; default: the built-in one.")
@click.option("--soft-fail", is_flag=True, help="Exit 0 whatever the verdict; the verdict itself stays.")
@click.option("-q", "--quiet", is_flag=True, help="Print the verdict line only.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON document.")
@clear_errors
def gate(run_dir: Path, policy: Path | None, soft_fail: bool, quiet: bool, as_json: bool) -> None:
    """Judge RUN_DIR (a folder with results.json, or the file) by a policy: exit 0 PASS, 3 FAIL, 4 INCONCLUSIVE, 5 ERROR."""
    import hashlib
    from datetime import UTC, datetime

    from leakaudit.gate import default_policy, evaluate, exit_code, load_policy, to_json, unreadable
    from leakaudit.scores import load_results, write_private

    rules = load_policy(policy) if policy else default_policy()
    file = run_dir / "results.json" if run_dir.is_dir() else run_dir
    now = datetime.now(UTC)
    try:
        results = load_results(file)
        verdict = evaluate(results, rules, now=now, results_sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    except ResultsError as error:
        verdict = unreadable(str(error), rules, now=now)
    else:
        write_private(file.parent / "verdict.json", json.dumps(to_json(verdict), indent=1))
    if as_json:
        click.echo(json.dumps(to_json(verdict), indent=1))
    else:
        from leakaudit.reports.terminal import print_verdict

        print_verdict(verdict, quiet=quiet)
    sys.exit(0 if soft_fail else exit_code(verdict))


@main.command()
@click.option("--config", "config_path", type=EXISTING, help="YAML of the audit to check as well.")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as one JSON document.")
@clear_errors
def doctor(config_path: Path | None, as_json: bool) -> None:
    """Check this machine and a configuration, and recover a known sentence from a tiny model: exit 0 or 2."""
    from leakaudit.doctor import examine

    checks = examine(config_path)
    if as_json:
        click.echo(json.dumps([vars(check) for check in checks], indent=1))
    else:
        for check in checks:
            click.echo(f"{check.state:5} {check.sentence}")
    sys.exit(2 if any(check.state == "fail" for check in checks) else 0)


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


@main.command("attacks")
@click.option("--json", "as_json", is_flag=True)
@clear_errors
def attacks_command(as_json: bool) -> None:
    """List the attacks: what each recovers, who could run it, where it comes from."""
    catalogue("attacks", ("goal", "threat_model", "source"), as_json)


@main.command("defenses")
@click.option("--json", "as_json", is_flag=True)
@clear_errors
def defenses_command(as_json: bool) -> None:
    """List the defences: what each protects, what it costs, where it comes from."""
    catalogue("defenses", ("protects", "cost", "source"), as_json)


@main.command()
@click.argument("what", type=click.Choice(["results", "policy", "config", "verdict"]))
@clear_errors
def schema(what: str) -> None:
    """Print the JSON Schema of results.json, a policy, an audit's configuration, or verdict.json."""
    from pydantic import BaseModel

    from leakaudit.config import AuditConfig
    from leakaudit.gate import Policy, Verdict
    from leakaudit.scores import Results

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
