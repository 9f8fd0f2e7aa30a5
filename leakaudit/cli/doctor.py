"""`leakaudit doctor`: checks of this machine and a configuration.

A positive control: an attack recovers a known sentence from a tiny model. What an audit of the user's model will cost is measured on one step.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from leakaudit.cli.common import EXISTING, clear_errors, say
from leakaudit.cli.forecast import Check, Measured, forecast
from leakaudit.errors import ConfigError, LeakAuditError
from leakaudit.exit_codes import ExitCode
from leakaudit.results.wording import counted, duration

if TYPE_CHECKING:
    from leakaudit.config.audit import AuditConfig
    from leakaudit.gate.policy import Policy

LOW_DISK_GIB = 2.0
"""Free space in GiB below which the doctor warns. A snapshot of a 110M-parameter model takes 0.8 GiB; one is written at a time."""


def examine(config_path: Path | None = None, step: Measured | None = None, steps: int | None = None) -> list[Check]:
    """Return the results of all checks.

    Args:
        config_path: YAML of the audit; None for the defaults.
        step: the step to measure; None measures nothing.
        steps: of the training; None if it is not asked for.
    """
    checks = [_versions(), _device()]
    checks += check_configuration(config_path)
    checks.append(_positive_control())
    if step is not None and all(check.state != "fail" for check in checks):
        checks += _costs(step, config_path, steps)
    return checks


def _costs(step: Measured, config_path: Path | None, steps: int | None) -> Iterator[Check]:
    """Yield what an audit of the user's model will cost, from one step of it."""
    from leakaudit.config.audit import AuditConfig, load_config
    from leakaudit.gate.policy import default_policy, load_policy
    from leakaudit.plugins.names import registered_names

    config = load_config(config_path) if config_path else AuditConfig()
    policy = load_policy(config.policy, registered_names()) if config.policy else default_policy()
    most = len(config.attacks) * len(config.defenses) * config.budget_s
    say(f"measuring one step, at most {duration(most)}")
    try:
        cost = step.cost(config)
    except LeakAuditError as error:
        yield Check("fail", str(error))
    else:
        yield from forecast(cost, config, policy, steps)


