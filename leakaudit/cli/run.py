"""`leakaudit run` and `leakaudit worker`, which attack kept steps."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from leakaudit.cli.auditing import RESUME_HELP, Steps, audit_steps, check_policy, time_limit
from leakaudit.cli.common import EXISTING, FACTORY_HELP, IDENTITY_HELP, answering_nobody, clear_errors
from leakaudit.cli.memory import keep_freed_memory
from leakaudit.cli.stopping import seconds_to_work
from leakaudit.cli.threads import wait_passively
from leakaudit.errors import ConfigError
from leakaudit.parts import require_supported

if TYPE_CHECKING:
    from leakaudit.results.origin import Origin


@click.command(short_help="Audit a spool's snapshots, beside training or after it.")
@click.argument("spool", type=EXISTING)
@click.option("--once", is_flag=True, help="Audit what is there and stop, without waiting for more.")
@click.option("--device", help="cpu, cuda, cuda:1 or auto; default: the audit's own setting.")
@click.option("--identity", type=EXISTING, help=IDENTITY_HELP)
@click.option(
    "--idle-limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop after this time without a new snapshot; a trainer that died on another machine cannot report it. Default: wait for ever.",
)
@click.option("--retry", is_flag=True, help="Try the snapshots again that were set aside.")
@click.option("--allow-factory", "factories", multiple=True, metavar="PACKAGE.MODULE:NAME", help=FACTORY_HELP)
@time_limit
@clear_errors
def worker(
    spool: Path,
    once: bool,
    device: str | None,
    identity: Path | None,
    idle_limit: float | None,
    retry: bool,
    factories: tuple[str, ...],
    limit: float | None,
) -> None:
    """Audit the snapshots of SPOOL during training, or after it.

    SPOOL is an audit's folder or the spool in it.

    The callback starts this command by itself. You can also start it as a separate job, on any machine that sees the folder: it then
    audits the snapshots that `schedule: deferred` and `at_end: leave` keep. If it is started again, it continues where it stopped, also
    after a --time-limit, which leaves the other snapshots for the next start.
    """
    require_supported("`leakaudit worker`")
    from leakaudit.audit.devices import check_device
    from leakaudit.audit.worker import run_worker
    from leakaudit.cli.snapshots import private_keys, spool_of
    from leakaudit.storage.parent_watch import keep_memory_private

    keep_memory_private()
    vouch_for_makers(factories)
    if device is not None:
        check_device(device)
    keys = private_keys(identity)
    with answering_nobody():
        root = spool_of(spool)
        code = run_worker(
            root,
            once=once,
            device=device,
            identities=keys,
            idle_limit_s=idle_limit,
            retry=retry,
            work_s=None if limit is None else seconds_to_work(limit),
        )
    sys.exit(code)


@click.command(short_help="Attack kept snapshots once.")
@click.argument("snapshots", type=EXISTING, nargs=-1, required=True)
@click.option("--tokenizer", type=EXISTING, help="Folder of the tokenizer; default: the one kept in the spool.")
@click.option(
    "--config",
    "config_path",
    type=EXISTING,
    help="YAML of the audit: attacks, defences, budget; default: the battery for texts.",
)
@click.option("--out", type=EXISTING, default=Path("leakaudit-out"), show_default=True, help="Folder for the results.")
@click.option(
    "--artifact",
    "artifacts",
    type=EXISTING,
    multiple=True,
    help="A file that the training made, or a folder of them; repeatable.",
)
@click.option("--identity", type=EXISTING, help=IDENTITY_HELP)
@click.option("--allow-factory", "factories", multiple=True, metavar="PACKAGE.MODULE:NAME", help=FACTORY_HELP)
@click.option("--resume/--fresh", "resume", default=None, help=RESUME_HELP)
@time_limit
@click.option("--json", "as_json", is_flag=True, help="Print the summaries as one JSON document.")
@clear_errors
def run(
    snapshots: tuple[Path, ...],
    tokenizer: Path | None,
    config_path: Path | None,
    out: Path,
    artifacts: tuple[Path, ...],
    identity: Path | None,
    factories: tuple[str, ...],
    resume: bool | None,
    limit: float | None,
    as_json: bool,
) -> None:
    """Attack kept SNAPSHOTS once.

    SNAPSHOTS are snapshot folders, or a spool or folder that holds some.

    An earlier audit in --out moves to OUT.1, OUT.2 and so on. An audit that was stopped is continued, as by `simulate`.
    """
    require_supported("`leakaudit run`")
    wait_passively()
    keep_freed_memory()
    from leakaudit.cli.snapshots import private_keys
    from leakaudit.config.audit import AuditConfig, load_config
    from leakaudit.storage.parent_watch import keep_memory_private

    keep_memory_private()
    config = (load_config(config_path) if config_path else AuditConfig()).model_copy(update={"out_dir": out})
    if artifacts:
        config = config.model_copy(update={"artifacts": artifacts})
    if config.policy is not None:
        check_policy(config.policy)
    keys = private_keys(identity)
    audit_steps(
        config,
        lambda: steps_of_snapshots(snapshots, tokenizer, keys, factories),
        resume=resume,
        as_json=as_json,
        limit_s=limit,
    )


def steps_of_snapshots(
    places: tuple[Path, ...], tokenizer: Path | None, keys: tuple[str, ...], factories: tuple[str, ...]
) -> Steps:
    """Return the steps of kept snapshots.

    Args:
        places: snapshot folders, or spools or folders that hold some.
        tokenizer: folder of the tokenizer; None for the one kept in the spool.
        keys: private keys that open encrypted snapshots.
        factories: makers of models that the user vouches for.

    Raises:
        ConfigError: there is no snapshot, no tokenizer, or one step twice.
    """
    from leakaudit.models.array_classifier import reader_in
    from leakaudit.storage.snapshots import read_manifest, read_snapshot

    vouch_for_makers(factories)
    folders = _snapshot_folders(places)
    kept_tokenizer = tokenizer or _kept_tokenizer(folders[0])
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
        origin=_origin_in(folders[0].parent),
    )


def _origin_in(spool: Path) -> Origin | None:
    """Return what was known when the training of a spool began.

    None if it is no spool, or one of an earlier version.
    """
    from leakaudit.errors import SpoolError
    from leakaudit.storage.spool_files import read_audit_file

    try:
        return read_audit_file(spool).origin
    except (SpoolError, OSError):
        return None


def vouch_for_makers(factories: tuple[str, ...]) -> None:
    """Let snapshots name these makers of their models."""
    if factories:
        from leakaudit.models.factories import vouch_for

        vouch_for(*factories)


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
