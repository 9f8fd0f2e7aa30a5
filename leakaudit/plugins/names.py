"""The names of attacks, defences and metrics that a policy may use.

The gate runs where torch is not installed, so it cannot import the plugins and ask for their names. It reads the names of our own
plugins from their source, where a decorator registers them. It reads the names of other packages' plugins from the results.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from leakaudit import registry
from leakaudit.results.schema import Results

FOLDERS = {"attack": "attacks", "defense": "defenses", "metric": "metrics"}
"""Kind of a plugin -> the folder of this package that holds its files."""


@dataclass(frozen=True)
class Names:
    """The names that a policy may use."""

    attacks: frozenset[str]
    defenses: frozenset[str]
    metrics: frozenset[str]

    def __or__(self, other: Names) -> Names:
        """Return the names of both."""
        return Names(self.attacks | other.attacks, self.defenses | other.defenses, self.metrics | other.metrics)


@cache
def own_names() -> Names:
    """Return the names of this package's plugins without importing them.

    >>> "span" in own_names().attacks, "prune" in own_names().defenses, "rougeL" in own_names().metrics
    (True, True, True)
    """
    return Names(_in_source("attack"), _in_source("defense") | registry.defenses.renamed.keys(), _in_source("metric"))


def names_for(results: Results) -> Names:
    """Return our own names and those in `results`."""
    attempts, battery = results.attempts, results.run.battery
    return own_names() | Names(
        attacks=frozenset(
            {*battery.attacks, *(a.attack for a in attempts), *(m.what for m in results.coverage.not_run)}
        ),
        defenses=frozenset({*battery.defenses, *(a.defense for a in attempts)}),
        metrics=frozenset(name for a in attempts for name in a.scores),
    )


def registered_names() -> Names:
    """Return the names of every plugin that is installed here.

    This imports the plugins, and with them torch.
    """
    return own_names() | Names(
        frozenset(registry.attacks.names()), frozenset(registry.defenses.names()), frozenset(registry.metrics.names())
    )


def unknown(name: str, known: Iterable[str]) -> str | None:
    """Return a message that no plugin has this name, with the nearest name.

    Return None if the name is known. Options in brackets are ignored.

    >>> unknown("prune(share=0.9)", ["prune"]), unknown("spam", ["span", "tag"])
    (None, "'spam' is unknown; did you mean 'span'?")
    """
    known = sorted(known)
    bare = name.partition("(")[0]
    if name in known or bare in known:
        return None
    near = difflib.get_close_matches(bare, known, n=1)
    return f"{name!r} is unknown; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")


def is_the_one(label: str, name: str) -> bool:
    """Return whether a plugin with its options is the one that a policy names.

    A policy may name the options.

    >>> is_the_one("tag(steps=3)", "tag"), is_the_one("tag(steps=3)", "tag(steps=9)")
    (True, False)
    """
    return label == name or label.startswith(f"{name}(")


def _in_source(kind: str) -> frozenset[str]:
    """Return the names in lines such as `@attack("name")` of a plugin folder."""
    decorator = re.compile(rf'^@{kind}\("([^"]+)"\)$', re.MULTILINE)
    return frozenset(name for file in _files(kind) for name in decorator.findall(file.read_text(encoding="utf-8")))


def _files(kind: str) -> Iterable[Path]:
    return (Path(__file__).parents[1] / FOLDERS[kind]).glob("*.py")
