"""`leakaudit replay`: an attempt once more, on a kept snapshot."""

from __future__ import annotations

import difflib
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.common import EXISTING, FACTORY_HELP, IDENTITY_HELP, answering_nobody, clear_errors, say
from leakaudit.cli.threads import wait_passively
from leakaudit.errors import ConfigError
from leakaudit.exit_codes import ExitCode
from leakaudit.parts import require_supported

if TYPE_CHECKING:
    from leakaudit.audit.entries import AttemptId
    from leakaudit.audit.replay import Replayed
    from leakaudit.results.journal import JournalEntry
    from leakaudit.results.schema import Attempt, Results, StepRecord

MOST_DIFFERENCES = 8
"""Most differences that the terminal shows; `--json` has all."""

_KEEP = "`keep_snapshots: true` in the audit's configuration keeps them"
_BLOCKS = dict(zip("01234abcd", "·░▒▓█░▒▓█", strict=True))
"""Character of a strip -> its block in the terminal."""


@click.command(short_help="Make an attempt again on a kept snapshot, and compare.")
@click.argument("run_dir", metavar="RUN", type=EXISTING)
@click.option("--step", type=int, required=True, help="Training step, as `leakaudit show RUN` names it.")
@click.option("--attack", required=True, help="Label of the attack.")
@click.option("--defense", default="none", show_default=True, help="Label of the defence.")
@click.option(
    "--text",
    type=click.Choice(["masked", "full"]),
    default="masked",
    show_default=True,
    help="`full` shows the recovered text.",
)
@click.option("--device", help="cpu, cuda, cuda:1 or auto; default: the audit's own setting.")
@click.option("--identity", type=EXISTING, help=IDENTITY_HELP)
@click.option("--allow-factory", "factories", multiple=True, metavar="PACKAGE.MODULE:NAME", help=FACTORY_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@clear_errors
def replay(
    run_dir: Path,
    step: int,
    attack: str,
    defense: str,
    text: str,
    device: str | None,
    identity: Path | None,
    factories: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make an attempt of the audit in RUN again, and compare it with the stored one.

    It needs the step's snapshot, which `keep_snapshots: true` keeps. The same code makes it with the same seed; RUN is not changed. Exit codes: 0 the same again;
    3 something differs; 4 something differs, and so do the versions, the machine or the time that the attack had; 2 an unknown name, no
    snapshot or no key; 5 results or snapshot cannot be read.
    """
    require_supported("`leakaudit replay`")
    import leakaudit.audit.replay  # noqa: F401  (without torch, this says what to install before anything is read)
    from leakaudit.results.files import load_results

    results = load_results(run_dir)
    which = _find(results, step, attack, defense)
    _check_snapshot(run_dir, results, step)
    wait_passively()
    done = _replayed(run_dir, results, which, text, device, identity, factories)
    if as_json:
        click.echo(json.dumps(_as_data(done, text), indent=1))
    else:
        for line in _lines(done, step):
            click.echo(line)
    if done.equal:
        sys.exit(ExitCode.PASS)
    sys.exit(ExitCode.INCONCLUSIVE if done.causes else ExitCode.FAIL)


def _replayed(
    run_dir: Path,
    results: Results,
    which: AttemptId,
    text: str,
    device: str | None,
    identity: Path | None,
    factories: tuple[str, ...],
) -> Replayed:
    from leakaudit.audit.replay import replay as replay_attempt
    from leakaudit.audit.spool_audit import WorkerOptions
    from leakaudit.audit.worker import check_key, quiet_libraries
    from leakaudit.cli.run import vouch_for_makers
    from leakaudit.cli.snapshots import private_keys
    from leakaudit.results.schema import TextMode
    from leakaudit.storage.parent_watch import keep_memory_private
    from leakaudit.storage.spool import Spool

    keep_memory_private()
    quiet_libraries()
    vouch_for_makers(factories)
    options = WorkerOptions(device, private_keys(identity), notify=say)
    spool, audit_file = Spool.open(run_dir / "spool")
    check_key(spool, options)
    with answering_nobody():
        return replay_attempt(spool, audit_file, results, which, options, TextMode(text))


# ------------------------------------------------------------------------------------------------ finding the attempt
def _find(results: Results, step: int, attack: str, defense: str) -> AttemptId:
    """Return the labels of an attempt that ran.

    Raises:
        ConfigError: the results hold no such attempt, or the attack did not run in it.
    """
    from leakaudit.results.replay_command import attacked_defense

    record = _record(results, step)
    here = [attempt for attempt in results.attempts if attempt.step == record.id]
    _known("attack", attack, sorted({attempt.attack for attempt in here}), step)
    mine = {attempt.defense: attempt for attempt in here if attempt.attack == attack}
    _known("defence", defense, list(mine), step)
    found = mine.get(attacked_defense(record, defense), mine[defense])
    if found.status.value in ("skipped", "not_needed"):
        raise ConfigError(
            f"step {step}: {attack} under {defense} did not run, so there is nothing to replay: {found.reason}"
        )
    from leakaudit.audit.entries import AttemptId

    return AttemptId(found.step, found.attack, found.defense)


def _record(results: Results, step: int) -> StepRecord:
    for record in results.steps:
        if record.step == step:
            return record
    near = sorted(sorted((one.step for one in results.steps), key=lambda one: abs(one - step))[:6])
    raise ConfigError(f"this audit has no step {step}; near it are {', '.join(map(str, near)) or 'none'}")


def _known(kind: str, name: str, known: Sequence[str], step: int) -> None:
    """Refuse a label that no attempt on the step has."""
    if name in known:
        return
    near = difflib.get_close_matches(name, known, 3)
    like = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"step {step} has no {kind} {name!r}; {like}it has {', '.join(known) or 'none'}")


def _check_snapshot(run_dir: Path, results: Results, step: int) -> None:
    """Refuse a step whose snapshot is not kept.

    Raises:
        ConfigError: it is not. The message says why, and what to do.
    """
    from leakaudit.results.replay_command import kept_snapshot

    if results.run.simulated:
        raise ConfigError(
            f"{run_dir}: `leakaudit simulate` made its steps and keeps no snapshots; the same command makes the run again: "
            f"{results.run.command or 'leakaudit simulate'}"
        )
    place = kept_snapshot(run_dir, step)
    if place.is_dir():
        return
    spool = place.parent
    if not (spool / "audit.json").is_file():
        raise ConfigError(
            f"{run_dir}: holds no snapshots (no spool/audit.json): they were removed after the audit, or another folder has them; {_KEEP}"
        )
    for suffix, state in (("ready", "waits for attacks"), ("run", "is under attack"), ("held", "waits for a round")):
        if place.with_suffix(f".{suffix}").exists():
            raise ConfigError(f"step {step}: its snapshot {state}; `leakaudit worker RUN` finishes it first")
    if place.with_suffix(".bad").exists():
        raise ConfigError(f"step {step}: its snapshot was set aside; `leakaudit snapshots ls RUN` says why")
    kept = sorted(int(path.stem) for path in spool.glob("*.kept") if path.stem.isdecimal())
    others = f"; kept are those of steps {', '.join(map(str, kept[:6]))}" if kept else ""
    raise ConfigError(f"step {step}: its snapshot is gone; {_KEEP}{others}")


# -------------------------------------------------------------------------------------------------------- the answer
def _lines(done: Replayed, step: int) -> Iterator[str]:
    from leakaudit.reports.escaping import plain
    from leakaudit.results.wording import counted

    again = done.again.attempt
    yield plain(f"step {step}: {again.attack} under {again.defense}, seed {again.seed}")
    yield _wrapped("stored  ", _outcome(done.stored))
    yield _wrapped("again   ", _outcome(again))
    yield from _texts(done.again)
    if done.equal:
        yield f"EQUAL   all {counted(done.compared, 'value')} are the same again, apart from the seconds"
        return
    yield f"DIFFERS {len(done.differences)} of {counted(done.compared, 'value')}"
    for one in done.differences[:MOST_DIFFERENCES]:
        yield _wrapped("  ", plain(f"{one.what}: {_shown(one.stored)} stored, {_shown(one.again)} again"))
    if len(done.differences) > MOST_DIFFERENCES:
        yield f"  and {len(done.differences) - MOST_DIFFERENCES} more; --json has all"
    for cause in done.causes:
        yield _wrapped("  ", plain(f"may be the cause: {cause}"))


def _wrapped(head: str, text: str) -> str:
    """Return a text in lines of the terminal's width, indented like the first one."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _outcome(attempt: Attempt) -> str:
    from leakaudit.reports.escaping import plain
    from leakaudit.results.schema import Score

    found = ", ".join(attempt.events) or ("no leak event" if attempt.finished else attempt.status.value)
    numbers = [f"{name} {score.value:.3g}" for name, score in attempt.scores.items() if isinstance(score, Score)]
    return plain("; ".join(filter(None, (f"{attempt.wall_s:.1f} s", found, ", ".join(numbers), attempt.reason))))


def _texts(entry: JournalEntry) -> Iterator[str]:
    """Yield what was recovered of each text.

    Its strip, and in text mode full the words.
    """
    from leakaudit.reports.escaping import plain

    samples = {sample.sequence: sample for sample in entry.samples}
    if any(found.strip for found in entry.attempt.sequences):
        yield "recovered, in sixteenths of each text (░ to █: a quarter to all of it):"
    for found in entry.attempt.sequences:
        if found.strip:
            yield f"  {found.id}  {''.join(_BLOCKS[cell] for cell in found.strip)}  {found.min_tokens_bucket} tokens"
        sample = samples.get(found.id)
        if sample is not None and sample.true_tokens is not None:
            yield plain(f"    true   {_words(sample.true_pattern, sample.true_tokens)}")
        if sample is not None and sample.guess_tokens is not None:
            yield plain(f"    again  {_words(sample.guess_pattern or '', sample.guess_tokens)}")


def _words(pattern: str, tokens: Sequence[str]) -> str:
    from leakaudit.reports.redaction import runs

    return "".join(run.text for run in runs(pattern, tokens)).strip()


def _as_data(done: Replayed, text: str) -> dict[str, Any]:
    again = done.again.attempt
    document: dict[str, Any] = {
        "step": again.step,
        "attack": again.attack,
        "defense": again.defense,
        "seed": again.seed,
        "equal": done.equal,
        "compared": done.compared,
        "differences": [{"what": one.what, "stored": one.stored, "again": one.again} for one in done.differences],
        "causes": list(done.causes),
        "stored": done.stored.model_dump(mode="json"),
        "again": again.model_dump(mode="json"),
    }
    if text == "full":
        document["texts"] = [sample.model_dump(mode="json") for sample in done.again.samples]
    return document