def _versions() -> Check:
    import torch
    import transformers

    from leakaudit import __version__
    from leakaudit.parts import too_old

    if why := too_old():
        return Check("fail", why)
    return Check(
        "ok",
        f"leakaudit {__version__}, python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    )


def _device() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("ok", f"device: cpu, {torch.get_num_threads()} threads (no GPU found)")
    free, _ = torch.cuda.mem_get_info()
    return Check("ok", f"device: {torch.cuda.get_device_name()}, {free / 2**30:.1f} GiB free")


def check_configuration(path: Path | None) -> Iterator[Check]:
    """Yield the checks of a configuration: plugins, plan, keys, folder."""
    from leakaudit.config.audit import AuditConfig, load_config
    from leakaudit.gate.policy import default_policy, load_policy
    from leakaudit.plugins.names import registered_names
    from leakaudit.registry import attacks, defenses
    from leakaudit.storage.encryption import parse_recipients

    try:
        config = load_config(path) if path else AuditConfig()
        yield Check(
            "ok",
            f"configuration: {path or 'built-in defaults'}, {counted(len(config.attacks), 'attack')}, "
            f"{counted(len(config.defenses), 'defence')}, {config.budget_s:g} s an attempt",
        )
        for registry, specs in (
            (attacks, config.attacks),
            (defenses, (*config.defenses, config.shipped_defense, *filter(None, [config.defense]))),
        ):
            for spec in specs:
                registry.create(spec.name, spec.options)
        policy = load_policy(config.policy, registered_names()) if config.policy else default_policy()
        yield _policy_check(config, policy)
        yield _folder(config.out_dir)
        if config.encrypt_to:
            parse_recipients(config.encrypt_to)
            yield Check(
                "ok", f"snapshots: encrypted to {len(config.encrypt_to)} public key(s) and, while it lasts, the run's"
            )
    except LeakAuditError as error:
        yield Check("fail", str(error))


def _policy_check(config: AuditConfig, policy: Policy) -> Check:
    """Compare what the configuration keeps with what the policy needs.

    It also says how long the attacks may take.
    """
    from leakaudit.capture.plan import steps_to_pass, time_in_words

    needed, most = steps_to_pass(policy), config.max_snapshots
    said = f"policy: {policy.name}, {len(policy.rules)} rules, needs {needed} steps to pass ({time_in_words(config)})"
    if most != "auto" and most < needed:
        return Check("warn", f"{said}; `max_snapshots: {most}` can never pass it: set {needed}, or auto")
    return Check("ok", said)


def _folder(out: Path) -> Check:
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free / 2**30
    if out.exists() and out.stat().st_mode & 0o077:
        return Check("warn", f"folder {out} can be read by others; snapshots hold training text: chmod 700 it")
    if free < LOW_DISK_GIB:
        return Check("warn", f"only {free:.1f} GiB free for {out}; steps are skipped when a snapshot does not fit")
    return Check("ok", f"folder {out}: {free:.0f} GiB free")


def _positive_control() -> Check:
    """Recover a canary sentence from an untrained tiny encoder by `span`."""
    import torch

    from leakaudit.attacks.span import Span
    from leakaudit.audit.canaries import CANARIES
    from leakaudit.client.batches import make_batch, public_facts
    from leakaudit.client.recipe import StepRecipe
    from leakaudit.client.step import ClientStep
    from leakaudit.client.truth import Truth
    from leakaudit.models.tiny_encoder import tiny_encoder
    from leakaudit.plugins.budget import Budget

    start = time.perf_counter()
    try:
        model, tokenizer = tiny_encoder(CANARIES)
        truth = Truth((make_batch(tokenizer, [CANARIES[0]], [1], "classification", 64),))
        facts = public_facts(model, tokenizer, task="classification", training=False)
        seen = ClientStep(model, truth, StepRecipe(training=False), facts).observe()
        guess = Span()(seen, torch.Generator().manual_seed(0), Budget(20))
    except Exception as error:  # the doctor reports every problem
        return Check("fail", f"positive control: the attack crashed ({type(error).__name__})")
    seconds = time.perf_counter() - start
    found = [sequence.token_ids for sequence in guess.sequences or ()]
    if found == truth.sequences():
        return Check("ok", f"positive control: span recovered the canary sentence in {seconds:.1f} s")
    return Check(
        "fail", f"positive control: span did not recover the canary sentence ({seconds:.1f} s); the audit is blind"
    )


@click.command(short_help="Check this machine and a configuration.")
@click.option("--config", "config_path", type=EXISTING, help="YAML of the audit to check as well; default: none.")
@click.option("--model", type=EXISTING, help="Folder of your model: one step of it is measured. Default: none.")
@click.option(
    "--data", type=EXISTING, help="Texts and labels for that step, as --data of `simulate`; default: sentences of ours."
)
@click.option("--text-field", default="text", show_default=True, help="Field of --data that holds the text.")
@click.option("--label-field", default="label", show_default=True, help="Field of --data that holds the class.")
@click.option(
    "--task",
    type=click.Choice(["classification", "causal-lm"]),
    default="classification",
    show_default=True,
    help="What the model is trained for.",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Texts of that step.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Steps of your training, to print minutes and GB before it; default: they are not printed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the checks as one JSON document.")
@clear_errors
def doctor(
    config_path: Path | None,
    model: Path | None,
    data: Path | None,
    text_field: str,
    label_field: str,
    task: Literal["classification", "causal-lm"],
    batch_size: int,
    steps: int | None,
    as_json: bool,
) -> None:
    """Check this machine and a configuration.

    The last check recovers a known sentence from a tiny model. With --model one step of that model is audited, and with --steps the
    minutes and GB of the whole audit are printed. Exit code 0, or 2 if a check fails.
    """
    if model is None and (data is not None or steps is not None):
        raise ConfigError("--data and --steps are about the step of a model that is measured: give --model as well")
    step = None if model is None else Measured(model, data, task, batch_size, text_field, label_field)
    checks = examine(config_path, step, steps)
    if as_json:
        click.echo(json.dumps([vars(check) for check in checks], indent=1))
    else:
        for check in checks:
            click.echo(f"{check.state:5} {check.sentence}")
    sys.exit(ExitCode.USAGE if any(check.state == "fail" for check in checks) else ExitCode.PASS)
