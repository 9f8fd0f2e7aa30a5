"""The files that `leakaudit gate` writes for pipelines, as options of the command."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from leakaudit.gate.policy_source import PolicyFiles
    from leakaudit.gate.verdict import Verdict
    from leakaudit.results.schema import Artifact

_FILE = click.Path(dir_okay=False, path_type=Path)
_READABLE = click.Path(exists=True, path_type=Path)


@dataclass(frozen=True)
class Outputs:
    """What a caller of the gate wants beside `verdict.json`.

    A file that is not wanted is None.
    """

    junit: Path | None = None
    summary: Path | None = None
    badge: Path | None = None
    sarif: Path | None = None
    attestation: Path | None = None
    svr: Path | None = None
    """What was shown; written on PASS only."""
    cyclonedx: Path | None = None
    artifacts: tuple[Path, ...] = ()
    """The released files, and folders of them, that the verdict is about."""
    github: bool = False
    """Whether to print annotations and to write the outputs of a job of GitHub Actions."""

    @property
    def files(self) -> dict[str, Path]:
        """The files that are to be written, by their options."""
        found = {f"--{field.name}": getattr(self, field.name) for field in fields(self)}
        return {option: file for option, file in found.items() if isinstance(file, Path)}

    @property
    def recorded(self) -> dict[str, Path | None]:
        """The outputs that others keep as a record, by their options."""
        return {"--attestation": self.attestation, "--svr": self.svr}

    @property
    def about_artifacts(self) -> dict[str, Path | None]:
        """The outputs that say something about released files, by their options."""
        return {**self.recorded, "--cyclonedx": self.cyclonedx}


_OPTIONS = (
    click.option("--junit", type=_FILE, help="Write JUnit XML: each rule is a test."),
    click.option("--summary", type=_FILE, help="Append a summary in Markdown to FILE, such as $GITHUB_STEP_SUMMARY."),
    click.option("--badge", type=_FILE, help="Write the JSON of a badge of shields.io."),
    click.option("--sarif", type=_FILE, help="Write SARIF: each rule that does not pass, at its line of the policy."),
    click.option("--attestation", type=_FILE, help="Write an unsigned in-toto Statement on the files of --artifact."),
    click.option(
        "--svr",
        type=_FILE,
        help="On PASS, write an unsigned in-toto Statement of what was shown for the files of --artifact.",
    ),
    click.option(
        "--cyclonedx",
        type=_FILE,
        help="Write a CycloneDX bill of materials: the files of --artifact, with the verdict in their model cards.",
    ),
    click.option(
        "--artifact",
        "artifacts",
        type=_READABLE,
        multiple=True,
        help="A released file, or a folder of them. The verdict is ERROR if the run does not name it; repeatable.",
    ),
    click.option("--github", is_flag=True, help="Print annotations for GitHub Actions, and write to $GITHUB_OUTPUT."),
)


def with_outputs(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `Outputs` to a command, which gets them as `outputs`."""
    names = [field.name for field in fields(Outputs)]

    @wraps(command)
    def wrapped(**given: Any) -> None:
        outputs = Outputs(**{name: given.pop(name) for name in names})
        _check_artifacts(outputs)
        command(outputs=outputs, **given)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def _check_artifacts(outputs: Outputs) -> None:
    """Refuse outputs about artefacts without one, and two artefacts of one name.

    Raises:
        click.UsageError: an option lacks another one, or two files could not be told apart.
    """
    asked = [option for option, file in outputs.about_artifacts.items() if file is not None]
    if asked and not outputs.artifacts:
        raise click.UsageError(f"{asked[0]} says what was found about files; name each with --artifact FILE")
    if not outputs.artifacts:
        return
    from leakaudit.results.artifacts import artifact_name

    names = [artifact_name(path) for path in outputs.artifacts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise click.UsageError(f"two artefacts are called {twice[0]}; name them from a folder above both")


def read_artifacts(outputs: Outputs, run_dir: Path) -> tuple[Artifact, ...]:
    """Return names and digests of the released files.

    Args:
        outputs: names them.
        run_dir: folder of the audit, which is none of them.

    Raises:
        ResultsError: one of them cannot be read.
    """
    from leakaudit.errors import ResultsError
    from leakaudit.results.artifacts import find_artifacts

    found = find_artifacts(outputs.artifacts, without=run_dir)
    for name, why in found.not_named:
        raise ResultsError(f"--artifact {name}: {why}")
    return found.artifacts


def write_outputs(verdict: Verdict, files: PolicyFiles, released: Sequence[Artifact], outputs: Outputs) -> bool:
    """Write what was asked for; return whether all of it could be written."""
    if outputs == Outputs():
        return True
    from leakaudit.gate.policy import rule_lines
    from leakaudit.reports import outputs as forms

    refused = forms.not_shown(verdict, released) if outputs.svr else ""
    if outputs.svr and refused:
        _not_written(outputs.svr, refused)
    policy, text = files.policy, files.policy_text() if outputs.sarif or outputs.github else None
    lines = None if text is None else rule_lines(text)
    made: list[tuple[Path | None, str, Callable[[], str]]] = [
        (outputs.junit, "w", lambda: forms.junit_xml(verdict)),
        (outputs.summary, "a", lambda: forms.summary(verdict)),
        (outputs.badge, "w", lambda: forms.badge(verdict)),
        (outputs.sarif, "w", lambda: forms.sarif(verdict, policy, lines)),
        (outputs.attestation, "w", lambda: forms.attestation(verdict, released)),
        (None if refused else outputs.svr, "w", lambda: forms.svr(verdict, released)),
        (outputs.cyclonedx, "w", lambda: forms.cyclonedx(verdict, released)),
    ]
    if outputs.github:
        for line in forms.workflow_commands(verdict, policy, lines):
            click.echo(line)
        if told := os.environ.get("GITHUB_OUTPUT"):
            made.append((Path(told), "a", lambda: forms.job_outputs(verdict)))
    written = [_written(path, mode, make) for path, mode, make in made if path is not None]
    return all(written) and not (refused and verdict.verdict == "PASS")


def _written(path: Path, mode: str, make: Callable[[], str]) -> bool:
    try:
        text = make()  # before the file is emptied
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        click.echo(f"{path}: was not written ({error.strerror or type(error).__name__})", err=True)
        return False
    return True


def _not_written(file: Path, why: str) -> None:
    """Say why a file is not written, and remove the one of an earlier call."""
    with suppress(OSError):
        file.unlink()
    stale = "; the one that is there is of an earlier call" if file.exists() else ""
    click.echo(f"{file}: was not written, because {why}{stale}", err=True)
