"""What the subcommands share: how a path is read, and how one of our exceptions becomes a line and an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

from leakaudit.errors import LeakAuditError, ResultsError, SnapshotError

P = ParamSpec("P")
R = TypeVar("R")

EXISTING = click.Path(path_type=Path)

IDENTITY_HELP = (
    "File with the private key that opens encrypted snapshots, or - to read it from stdin; else LEAKAUDIT_IDENTITY."
)


@contextmanager
def answering_nobody() -> Iterator[None]:
    """Close the standard input to questions: whatever a library asks is answered by the end of the input, which means no."""
    before = sys.stdin
    with Path(os.devnull).open(encoding="utf-8") as nobody:
        sys.stdin = nobody
        try:
            yield
        finally:
            sys.stdin = before


def clear_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn our exceptions into one line on stderr and the right exit code; `--json` still gets one document."""

    @wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except LeakAuditError as error:
            code = 5 if isinstance(error, ResultsError | SnapshotError) else 2
            if kwargs.get("as_json"):
                click.echo(json.dumps({"error": type(error).__name__, "message": str(error), "exit": code}))
            click.echo(f"error: {error}", err=True)
            sys.exit(code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)

    return guarded
