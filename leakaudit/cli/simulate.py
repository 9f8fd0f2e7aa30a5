"""`leakaudit simulate`: attacks on client steps made from a model and a data file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.auditing import RESUME_HELP, Steps, audit_steps, check_policy, time_limit
from leakaudit.cli.battery import BatteryOption, battery_of_data, membership_of, specs_of, with_options
from leakaudit.cli.common import EXISTING, clear_errors, say
from leakaudit.cli.dataclass_options import Command, options_of, values_of
from leakaudit.cli.grouped_help import GroupedCommand
from leakaudit.cli.memory import keep_freed_memory
from leakaudit.cli.threads import wait_passively
from leakaudit.config.simulation import Simulation
from leakaudit.errors import ConfigError
from leakaudit.parts import require_supported
from leakaudit.results.wording import counted

if TYPE_CHECKING:
    from leakaudit.audit.pairing import Pairing
    from leakaudit.client.snapshot import Snapshot
    from leakaudit.config.audit import AuditConfig
    from leakaudit.config.secret_book import SecretBook
    from leakaudit.config.shard import Shard

OUT = Path("leakaudit-out")

MOST_SEEDS = 1000
"""Most seeds of `--seeds`. Our choice: each one loads the model."""


def parsed_seeds(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Return the seeds of a text such as `1..10` or `1,2,5..7`, each once.

    None gives None.

    Raises:
        BadParameter: a part is no seed, a range falls, or a seed or the number of seeds is too large.
    """
    from leakaudit.config.audit import MAX_SEED

    found: dict[int, None] = {}
    for part in [] if value is None else value.split(","):
        ends = re.fullmatch(r"\s*(\d{1,10})(?:\.\.(\d{1,10}))?\s*", part, re.ASCII)
        if ends is None:
            raise click.BadParameter(f"{part.strip()!r} is no seed; write numbers and ranges, such as 1..10 or 1,2,5")
        seeds = range(int(ends[1]), int(ends[2] or ends[1]) + 1)
        if not 0 < len(seeds) <= MOST_SEEDS - len(found) or seeds[-1] > MAX_SEED:
            raise click.BadParameter(
                f"{part.strip()!r}: a range rises, the largest seed is {MAX_SEED}, and at most {MOST_SEEDS} are taken"
            )
        found |= dict.fromkeys(seeds)
    return tuple(found)


