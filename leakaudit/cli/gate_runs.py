"""The runs that `leakaudit gate` judges: one, or several together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.cli.judging import Yardstick, refuse_unasked
from leakaudit.errors import ConfigError, ResultsError

if TYPE_CHECKING:
    from datetime import datetime

    from leakaudit.gate.verdict import Verdict
    from leakaudit.history.pooled import Given
    from leakaudit.results.schema import Artifact

TOGETHER = Path("pooled_verdict.json")
"""Where the verdict on several runs is written without --out: in the working folder, because it is that of no single run."""

_NAMES = ("results.json", "not_audited.json")
"""A folder with one of these files is that of a run."""


@dataclass(frozen=True)
class Runs:
    """The runs that a caller of the gate names."""

    run_dirs: tuple[Path, ...]
    below: Path | None
    """Folder of which every run is judged."""
    despite: tuple[str, ...]
    """Comparability keys that may differ."""
    out: Path | None
    """File for the verdict on several runs."""

    @property
    def several(self) -> bool:
        """Whether several runs are judged together; a folder of runs may hold one."""
        return len(self.run_dirs) > 1 or self.below is not None

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The results of each run; those below a folder in the order of their names."""
        named = [path / _NAMES[0] if path.is_dir() else path for path in self.run_dirs]
        if self.below is None:
            return tuple(named)
        folders = {path.parent for name in _NAMES for path in self.below.rglob(name)}
        return (*named, *sorted(folder / _NAMES[0] for folder in folders))

    @property
    def document(self) -> Path:
        """The file for the verdict."""
        return self.out or TOGETHER if self.several else self.files[0].parent / "verdict.json"


_OPTIONS = (
    click.argument("run_dirs", metavar="RUN...", type=EXISTING, nargs=-1),
    click.option(
        "--all",
        "below",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Judge every run below this folder together.",
    ),
    click.option(
        "--despite",
        multiple=True,
        metavar="KEY",
        help="Judge runs together although they differ in KEY, such as defenses; repeatable.",
    ),
    click.option(
        "-o",
        "--out",
        type=click.Path(dir_okay=False, path_type=Path),
        help=f"File for the verdict on several runs; default: {TOGETHER} in the working folder.",
    ),
)


def with_runs(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument and options of `Runs` to a command, which gets `runs`."""
    names = [field.name for field in fields(Runs)]

    @clear_errors
    @wraps(command)
    def wrapped(**given: Any) -> None:
        runs = Runs(**{name: given.pop(name) for name in names})
        _check(runs)
        command(runs=runs, **given)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def _check(runs: Runs) -> None:
    """Refuse no run, options of several runs for one, and a file of a single run.

    Raises:
        click.UsageError: the message says what to do.
        ConfigError: the folder holds no run, or a key does not exist.
    """
    if not runs.run_dirs and runs.below is None:
        raise click.UsageError("Missing argument 'RUN...'; name a run, or a folder of runs with --all")
    if not runs.several:
        for option, value in (("--despite", runs.despite), ("--out", runs.out)):
            if value:
                raise click.UsageError(f"{option} is for several runs, and one is given")
    if not runs.files:
        raise ConfigError(f"--all {runs.below}: no run is below this folder")
    taken = {path.absolute() for file in runs.files for path in (file, file.with_name("verdict.json"))}
    if runs.out is not None and runs.out.absolute() in taken:
        raise click.UsageError(f"--out {runs.out} is a file of one run, and the verdict is that of several")
    if runs.despite:
        from leakaudit.cli.compare import check_keys

        check_keys(runs.despite)


def judged_together(runs: Runs, by: Yardstick, released: tuple[Artifact, ...], now: datetime) -> Verdict:
    """Return the verdict on several runs; ERROR if one cannot be read.

    Raises:
        ConfigError: the policy or the waivers are wrong.
        ResultsError: the baseline or the report of memaudit cannot be read.
        click.UsageError: a file was named, and no rule asks for it.
    """
    from functools import reduce
    from operator import or_

    from leakaudit.gate.imported import load_imported
    from leakaudit.gate.subject import Claim
    from leakaudit.history.pooled import judge_together
    from leakaudit.history.reference import NO_EARLIER
    from leakaudit.plugins.names import names_for

    given = [_given(file) for file in runs.files]
    names = [names_for(one.results) for one in given if one.results is not None]
    policy = by.files.load_policy(reduce(or_, names) if names else None)
    refuse_unasked(policy, by)
    return judge_together(
        given,
        policy,
        now=now,
        waivers=by.files.load_waivers(policy),
        earlier=by.earlier(policy) if names else NO_EARLIER,
        imported=load_imported(by.memaudit) if by.memaudit else None,
        claim=Claim(released, None, by.files.source),
        despite=runs.despite,
    )


def _given(file: Path) -> Given:
    from leakaudit.history.pooled import Given
    from leakaudit.results.binding import read_binding
    from leakaudit.results.files import read_results

    try:
        results, sha256 = read_results(file)
        return Given(results, sha256, read_binding(file.parent, results))
    except ResultsError as error:
        return Given(None, problem=str(error))
