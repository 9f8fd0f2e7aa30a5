"""`leakaudit snapshots`: list, check, hold and remove kept snapshots."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.common import EXISTING, IDENTITY_HELP, clear_errors
from leakaudit.config.duration import length_of
from leakaudit.errors import ConfigError
from leakaudit.exit_codes import ExitCode
from leakaudit.results.wording import short_duration, size_on_disk

if TYPE_CHECKING:
    from leakaudit.storage.retention import Item, Purged
    from leakaudit.storage.spool import Spool


def spool_of(path: Path) -> Path:
    """Return the spool, given its own folder or the audit's folder."""
    return path / "spool" if (path / "spool" / "audit.json").is_file() else path


def private_keys(path: Path | None) -> tuple[str, ...]:
    """Return the private keys in a file, or in stdin for `-`.

    If `path` is None, the environment may name the file. Without a file there are no keys.

    Raises:
        ConfigError: the file cannot be read, others can read it, or it holds no key.
    """
    from leakaudit.storage.encryption import IDENTITY_VARIABLE, identities_in, read_identities

    if path is None:
        named = os.environ.get(IDENTITY_VARIABLE)
        return read_identities(Path(named)) if named else ()
    return identities_in(sys.stdin.read(), "stdin") if str(path) == "-" else read_identities(path)


def _age(text: str) -> timedelta:
    """Read the value of `--older-than`.

    Raises:
        ConfigError: it is not a length of time.
    """
    try:
        return length_of(text.strip())
    except ValueError as error:
        raise ConfigError(f"--older-than: {error}") from None


def _open(path: Path) -> Spool:
    from leakaudit.storage.spool import Spool

    return Spool.open(spool_of(path))[0]


@click.group(short_help="List, check, hold and remove kept snapshots.")
def snapshots() -> None:
    """List, check, hold and remove the snapshots of an audit.

    Snapshots hold the private batch.
    """