def _shard(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Shard | None:
    """Return the shard of a text such as `2/8`; None gives None.

    Raises:
        BadParameter: it is no shard.
    """
    from leakaudit.config.shard import Shard

    try:
        return None if value is None else Shard.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


AUDIT_OPTIONS = (
    click.option(
        "--config",
        "config_path",
        type=EXISTING,
        help="YAML of the audit; the options below override it. Default: none.",
    ),
    click.option(
        "--attacks",
        cls=BatteryOption,
        help="Comma-separated, with knobs such as tag(steps=300); `leakaudit attacks NAME` prints them. Default: those of the callback.",
    ),
    click.option(
        "--defenses",
        help="Comma-separated, such as none,gaussian-noise(scale=0.1); `leakaudit defenses NAME` prints the knobs. Default: none.",
    ),
    click.option(
        "--attack-option",
        "attack_options",
        multiple=True,
        metavar="NAME.KNOB=VALUE",
        help="Option of an attack, such as tag.steps=300; repeatable.",
    ),
    click.option(
        "--defense-option",
        "defense_options",
        multiple=True,
        metavar="NAME.KNOB=VALUE",
        help="Option of a defence, such as gaussian-noise.scale=0.1; repeatable.",
    ),
    click.option(
        "--server", help="Active server that changes the model, such as wide-pooler(dimension=100); default: none."
    ),
    click.option(
        "--budget", type=click.FloatRange(min=0, min_open=True), help="Seconds for each attempt; default: 60."
    ),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where attacks compute; default: auto."),
    click.option("--text", type=click.Choice(["hash", "masked", "full"]), help="Text in the report; default: masked."),
    click.option(
        "--sentence-model",
        type=EXISTING,
        help="Folder of an encoder; adds a score of likeness in meaning. Default: none.",
    ),
    click.option(
        "--entity-tagger",
        help="Installed spaCy pipeline, or its folder; adds scores of recovered names and places. Default: none.",
    ),
    click.option("--controls", type=click.IntRange(min=0), help="Control steps to run; default: 3."),
    click.option("--policy", type=EXISTING, help="YAML policy of the gate; default: the built-in one."),
    click.option("--out", type=EXISTING, help=f"Folder for the results; default: {OUT}."),
)


def audit_options(command: Command) -> Command:
    """Add the options of an audit to a command."""
    for option in reversed(AUDIT_OPTIONS):
        command = option(command)
    return command


@click.command(cls=GroupedCommand, short_help="Attack client steps made of a model and a data file.")
@options_of(Simulation)
@click.option(
    "--seeds",
    callback=parsed_seeds,
    help="Several seeds, such as 1..10 or 1,2,5, instead of --seed: --steps for each, with mean and spread in the summaries. Default: one seed.",
)
@click.option(
    "--shard",
    callback=_shard,
    metavar="K/N",
    help="Only a part of the steps, such as 2/8 for the second of eight machines; `leakaudit merge` joins the parts. Default: all steps.",
)
@audit_options
@click.option(
    "--nonmembers",
    type=EXISTING,
    help="File of texts of no step, in a format of --data: the audit then also says how many texts of the steps the updates name. Default: not asked.",
)
@click.option("--resume/--fresh", "resume", default=None, help=RESUME_HELP)
@time_limit
@click.option("--json", "as_json", is_flag=True, help="Print the summaries as one JSON document.")
@clear_errors
def simulate(resume: bool | None, as_json: bool, limit: float | None, shard: Shard | None, **given: Any) -> None:
    """Make client steps from a model and a data file, and attack them.

    The results are results.json, verdict.json and report.html in --out.

    Nothing in --out is overwritten: an earlier audit there moves to OUT.1, OUT.2 and so on. If an audit was stopped, the same
    command continues it. After Ctrl-C, SIGTERM or SIGHUP the command writes results and a report of the finished attempts and stops
    (exit 130, 143, 129); a second signal ends it at once. Attacks use the CPU threads that are idle, or OMP_NUM_THREADS if it is
    set.
    """
    require_supported("`leakaudit simulate`")
    wait_passively()
    keep_freed_memory()
    seeds = given["seeds"]
    if seeds and _was_given("seed"):
        raise ConfigError("--seed and --seeds were both given; --seeds alone names all of them")
    config = config_of(given | {"seed": seeds[0]} if seeds else given)
    check_files(config)
    what = values_of(Simulation, given) | {"seed": config.seed}

    def steps_of() -> Steps:
        simulator = simulator_of(what)
        say_notices(simulator)
        if len(simulator) < what["steps"]:
            full = counted(len(simulator), "full batch", "full batches")
            size = what["batch_size"] * what["local_steps"] * what["clients"] * what["window"]
            click.echo(
                f"--steps {what['steps']}: the data has only {full} of {size}; all of them are audited", err=True
            )
        if seeds:
            return _shard_of(_steps_of_seeds(what, seeds, simulator), shard)
        pairing = pairing_of(what["data"])
        all_steps = range(len(simulator))
        base = _base_of(what["model"])
        steps = Steps(
            simulator.digest,
            simulator.tokenizer,
            all_steps,
            simulator.snapshot,
            pairing=pairing,
            base_model=base,
            secrets=secrets_of(simulator),
        )
        return _shard_of(steps, shard)

    shown = {"grant": given["grant"], "shard": str(shard or "")}
    audit_steps(config, steps_of, resume=resume, as_json=as_json, limit_s=limit, shown_options=shown)


def _shard_of(steps: Steps, shard: Shard | None) -> Steps:
    """Return steps of which only a shard is audited.

    Raises:
        ConfigError: there are more shards than steps.
    """
    if shard is not None and shard.count > len(steps.numbers):
        number = counted(len(steps.numbers), "step")
        raise ConfigError(f"--shard {shard}: the audit has only {number}; use at most {len(steps.numbers)} shards")
    return replace(steps, shard=shard)


def config_of(given: Mapping[str, Any]) -> AuditConfig:
    """Return the audit's configuration: the YAML file, overridden by options.

    Raises:
        ConfigError: a key or an option is wrong.
    """
    from leakaudit.config.audit import RUN_NAME, AuditConfig, load_config
    from leakaudit.config.strict_yaml import validate_mapping

    path: Path | None = given["config_path"]
    base = load_config(path) if path else AuditConfig(out_dir=OUT)
    config: AuditConfig = validate_mapping(
        base.model_dump(mode="json", exclude_unset=True) | _overrides(given, base), AuditConfig, "command line"
    )
    if RUN_NAME in str(config.out_dir):
        raise ConfigError(
            f"`out_dir: {config.out_dir}` needs the name of a training run, and there is none: give --out"
        )
    return config


def _overrides(given: Mapping[str, Any], base: AuditConfig) -> dict[str, Any]:
    """Return configuration keys and values for the options that were given."""
    keys = {
        "out": "out_dir",
        "server": "server",
        "budget": "budget_s",
        "text": "text",
        "device": "device",
        "sentence_model": "sentence_model",
        "entity_tagger": "entity_tagger",
        "controls": "controls",
        "policy": "policy",
    }
    found = {key: given[option] for option, key in keys.items() if given[option] is not None}
    found = {key: str(value) if isinstance(value, Path) else value for key, value in found.items()}
    attacks = base.attacks if "attacks" in base.model_fields_set else battery_of_data(given["data"])
    defenses = base.defenses if given["defenses"] is None else specs_of(given["defenses"])
    attacks = attacks if given["attacks"] is None else specs_of(given["attacks"])
    if given["attacks"] is not None:
        found["attack_recovered_steps"] = True  # whoever names attacks measures each of them
    found["attacks"] = [spec.model_dump() for spec in with_options(attacks, given["attack_options"])]
    found["defenses"] = [spec.model_dump() for spec in with_options(defenses, given["defense_options"])]
    if given.get("nonmembers") is not None:
        found["membership"] = membership_of(given, base.membership)
    if found.get("text") == "full":
        found["allow_full"] = True
    if given["seeds"] or _was_given("seed") or "seed" not in base.model_fields_set:
        found["seed"] = given["seed"]
    return found


def _was_given(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def check_files(config: AuditConfig) -> None:
    """Refuse a wrong policy, model, tagger or text mode before any attack.

    Raises:
        LeakAuditError: one of them is wrong; the message says which and why.
    """
    from leakaudit.config.membership import check_nonmembers
    from leakaudit.results.schema import TextMode

    if config.policy is not None:
        check_policy(config.policy)
    check_nonmembers(config.membership)
    if config.sentence_model is not None:
        from leakaudit.metrics.semantic_similarity import check_sentence_model

        check_sentence_model(config.sentence_model)
    if config.entity_tagger is not None:
        from leakaudit.audit.entity_tagger import entity_tagger

        entity_tagger(config.entity_tagger)
    if config.text is TextMode.FULL:
        from leakaudit.reports.redaction import refuse_full_in_ci

        refuse_full_in_ci()


def _steps_of_seeds(what: dict[str, Any], seeds: tuple[int, ...], first: Any) -> Steps:
    """Return the steps of every seed, one seed after the other.

    Step number i belongs to seed i // n, where n is the number of steps of a seed. One model is in memory at a time.

    Args:
        what: options of the simulation.
        seeds: all seeds.
        first: simulator of the first one.
    """
    steps, held = len(first), {0: first}

    def of(number: int) -> Any:
        if number not in held:
            held.clear()
            held[number] = simulator_of(what | {"seed": seeds[number]})
        return held[number]

    def snapshot(step: int) -> Snapshot:
        number, own = divmod(step, steps)
        made: Snapshot = of(number).snapshot(own)
        return replace(made, provenance=made.provenance.model_copy(update={"step": step, "seed": seeds[number]}))

    found, book = [], None
    for number in range(len(seeds)):
        found.append(of(number).digest)
        own = secrets_of(of(number))
        book = own if book is None or own is None else book.joined(own)
    digests = hashlib.sha256(" ".join(found).encode()).hexdigest()
    numbers, base = range(steps * len(seeds)), _base_of(what["model"])
    pairing = pairing_of(what["data"])
    return Steps(digests, first.tokenizer, numbers, snapshot, pairing=pairing, base_model=base, secrets=book)


def secrets_of(simulator: Any) -> SecretBook | None:
    """Return the secrets in a simulator's steps; None if they hold none."""
    book: SecretBook | None = getattr(simulator, "secrets", None)  # a simulator of arrays has none
    return book


def _base_of(model: Path) -> str:
    from leakaudit.models.base_weights import base_of_folder

    return base_of_folder(Path(model))


def pairing_of(data: Path) -> Pairing:
    """Return the key of the marks of steps: the digest of their data file."""
    from leakaudit.audit.pairing import Pairing
    from leakaudit.audit.simulation.tables import content_of

    return Pairing(hashlib.sha256(content_of(data)).digest())


def say_notices(simulator: Any, *, names: bool = True) -> None:
    """Print how the data of a simulation of texts was read, on stderr.

    The names of classes are the user's data: CI, whose logs are kept and shared, prints their number only.

    Args:
        simulator: of texts or of arrays.
        names: whether the classes may be named.
    """
    from leakaudit.reports.redaction import is_ci

    read = getattr(simulator, "read", None)
    for line in [] if read is None else read.notices(simulator.what.data, names=names and not is_ci()):
        say(f"note: {line}")


def simulator_of(what: dict[str, Any]) -> Any:
    """Return the simulator of the client steps, for texts or for arrays.

    A data file of tensors (.safetensors) holds arrays.

    Raises:
        ConfigError: an option for texts was given with arrays.
    """
    if what["data"].suffix != ".safetensors":
        from leakaudit.audit.simulation.texts import Simulator

        return Simulator(Simulation(**what))
    from leakaudit.audit.simulation.arrays import ArraySimulation, ArraySimulator

    of_text = ("grant", "lora_rank", "lora_targets", "lora_warmup", "secrets")
    if any(what[name] for name in of_text) or what["task"] != "classification":
        raise ConfigError("arrays are classified as they are: --task, --grant, --secrets and --lora-... are for texts")
    if what["clients"] != 1 or what["window"] != 1:
        raise ConfigError("--clients and --window are for texts: a step on arrays is one update of one client")
    fields = ("text_field", "label_field")
    if any(what[name] != name.partition("_")[0] for name in fields):
        raise ConfigError(
            "--text-field and --label-field name the fields of texts; arrays are called `inputs` and `labels`"
        )
    own = (*of_text, *fields, "task", "clients", "window")
    rest = {name: value for name, value in what.items() if name not in own}
    return ArraySimulator(ArraySimulation(**rest | {"model": str(what["model"])}))
