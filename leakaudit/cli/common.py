"""Types of options, messages and exit codes that the commands share."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import click
from click.core import ParameterSource

from leakaudit.config.invocation import PATH, TEXT
from leakaudit.errors import LeakAuditError, MissingPartError, ResultsError, SnapshotError, SpoolBusyError
from leakaudit.exit_codes import ExitCode
from leakaudit.parts import missing_part

P = ParamSpec("P")
R = TypeVar("R")

EXISTING = click.Path(path_type=Path)

REF_HELP = (
    "Read policy, waivers and baseline from this branch, tag or commit of git, such as origin/main, and never from the working folder. "
    "Without --policy the file is leakaudit.policy.yaml."
)

IDENTITY_HELP = "File with the private key that opens encrypted snapshots, or - to read it from stdin; default: the variable LEAKAUDIT_IDENTITY."

FACTORY_HELP = (
    "Class or function of your own code that makes the model of the snapshots (`rebuilt_by`); nothing else is imported for them. "
    "May be given several times."
)


def time_of(text: str) -> datetime:
    """Return the ISO date or time of `--at`; without a zone it is in UTC.

    Raises:
        click.UsageError: it is neither.
    """
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise click.UsageError(
            f"--at {text!r} is no ISO date or time, such as 2026-12-16 or 2026-12-16T08:00"
        ) from None


def say(line: str) -> None:
    """Print a line on stderr; continue if stderr is closed."""
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


@contextmanager
def answering_nobody() -> Iterator[None]:
    """Make the standard input empty, so that no library can ask a question.

    A library that asks reads the end of the input, which means no.
    """
    before = sys.stdin
    with Path(os.devnull).open(encoding="utf-8") as nobody:
        sys.stdin = nobody
        try:
            yield
        finally:
            sys.stdin = before


def clear_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn our exceptions into one line on stderr and an exit code.

    So is the failed import of a part of an audit that is not installed. With `--json` stdout still gets one document.
    """

    def ended(error: LeakAuditError, as_json: object) -> NoReturn:
        code = _exit_code(error)
        if as_json:
            click.echo(json.dumps({"error": type(error).__name__, "message": str(error), "exit": int(code)}))
        click.echo(f"error: {error}", err=True)
        sys.exit(code)

    @wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except LeakAuditError as error:
            ended(error, kwargs.get("as_json"))
        except ImportError as error:
            sentence = missing_part(error, f"`{click.get_current_context().command_path}`")
            if sentence is None:
                raise
            ended(MissingPartError(sentence), kwargs.get("as_json"))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(ExitCode.INTERRUPTED)

    return guarded


def _exit_code(error: LeakAuditError) -> ExitCode:
    if isinstance(error, SpoolBusyError):
        return ExitCode.BUSY
    return ExitCode.ERROR if isinstance(error, ResultsError | SnapshotError) else ExitCode.USAGE


def public_command(shown: Mapping[str, str] | None = None) -> str:
    """Return the running command with its options, without private values.

    Numbers, choices and flags are shown as given, paths as `<path>` and free texts as `<text>`.

    Args:
        shown: parameter -> text to show instead of its value, for parameters that the caller has parsed; empty to omit the parameter.
    """
    context = click.get_current_context()
    words: list[str] = []
    at: click.Context | None = context
    while at is not None and at.parent is not None:
        words.insert(0, str(at.command.name))
        at = at.parent
    for parameter in context.command.params:
        name = str(parameter.name)
        if shown is not None and name in shown:
            words += [max(parameter.opts, key=len), shown[name]] if shown[name] else []
        elif context.get_parameter_source(name) in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
            words += _public_words(parameter, context.params[name])
    return " ".join(["leakaudit", *words])


def _public_words(parameter: click.Parameter, value: Any) -> list[str]:
    """Return one option or argument of the command line without private values."""
    values = value if isinstance(value, tuple) else (value,)
    shown = [public_value(parameter.type, one) for one in values]
    if isinstance(parameter, click.Argument):
        return shown
    option = max(parameter.opts, key=len)
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return [option] if value else []
    return [word for one in shown for word in (option, one)]


def public_value(kind: click.ParamType[Any], value: Any) -> str:
    """Return an option's value, or a placeholder if it may be private.

    Numbers and choices are returned as text; paths and texts become placeholders.
    """
    if isinstance(kind, click.Choice) or (isinstance(value, int | float) and not isinstance(value, str)):
        return str(value)
    return PATH if isinstance(value, Path) else TEXT