@snapshots.command("ls", short_help="List them: state, age, size, keys, holds.")
@click.argument("audit", type=EXISTING)
@click.option("--json", "as_json", is_flag=True, help="Print the list as one JSON document.")
@clear_errors
def list_command(audit: Path, as_json: bool) -> None:
    """List the snapshots of AUDIT: state, age, size, keys, holds.

    AUDIT is an audit's folder or the spool in it.
    """
    from leakaudit.storage.retention import counted, items

    spool, now = _open(audit), datetime.now(UTC)
    found = items(spool)
    if as_json:
        click.echo(
            json.dumps(
                {"spool": str(spool.root), "snapshots": [_as_json(spool, item, now) for item in found]}, indent=1
            )
        )
        return
    if not found:
        click.echo(f"no snapshots in {spool.root}")
        return
    rows: list[tuple[str, ...]] = [("step", "state", "age", "size", "opens with", "goes")]
    rows += [_row(spool, item, now) for item in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    click.echo(f"{counted(found)}, {size_on_disk(spool.used_bytes())}")


def _as_json(spool: Spool, item: Item, now: datetime) -> dict[str, Any]:
    age = item.age(now)
    return {
        "name": item.path.name,
        "step": item.step,
        "state": item.state,
        "created": item.created.isoformat(timespec="seconds") if item.created else None,
        "age_s": None if age is None else round(age.total_seconds()),
        "bytes": item.size,
        "encrypted_to": list(item.encrypted_to),
        "held": item.held,
        "why": item.why,
        "goes": _fate(spool, item, now),
    }


def _row(spool: Spool, item: Item, now: datetime) -> tuple[str, ...]:
    age = item.age(now)
    return (
        item.path.stem if item.step is None else str(item.step),
        f"{item.state}: {item.why}" if item.why else item.state,
        "unknown" if age is None else short_duration(age.total_seconds()),
        size_on_disk(item.size),
        ", ".join(f"{key[:12]}..." for key in item.encrypted_to) or "no key: in clear",
        _fate(spool, item, now),
    )


def _fate(spool: Spool, item: Item, now: datetime) -> str:
    """Return when a snapshot is removed automatically, in words."""
    if item.held:
        return f"held: {item.held}"
    if not item.why and item.path.suffix != ".kept" and not spool.config.keep_snapshots:
        return "after its audit"
    age = item.age(now)
    if age is None:
        return "by hand only: its age is unknown"
    left = timedelta(days=spool.config.retention_days) - age
    return f"in {short_duration(left.total_seconds())}" if left > timedelta() else "with the next run here"


@snapshots.command(short_help="Check that they are whole, private and encrypted as asked.")
@click.argument("audit", type=EXISTING)
@click.option("--identity", type=EXISTING, help=IDENTITY_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as one JSON document.")
@clear_errors
def verify(audit: Path, identity: Path | None, as_json: bool) -> None:
    """Check that the snapshots of AUDIT are whole, unchanged and private.

    It also checks that they are encrypted as asked. Exit code 0, or 5 if a check fails.

    With a private key it also opens encrypted snapshots.
    """
    from leakaudit.storage.retention import check_folder, check_snapshot, counted, items

    keys = private_keys(identity)
    spool = _open(audit)
    found = [(spool.root.name, problem) for problem in check_folder(spool)]
    checked = items(spool)
    for item in checked:
        found += [(item.path.name, problem) for problem in check_snapshot(spool, item, keys)]
    if as_json:
        problems = [{"name": name, "problem": problem} for name, problem in found]
        click.echo(json.dumps({"checked": len(checked), "problems": problems}, indent=1))
    else:
        for name, problem in found:
            click.echo(f"{name}: {problem}")
        sealed = sum(bool(item.encrypted_to) for item in checked)
        note = "" if keys or not sealed else f"; {sealed} encrypted and not opened, which takes --identity"
        old = sum(not item.sealed for item in checked)
        note += (
            f"; {old} of an earlier version, which wrote no digest of snapshot.json: a change in it is not noticed"
            if old
            else ""
        )
        problems_found = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        click.echo(f"{counted(checked)} checked, {problems_found}{note}")
    sys.exit(ExitCode.ERROR if found else ExitCode.PASS)


@snapshots.command(short_help="Remove them, and with the last one the key of the hashes.")
@click.argument("audit", type=EXISTING)
@click.option("--older-than", metavar="AGE", help="Such as 7d or 12h; default: the audit's own `retention_days`.")
@click.option(
    "--all", "everything", is_flag=True, help="All of them, of any age, even those that still wait for their audit."
)
@click.option(
    "--step", "steps", type=int, multiple=True, help="Only this step, of any age; may be given several times."
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON document.")
@clear_errors
def purge(
    audit: Path, older_than: str | None, everything: bool, steps: tuple[int, ...], dry_run: bool, as_json: bool
) -> None:
    """Remove snapshots of AUDIT; results and report stay.

    With the last snapshot the key of the audit's hashes is removed.

    Held snapshots and those in use also stay. For each removed snapshot one line is written to purged.jsonl.
    """
    from leakaudit.storage.retention import counted
    from leakaudit.storage.retention import purge as purge_snapshots

    if older_than is not None and (everything or steps):
        raise ConfigError("--older-than does not go with --all or --step, which remove whatever the age")
    spool = _open(audit)
    limit = timedelta(days=spool.config.retention_days) if older_than is None else _age(older_than)
    whatever = everything or bool(steps)
    done = purge_snapshots(
        spool,
        now=datetime.now(UTC),
        older_than=None if whatever else limit,
        steps=steps,
        finished_only=not whatever and spool.under_way(),
        dry_run=dry_run,
    )
    if as_json:
        click.echo(json.dumps(_purged_json(done, dry_run), indent=1))
        return
    verb = "would be removed" if dry_run else "removed"
    click.echo(f"{counted(done.removed)} {verb} ({size_on_disk(done.bytes)})" + _exceptions(done))
    if not whatever and not done.removed:
        click.echo(
            f"only those older than {short_duration(limit.total_seconds())} go; --all or --step N removes others"
        )
    if done.key_destroyed:
        click.echo("the key of the run's hashes is destroyed: nobody can try texts against its results any more")


def _exceptions(done: Purged) -> str:
    held = f"; {len(done.held)} held: {done.held[0].held}" if done.held else ""
    return held + (f"; {len(done.in_use)} in use" if done.in_use else "")


def _purged_json(done: Purged, dry_run: bool) -> dict[str, Any]:
    return {
        "removed": [item.path.name for item in done.removed],
        "held": [item.path.name for item in done.held],
        "in_use": [item.path.name for item in done.in_use],
        "bytes": done.bytes,
        "key_destroyed": done.key_destroyed,
        "dry_run": dry_run,
    }


@snapshots.command(short_help="Forbid that they are removed.")
@click.argument("audit", type=EXISTING)
@click.option(
    "--step", "steps", type=int, multiple=True, help="Only this step; may be given several times. Default: everything."
)
@click.option("--reason", help="Why, for whoever wants to remove them; required but for --release.")
@click.option("--release", "let_go", is_flag=True, help="Allow their removal again.")
@clear_errors
def hold(audit: Path, steps: tuple[int, ...], reason: str | None, let_go: bool) -> None:
    """Forbid the removal of snapshots of AUDIT.

    Held snapshots are not removed after their audit, by age, or by `purge`.
    """
    from leakaudit.storage.retention import counted, unhold
    from leakaudit.storage.retention import hold as hold_snapshots

    spool = _open(audit)
    if let_go:
        click.echo(f"{counted(unhold(spool, steps))} released; `leakaudit snapshots ls` says when they go")
        return
    if not (reason or "").strip():
        raise ConfigError("--reason is missing: say why they are held, for whoever wants to remove them")
    found = hold_snapshots(spool, steps, str(reason).strip(), now=datetime.now(UTC))
    more = "" if steps else ", and whatever else comes into this spool"
    click.echo(f"{counted(found)} held{more}; --release takes it off again")


@snapshots.command(short_help="Make a pair of keys to encrypt them.")
@click.argument("file", type=EXISTING)
@clear_errors
def keygen(file: Path) -> None:
    """Make a pair of keys.

    The private key is written to FILE (0600); the public key is printed, for `encrypt_to`.

    Keep FILE away from the machine that trains. The format is that of `age`; its `age-keygen` makes the same files.
    """
    from leakaudit.storage.encryption import write_identity

    public = write_identity(file)
    click.echo(public)
    click.echo(f"private key in {file}: without it nobody can open what is encrypted to the public one", err=True)
