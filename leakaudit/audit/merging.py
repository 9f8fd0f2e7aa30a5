"""Joins the shards of one audit: `simulate --shard 1/8` to `8/8` into one folder.

The joined folder holds what the same audit on one machine would have written, except for times, ids, and the keyed hashes, for which every
shard has a key of its own.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import ValidationError

from leakaudit.audit.battery import Plugins, described
from leakaudit.audit.conformance.log import LOG_FILE as CONFORMANCE
from leakaudit.audit.membership.log import FILE as MEMBERSHIP
from leakaudit.audit.publish import check_text_mode, publish
from leakaudit.audit.results import ResultsBuilder, RunEnd
from leakaudit.audit.run_folder import run_folder
from leakaudit.audit.scoring.score import applied_metrics
from leakaudit.audit.state import JOURNAL, STATE, SavedShard, SavedState, Unfinished
from leakaudit.audit.step_record import joined_regime
from leakaudit.config.audit import AuditConfig
from leakaudit.errors import ConfigError, ResultsError
from leakaudit.files.private_files import write_atomic
from leakaudit.files.regular_files import read_regular
from leakaudit.plugins.catalogue import catalogue
from leakaudit.results.files import with_digest
from leakaudit.results.journal import JournalEntry, load_journal
from leakaudit.results.origin import Origin
from leakaudit.results.schema import Attempt, AttemptStatus, Battery, Results
from leakaudit.results.wording import counted
from leakaudit.storage.locks import is_folder_locked

SAME_VERSIONS = ("torch", "transformers")
"""Versions that all shards must share, because other versions may compute other results. The battery's digest holds that of leakaudit."""

STOPPED = "its shard was stopped before this attempt"
"""Reason of an attempt that an unfinished shard lacks."""


@dataclass(frozen=True)
class ShardFolder:
    """The folder of one shard, as its files are on the disk."""

    folder: Path
    saved: SavedState
    own: SavedShard
    entries: tuple[JournalEntry, ...]

    @classmethod
    def read(cls, folder: Path) -> ShardFolder:
        """Read a folder.

        Raises:
            ResultsError: it holds no shard, or cannot be read.
            ConfigError: the shard is at work.
        """
        if is_folder_locked(folder):
            raise ConfigError(f"{folder}: its audit is still at work; wait for it")
        try:
            saved = SavedState.model_validate_json((folder / STATE).read_bytes())
        except FileNotFoundError:
            raise ResultsError(
                f"{folder}: holds no audit; give the --out folders of `leakaudit simulate --shard`"
            ) from None
        except (OSError, ValidationError) as error:
            raise ResultsError(f"{folder / STATE}: cannot be read ({type(error).__name__})") from None
        if saved.shard is None:
            raise ResultsError(f"{folder}: holds a whole audit and no shard of one")
        return cls(folder, saved, saved.shard, tuple(load_journal(folder / JOURNAL)))

    @property
    def last_step(self) -> int:
        """Number of its latest step; -1 if it has none."""
        return max((step.step for step in self.saved.steps), default=-1)


@dataclass(frozen=True)
class Shards:
    """Shards of one audit, ordered by number."""

    found: tuple[ShardFolder, ...]
    missing: tuple[int, ...]
    """Numbers of the shards that are not there."""

    @property
    def unfinished(self) -> tuple[ShardFolder, ...]:
        """The shards that were stopped before their end."""
        return tuple(one for one in self.found if not one.saved.finished)


def shards_in(folders: Sequence[Path]) -> Shards:
    """Read the shards of one audit.

    Raises:
        ResultsError: a folder holds no shard, two hold shards of different audits, or one shard is there twice.
        ConfigError: a shard is at work.
    """
    read = sorted((ShardFolder.read(folder) for folder in folders), key=lambda one: one.own.shard.index)
    first = read[0]
    for other in read[1:]:
        if differences := ", ".join(_differences(first, other)):
            raise ResultsError(
                f"{first.folder} and {other.folder}: not shards of the same audit; these differ: {differences}"
            )
    for one, other in itertools.pairwise(read):
        if one.own.shard == other.own.shard:
            raise ResultsError(f"{one.folder} and {other.folder}: both are shard {one.own.shard}; give each shard once")
    there = {one.own.shard.index for one in read}
    return Shards(tuple(read), tuple(sorted(set(range(1, first.own.shard.count + 1)) - there)))


