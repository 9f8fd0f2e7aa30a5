"""`leakaudit simulate`: client steps made of a model and a data file, attacked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.auditing import RESUME_HELP, Steps, audit_steps, check_policy
from leakaudit.cli.battery import BatteryOption, battery_of_data, specs_of, with_options
from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.cli.threads import wait_passively
from leakaudit.errors import ConfigError
from leakaudit.results.wording import counted

if TYPE_CHECKING:
    from leakaudit.config.audit import AuditConfig


@click.command(short_help="Attack client steps made of a model and a data file.")
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
            "attacks": [s.model_dump() for s in with_options(battery_of_data(attacks, data), attack_options)],
            "defenses": [s.model_dump() for s in with_options(specs_of(defenses), defense_options)],
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
        check_policy(policy)
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

    audit_steps(config, steps_of, resume=resume, as_json=as_json, shown_options={"grant": grant})


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
