"""`leakaudit doctor`: checks of this machine and a configuration.

The last check is a positive control: an attack recovers a known sentence from a tiny model.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.errors import LeakAuditError
from leakaudit.exit_codes import ExitCode

if TYPE_CHECKING:
    from leakaudit.config.audit import AuditConfig
    from leakaudit.gate.policy import Policy

LOW_DISK_GIB = 2.0
"""Free space in GiB below which the doctor warns. A snapshot of a 110M-parameter model takes 0.8 GiB; one is written at a time."""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report."""

    state: Literal["ok", "warn", "fail"]
    sentence: str


def examine(config_path: Path | None = None) -> list[Check]:
    """Return the results of all checks."""
    checks = [_versions(), _device()]
    checks += check_configuration(config_path)
    checks.append(_positive_control())
    return checks


def _versions() -> Check:
    import torch
    import transformers

    from leakaudit import __version__

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
            f"configuration: {path or 'built-in defaults'}, {len(config.attacks)} attacks, "
            f"{len(config.defenses)} defences, {config.budget_s:g} s an attempt",
        )
        for registry, specs in ((attacks, config.attacks), (defenses, (*config.defenses, config.shipped_defense))):
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
@click.option("--config", "config_path", type=EXISTING, help="YAML of the audit to check as well.")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as one JSON document.")
@clear_errors
def doctor(config_path: Path | None, as_json: bool) -> None:
    """Check this machine and a configuration.

    The last check recovers a known sentence from a tiny model. Exit code 0, or 2 if a check fails.
    """
    checks = examine(config_path)
    if as_json:
        click.echo(json.dumps([vars(check) for check in checks], indent=1))
    else:
        for check in checks:
            click.echo(f"{check.state:5} {check.sentence}")
    sys.exit(ExitCode.USAGE if any(check.state == "fail" for check in checks) else ExitCode.PASS)