def merge(shards: Shards, out: Path, *, partial: bool, policy: Path | None) -> Results:
    """Write the folder of the whole audit, with results, verdict and report.

    Args:
        shards: all shards of one audit.
        out: the new folder; an earlier audit there is moved aside.
        partial: whether to go on although shards are missing or unfinished.
        policy: of the gate; None for the one that the shards name.

    Raises:
        ConfigError: shards are missing or unfinished, or the folder or the policy cannot be used.
        ResultsError: another version of leakaudit made the shards, or no step was audited.
    """
    _check_complete(shards, partial=partial)
    first = shards.found[0].own
    config = first.config.model_copy(update={"out_dir": out, "policy": policy or first.config.policy})
    check_text_mode(config.text)
    plugins = Plugins.of(config)
    battery = described(config, plugins)
    if battery.digest != shards.found[0].saved.battery:
        raise ResultsError(
            f"{shards.found[0].folder}: another version of leakaudit or of a plugin made the shards; use that one"
        )
    if any(out.absolute() == one.folder.absolute() for one in shards.found):
        raise ConfigError(f"--out {out}: is the folder of a shard; give another one")
    saved, entries = _joined_state(shards), _joined_entries(shards, battery)
    metrics = applied_metrics(config.sentence_model)
    builder = ResultsBuilder(
        out,
        config,
        battery,
        _command(shards),
        catalogue(plugins.attacks, plugins.defenses, metrics),
        first.pairing,
    )
    end = RunEnd(
        not_kept=list(_not_merged(shards)),
        total_steps=first.total,
        interrupted=bool(shards.unfinished),
        simulated=True,
        final=True,
    )
    with run_folder(out, Unfinished(battery.digest, "", len(entries)), False):
        for name in _LOGS:
            write_atomic(out / name, b"".join(_content(one.folder / name) for one in shards.found))
        results = builder.build(saved, entries, end, torch.device("cpu"))
        run = results.run.model_copy(update={"environment": _environment(shards)})
        results = with_digest(results.model_copy(update={"run": run}))
        write_atomic(out / JOURNAL, "".join(entry.model_dump_json() + "\n" for entry in entries))
        write_atomic(out / STATE, saved.model_dump_json())
        publish(out, results, config)
    return results


_LOGS = (CONFORMANCE, MEMBERSHIP)
"""Files with one line for each step, beside the journal."""


def _content(file: Path) -> bytes:
    """Return the content of a file; empty if it is not there."""
    return read_regular(file) if file.exists() else b""


def _differences(one: ShardFolder, other: ShardFolder) -> Iterator[str]:
    """Yield what two folders of the same audit would have in common and do not."""
    a, b = one.own, other.own
    if one.saved.battery != other.saved.battery:
        yield "battery (attacks, defences, options, budget, seed or version of leakaudit)"
    if a.audit != b.audit:
        yield "model, data or options"
    if (a.shard.count, a.total) != (b.shard.count, b.total):
        yield "number of shards or of steps"
    if a_and_b := _policies(one, other):
        yield f"the policy when they began ({a_and_b})"
    keys = sorted(set(AuditConfig.model_fields) - {"out_dir"})
    yield from (f"`{key}`" for key in keys if getattr(a.config, key) != getattr(b.config, key))
    yield from (f"version of {name}" for name in SAME_VERSIONS if a.environment.get(name) != b.environment.get(name))


def _policies(one: ShardFolder, other: ShardFolder) -> str:
    """Return the digests of the policies of two shards; empty if they are the same."""
    taken = [None if shard.saved.origin.policy is None else shard.saved.origin.policy.digest for shard in (one, other)]
    return "" if taken[0] == taken[1] else " and ".join(str(digest or "not recorded") for digest in taken)


def _first_origin(saved: Sequence[SavedState]) -> Origin:
    """Return what was known when the first shard began.

    The commit is that of all shards, or unknown.
    """
    origins = sorted((one.origin for one in saved), key=lambda one: "" if one.policy is None else one.policy.taken_at)
    if len({one.code_commit for one in origins}) > 1:
        return origins[0].model_copy(update={"code_commit": None, "code_dirty": None})
    known = [one.code_dirty for one in origins]
    return origins[0].model_copy(update={"code_dirty": None if None in known else any(known)})


