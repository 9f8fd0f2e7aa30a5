"""The small files of a spool, through which trainer and worker communicate."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leakaudit.config.audit import AuditConfig
from leakaudit.config.saved_book import SavedBook
from leakaudit.errors import SpoolError
from leakaudit.files.private_files import write_atomic
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.results.binding import SUBJECT
from leakaudit.results.not_audited import NOT_AUDITED
from leakaudit.results.origin import Origin
from leakaudit.results.schema import Battery, Overhead, Privacy

SCHEMA = "leakaudit.audit/1.0"

AUDIT_FILE = "audit.json"
FINISHED = "finished.json"
HOLD = "hold.json"
"""File that says that a snapshot, or a whole spool, must not be removed."""

HELD = ".held"
"""Suffix of the folder of a round until somebody says what was sent of it."""

CRASHES = "deaths"
"""File in a snapshot with the number of workers that crashed while they read it, or between two attempts on it."""

REASON = "reason.json"
"""File in a snapshot that was set aside, with the reason."""

BATTERY = "battery.json"
"""File with the attacks and defences that the worker runs on each snapshot."""

MAX_JSON_BYTES = 1024 * 1024
"""Most bytes of a file such as `audit.json`. Our choice: the longest configuration has a tenth of it."""

RED_LINE = "red_line.json"
"""File in which the audit notes a leak that ends the training (`stop_on`)."""

LEFT_BY_AUDIT = (
    NOT_AUDITED, "verdict.json", SUBJECT, "report.html", "results.json", "worker.log", "state.json", "journal.jsonl", "spool",
)  # fmt: skip
"""Files that an audit leaves in its folder, in the order in which they are moved aside. The first are those that a gate could
confuse with files of the new run."""


class AuditFile(BaseModel):
    """`audit.json`: all that a worker needs, so that a user can also start one."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: str = Field(default=SCHEMA, alias="schema")
    config: AuditConfig
    trainer_pid: int
    trainer_host: str = ""
    command: str = ""
    origin: Origin | None = None
    """What was known when the training began; None in a spool of an earlier version."""
    secrets: SavedBook | None = None
    """The invented records in the training data; None if there are none."""
    salt: str = ""
    """Random bytes in hex; empty without encryption. If the key of the hashes is derived from a private key, the salt makes it different
    for each run. Without the salt nobody can derive the key again, so the salt is destroyed with the last snapshot."""

    def trainer_is_here(self) -> bool:
        """Return whether the trainer ran on this host, where its process id is valid."""
        return self.trainer_host == socket.gethostname()

    def trainer_is_gone(self) -> bool:
        """Return whether no process has the trainer's id; False on another host."""
        if not self.trainer_is_here():
            return False
        try:
            return not psutil.pid_exists(self.trainer_pid)
        except OverflowError:  # larger than any process id
            return True


class Totals(BaseModel):
    """`finished.json`: the totals that the trainer counted."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    total_steps: int | None = None
    kept: int = 0
    skipped: int = 0
    """Due steps that came while the step before was still being written to the disk."""
    too_full: int = 0
    """Due steps for which the spool or the disk had not enough space."""
    not_finite: int = 0
    """Due steps whose update held NaN or infinity."""
    failed: int = 0
    """Due steps that could not be kept for another reason, which the training's log names."""
    overhead: Overhead = Overhead()
    privacy: tuple[Privacy, ...] = ()
    """What the accountant of a private training said at its end."""
    interrupted: bool = False

    def not_kept(self, config: AuditConfig) -> list[tuple[int, str]]:
        """Return pairs of a number of due steps that were not kept, and the reason.

        Reasons without a step are left out.
        """
        reasons = (
            (self.skipped, "the step before was still on its way to the disk"),
            (self.too_full, f"the spool or the disk was full (`max_spool_gb: {config.max_spool_gb:g}`)"),
            (self.not_finite, "the update was not finite"),
            (self.failed, "the step could not be recorded; the log of the training says why"),
        )
        return [(number, why) for number, why in reasons if number]


class RedLine(BaseModel):
    """`red_line.json`: a leak that the policy forbids at any number."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rule: str
    """Id of the rule."""
    sentence: str
    """What was observed and what the policy allows, in numbers."""


def write_red_line(root: Path, line: RedLine) -> None:
    """Note in a spool that a red line was crossed."""
    write_atomic(root / RED_LINE, line.model_dump_json())


def read_red_line(root: Path) -> RedLine | None:
    """Return the red line that was crossed; None without one, or if it cannot be read."""
    path = root / RED_LINE
    if not path.exists():
        return None
    try:
        return RedLine.model_validate_json(read_bounded(path, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return None


def read_audit_file(root: Path) -> AuditFile:
    """Read `audit.json` of a spool.

    Raises:
        SpoolError: the file cannot be read, or a newer version wrote it.
    """
    path = root / AUDIT_FILE
    try:
        raw = parse_json(read_bounded(path, MAX_JSON_BYTES))
        found = ascii(str(raw.get("schema"))[:60])[1:-1]
        if not found.startswith("leakaudit.audit/1."):
            raise SpoolError(f"{path}: schema {found}; this version reads leakaudit.audit/1.x. Upgrade leakaudit.")
        return AuditFile.model_validate(raw)
    except ValidationError as error:
        raise SpoolError(f"{path}: cannot be read: {_first_problem(error)}") from None
    except (OSError, ValueError, AttributeError) as error:
        why = str(error) if type(error) is ValueError else type(error).__name__
        raise SpoolError(f"{path}: cannot be read ({why})") from None


def _first_problem(error: ValidationError) -> str:
    """Return the place at which a file does not fit its schema, without the value."""
    first = error.errors()[0]
    where = ascii(".".join(str(part) for part in first["loc"])[:200])[1:-1]
    return f"{where}: {first['msg'][:200]} ({error.error_count()} problems)"


def write_audit_file(root: Path, audit: AuditFile) -> None:
    """Write `audit.json`.

    Raises:
        OSError: it cannot be written.
    """
    write_atomic(root / AUDIT_FILE, audit.model_dump_json(by_alias=True, indent=1))


def read_totals(root: Path) -> Totals | None:
    """Return the trainer's totals once it has finished, else None.

    The totals are empty if the file cannot be read.
    """
    path = root / FINISHED
    if not path.is_file():
        return None
    try:
        return Totals.model_validate_json(read_bounded(path, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return Totals()


def read_battery(root: Path) -> Battery | None:
    """Return the battery that a worker runs on each snapshot.

    None if no worker has written it yet.
    """
    try:
        return Battery.model_validate_json(read_bounded(root / BATTERY, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return None


def write_battery(root: Path, battery: Battery) -> None:
    """Write the battery that the worker runs on each snapshot.

    From it, the trainer computes how many attempts remain.
    """
    write_atomic(root / BATTERY, battery.model_dump_json(indent=1))


def forget_salt(root: Path) -> bool:
    """Destroy the salt of the key of the run's hashes.

    There is a salt if the key is derived from a private key.

    Returns:
        Whether there was a salt.

    Raises:
        SpoolError: audit.json cannot be read.
    """
    audit = read_audit_file(root)
    if not audit.salt:
        return False
    write_audit_file(root, audit.model_copy(update={"salt": ""}))
    return True


def reason_in(path: Path) -> str:
    """Return the reason in a file; empty if it cannot be read."""
    try:
        return str(parse_json(read_bounded(path, MAX_JSON_BYTES))["reason"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""
