"""The names of attacks, defences and metrics that a policy may use.

The gate runs where torch is not installed, so it cannot import the plugins and ask for their names. It reads the names of our own
plugins from their source, where a decorator registers them. It reads the names of other packages' plugins from the results.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from leakaudit import registry
from leakaudit.results.schema import Results

_FOLDERS = {"attack": "attacks", "defense": "defenses", "metric": "metrics"}
_ROOT = Path(__file__).parents[2]


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
    return Names(_in_source("attack"), _in_source("defense"), _in_source("metric"))


@cache
def own_goals() -> Mapping[str, str]:
    """Return what each attack of this package looks for, without importing it.

    It is `goal` of the attack's class, or of the class that it derives from: text, words or labels.

    >>> own_goals()["span"], own_goals()["llg"], own_goals()["tag"]
    ('text', 'labels', 'text')
    """
    return _constants("attack", "goal")


@cache
def own_levels() -> Mapping[str, str]:
    """Return what each metric of this package scores, without importing it.

    It is `level` of the metric's class: sequence, batch or step. A step's metric scores label counts.

    >>> own_levels()["rougeL"], own_levels()["best_rl"], own_levels()["label_exact"]
    ('sequence', 'batch', 'step')
    """
    return _constants("metric", "level")


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


def _in_source(kind: str) -> frozenset[str]:
    """Return the names in lines such as `@attack("name")` of a plugin folder."""
    decorator = re.compile(rf'^@{kind}\("([^"]+)"\)$', re.MULTILINE)
    return frozenset(name for file in _files(kind) for name in decorator.findall(file.read_text(encoding="utf-8")))


def _files(kind: str) -> Iterable[Path]:
    return (Path(__file__).parents[1] / _FOLDERS[kind]).glob("*.py")


def _constants(kind: str, field: str) -> dict[str, str]:
    """Return plugin name -> text of a class attribute, for each plugin with one."""
    found: dict[str, str] = {}
    for file in _files(kind):
        tree = _tree(file)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and (name := _registered_as(node, kind)):
                value = _constant(node, tree, field)
                found |= {} if value is None else {name: value}
    return found


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _registered_as(node: ast.ClassDef, kind: str) -> str | None:
    """Return the name in `@attack("name")` above a class; None without one."""
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == kind and call.args:
            return str(ast.literal_eval(call.args[0]))
    return None


def _constant(node: ast.ClassDef, tree: ast.Module, field: str) -> str | None:
    """Return the text of a class attribute.

    It is that of the class, or of the first class above it that has one.
    """
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == field:
            return str(line.value.value) if isinstance(line.value, ast.Constant) else None
    above = (_class(base.id, tree) for base in node.bases if isinstance(base, ast.Name))
    values = (_constant(*found, field) for found in above if found is not None)
    return next((value for value in values if value is not None), None)


def _class(name: str, tree: ast.Module) -> tuple[ast.ClassDef, ast.Module] | None:
    """Find a class of ours by its name in a module, or where that imports it from."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node, tree
        if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
            file = _ROOT / f"{(node.module or '').replace('.', '/')}.py"
            return _class(name, _tree(file)) if file.is_file() else None
    return None