def _check_complete(shards: Shards, *, partial: bool) -> None:
    """Refuse missing and unfinished shards, unless the user wants what is there.

    Raises:
        ConfigError: the message names them.
    """
    count = shards.found[0].own.shard.count
    problems = []
    if shards.missing:
        names = ", ".join(f"{index}/{count}" for index in shards.missing)
        problems.append(f"missing: {names}")
    if shards.unfinished:
        names = ", ".join(f"{one.own.shard} in {one.folder}" for one in shards.unfinished)
        problems.append(f"not finished: {names} (the same command goes on with it)")
    if problems and not partial:
        raise ConfigError(f"shards are {'; '.join(problems)}; --partial merges what is there")


def _joined_state(shards: Shards) -> SavedState:
    """Return the state of the whole audit, which is finished."""
    saved = [one.saved for one in shards.found]
    by_last = sorted(shards.found, key=lambda one: one.last_step)
    regimes = [one.saved.regime for one in by_last if one.saved.regime is not None]
    return SavedState(
        run=f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}",
        started=min(one.started for one in saved),
        battery=saved[0].battery,
        finished=True,
        steps=sorted((step for one in saved for step in one.steps), key=lambda step: step.step),
        controls=sorted((control for one in saved for control in one.controls), key=lambda control: control.step),
        as_sent=any(one.as_sent for one in saved),
        lost={step: why for one in saved for step, why in one.lost.items()},
        subject=next((one.subject for one in saved if one.subject is not None), None),
        regime=joined_regime(regimes) if regimes else None,
        origin=_first_origin(saved),
    )


def _joined_entries(shards: Shards, battery: Battery) -> list[JournalEntry]:
    """Return all attempts in the order in which one machine makes them.

    Quick attacks run on every step before slow ones run on any. What an unfinished shard lacks on a step that it began is `skipped`.
    """
    entries = [entry for one in shards.found for entry in one.entries]
    made = {(e.attempt.step, e.attempt.attack, e.attempt.defense) for e in entries}
    for one in shards.unfinished:
        for step in one.saved.steps:
            wanted = [(step.id, attack, defense) for defense in battery.defenses for attack in battery.attacks]
            for step_id, attack, defense in (names for names in wanted if names not in made):
                attempt = Attempt(
                    step=step_id,
                    attack=attack,
                    defense=defense,
                    seed=one.own.config.seed,
                    status=AttemptStatus.SKIPPED,
                    reason=STOPPED,
                )
                entries.append(JournalEntry(attempt=attempt))

    def turn(entry: JournalEntry) -> tuple[bool, str]:
        attempt = entry.attempt
        return attempt.attack in battery.slow and attempt.status is not AttemptStatus.SKIPPED, attempt.step

    return sorted(entries, key=turn)


def _not_merged(shards: Shards) -> Iterator[tuple[int, str]]:
    """Yield numbers of steps that no shard audited, each with the reason."""
    first = shards.found[0].own
    for index in shards.missing:
        absent = first.shard.model_copy(update={"index": index})
        yield len(absent.numbers(first.total)), f"shard {absent} was not merged"
    for one in shards.unfinished:
        if left := len(one.own.shard.numbers(first.total)) - len(one.saved.steps):
            yield left, f"shard {one.own.shard} was stopped before them"


def _command(shards: Shards) -> str:
    """Return how the shards were started and joined."""
    first = shards.found[0].own
    numbers = ", ".join(str(one.own.shard.index) for one in shards.found)
    of = counted(first.shard.count, "shard")
    return f"{first.command} --shard K/{first.shard.count}, and leakaudit merge of {numbers} (of {of})"


def _environment(shards: Shards) -> dict[str, str]:
    """Return versions and hardware of the shards; where they differ, all of them."""
    names = shards.found[0].own.environment
    values = {name: Counter(one.own.environment.get(name, "unknown") for one in shards.found) for name in names}
    return {name: "; ".join(found) for name, found in values.items()}
