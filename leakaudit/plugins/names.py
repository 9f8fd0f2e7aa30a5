"""The names that a policy may use: of attacks, defences and metrics.

The gate runs where torch is not installed, so that it cannot import the plugins to ask for their names. Our own stand in the
source, in the decorator that registers them; those of other packages stand in the results that they took part in.
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

_FOLDERS = {"attack": "attacks", "defense": "defenses", "metric": "metrics"}


@dataclass(frozen=True)
class Names:
    """The names that somebody who writes a policy may mean."""

    attacks: frozenset[str]
    defenses: frozenset[str]
    metrics: frozenset[str]

    def __or__(self, other: Names) -> Names:
        """Return the names of both."""
        return Names(self.attacks | other.attacks, self.defenses | other.defenses, self.metrics | other.metrics)


@cache
def own_names() -> Names:
    """Return the names of the plugins of this package, without importing one.

    >>> "span" in own_names().attacks, "prune" in own_names().defenses, "rougeL" in own_names().metrics
    (True, True, True)
    """
    return Names(_in_source("attack"), _in_source("defense"), _in_source("metric"))


def names_for(results: Results) -> Names:
    """Return our own names and those that stand in `results`."""
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

    This imports them, and torch with them.
    """
    return own_names() | Names(
        frozenset(registry.attacks.names()), frozenset(registry.defenses.names()), frozenset(registry.metrics.names())
    )


def unknown(name: str, known: Iterable[str]) -> str | None:
    """Say that no plugin has this name, and which one comes near.

    None where it is known. Options in brackets do not count.

    >>> unknown("prune(share=0.9)", ["prune"]), unknown("spam", ["span", "tag"])
    (None, "'spam' is unknown; did you mean 'span'?")
    """
    known = sorted(known)
    bare = name.partition("(")[0]
    if name in known or bare in known:
        return None
    near = difflib.get_close_matches(bare, known, n=1)
    return f"{name!r} is unknown; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")


def _in_source(kind: str) -> frozenset[str]:
    """Find `@attack("name")` at the start of a line in the modules of a folder."""
    decorator = re.compile(rf'^@{kind}\("([^"]+)"\)$', re.MULTILINE)
    files = (Path(__file__).parents[1] / _FOLDERS[kind]).glob("*.py")
    return frozenset(name for file in files for name in decorator.findall(file.read_text(encoding="utf-8")))
