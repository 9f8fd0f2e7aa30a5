"""The command line: `leakaudit COMMAND`.

A module holds one command or a few related ones.

A command parses its options, does its work, prints, and ends with an exit code. stdout has the answer; stderr has progress and
diagnostics. A command's module is imported when the command is asked for, and heavy imports are inside the commands, so that the gate starts fast. It may import every room.

Exit codes: 0 PASS or done, 1 crash, 2 usage or configuration error, 3 FAIL, 4 INCONCLUSIVE, 5 ERROR, 6 side process whose
trainer ended, 7 another process is at work on it, 124 end of a time limit, 128 + n stopped by signal n (130 Ctrl-C, 143 SIGTERM).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from importlib import import_module

import click

__all__ = ["main"]

_PLACES = {
    "attacks": "catalogue:attacks_command",
    "baseline": "baseline:baseline",
    "bind": "bind:bind",
    "bundle": "bundle:bundle",
    "compare": "compare:compare",
    "conformance": "conformance:conformance",
    "defenses": "catalogue:defenses_command",
    "doctor": "doctor:doctor",
    "explain": "explain:explain",
    "export": "export:export",
    "frontier": "frontier:frontier",
    "gate": "gate:gate",
    "history": "history:history",
    "index": "index:index",
    "merge": "merge:merge",
    "nightly": "nights.command:nightly",
    "policy": "policy:policy",
    "preflight": "preflight:preflight",
    "prior": "prior:prior",
    "replay": "replay:replay",
    "report": "report:report",
    "run": "run:run",
    "schema": "catalogue:schema",
    "show": "show:show",
    "simulate": "simulate:simulate",
    "snapshots": "snapshots:snapshots",
    "worker": "run:worker",
}
"""Name of a command -> module and function."""


_READERS = frozenset(
    {"baseline", "bind", "bundle", "compare", "explain", "export", "gate", "history", "index", "policy", "report"}
)
"""Commands that read results and policies, and load no code of a training, an attack or a plugin."""

_PYDANTIC_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
"""Environment variable; pydantic then looks for no plugins of its own. It would read a file of every installed package."""


class _Commands(MutableMapping[str, click.Command]):
    """The commands by name; the module of one is imported when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._made:
            if name in _READERS:
                os.environ.setdefault(_PYDANTIC_PLUGINS, "__all__")  # before pydantic makes its first model
            module, function = _PLACES[name].split(":")
            self._made[name] = getattr(import_module(f"leakaudit.cli.{module}"), function)
        return self._made[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*_PLACES, *self._made]))

    def __len__(self) -> int:
        return len(list(iter(self)))


@click.group(commands=_Commands(), context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="leakaudit")
def main() -> None:
    """Audit what could be read out of the updates of a training run on private text."""
