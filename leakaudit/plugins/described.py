"""What our own plugins say of themselves, read from their source.

`leakaudit explain` runs where torch is not installed, so it cannot import the plugins. A plugin states its label, meaning and source as plain
class attributes; this module reads them from the syntax tree of the plugin and of the classes that it is derived from.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from leakaudit.explanation import Topic
from leakaudit.plugins.names import FOLDERS, own_names
from leakaudit.registry import defenses
from leakaudit.results.schema import PluginEntry

_PACKAGE = Path(__file__).parents[1]
_BASELINE = "none"
"""The defence that every other one is compared with: the update as it was recorded."""
_READ = (
    "label",
    "meaning",
    "source",
    "goal",
    "threat_model",
    "token_limit",
    "protects",
    "cost",
    "level",
    "higher_is_better",
)


@dataclass(frozen=True)
class Described:
    """What a plugin says of itself; an attribute that it does not have is empty."""

    kind: str
    """`attack`, `defense` or `metric`."""
    name: str
    label: str = ""
    meaning: str = ""
    source: str = ""
    goal: str = ""
    threat_model: str = ""
    token_limit: bool = False
    protects: str = ""
    cost: str = ""
    level: str = ""
    higher_is_better: bool = True


@cache
def described(kind: str, name: str) -> Described:
    """Return what one of our own plugins says of itself, without importing it.

    >>> described("metric", "rougeL").label, described("attack", "lamp-cos").goal
    ('ROUGE-L', 'text')

    Raises:
        KeyError: no plugin of that kind has that name.
    """
    now = defenses.current(name, {})[0] if kind == "defense" else name
    for file in sorted((_PACKAGE / FOLDERS[kind]).glob("*.py")):
        if f'@{kind}("{now}")' not in file.read_text(encoding="utf-8"):
            continue
        module = f"leakaudit.{FOLDERS[kind]}.{file.stem}"
        for node in _tree(module).body:
            if isinstance(node, ast.ClassDef) and _is_registered(node, kind, now):
                return Described(kind, now, **_attributes(module, node))
    raise KeyError(f"no {kind} is called {name!r}")


@cache
def own_goals() -> Mapping[str, str]:
    """Return what each attack of this package looks for, without importing it.

    >>> own_goals()["span"], own_goals()["llg"], own_goals()["tag"]
    ('text', 'labels', 'text')
    """
    return {name: described("attack", name).goal for name in own_names().attacks}


@cache
def own_levels() -> Mapping[str, str]:
    """Return what each metric of this package scores, without importing it.

    It is sequence, batch or step. A step's metric scores label counts.

    >>> own_levels()["rougeL"], own_levels()["best_rl"], own_levels()["label_exact"]
    ('sequence', 'batch', 'step')
    """
    return {name: described("metric", name).level for name in own_names().metrics}


def from_entry(kind: str, name: str, entry: PluginEntry) -> Described:
    """Return what a plugin says of itself in the results of an audit."""
    found = {key: value for key, value in entry.model_dump().items() if key in _READ}
    return Described(kind, name, **found)


def plugin_topic(plugin: Described) -> Topic:
    """Explain an attack, a defence or a metric in its own words."""
    noun = "defence" if plugin.kind == "defense" else plugin.kind
    label = "" if _bare(plugin.label) == _bare(plugin.name) else f" ({plugin.label})"
    said = {"attack": _attack, "defense": _defence, "metric": _metric}[plugin.kind](plugin)
    source = [("Source", _ended(plugin.source))] if plugin.source else []
    what = [("What it is", _ended(plugin.meaning))] if plugin.meaning else []
    return Topic(noun, plugin.name, f"{plugin.name}{label}: {_article(noun)} {noun}", (*what, *said, *source))


def _attack(plugin: Described) -> list[tuple[str, str]]:
    tells = {
        "text": "Texts of the batch, whole or in part. What it recovers is a fact.",
        "words": "Words of the batch in any order. What it names rightly is a fact.",
        "labels": "How many examples of each class the batch has.",
    }[plugin.goal]
    ends = "steps with as many tokens as the hidden size, " if plugin.token_limit else ""
    return [
        ("It recovers", tells),
        (
            "Who could run it",
            _ended(_capital(plugin.threat_model)) if plugin.threat_model else "Its author does not say.",
        ),
        ("It does not tell", f"If it finds nothing: anything about {ends}other attacks or more time."),
        ("What to do", f"Name it in `attacks` of the audit (`--attacks {plugin.name}`)."),
    ]


def _defence(plugin: Described) -> list[tuple[str, str]]:
    protects = [("It protects", _ended(plugin.protects))] if plugin.protects else []
    compared = dict.fromkeys((_BASELINE, plugin.name))
    cost = [("It costs", _ended(plugin.cost))] if plugin.cost else []
    return [
        *protects,
        *cost,
        (
            "It does not tell",
            "How much is left to read: only attacks that know the defence show that, and only for themselves.",
        ),
        ("What to do", f"Compare it in an audit: `leakaudit simulate --defenses {','.join(compared)}`."),
    ]


def _metric(plugin: Described) -> list[tuple[str, str]]:
    of = {
        "sequence": "one true text and its guess; a step has the mean over its texts",
        "batch": "all texts of a step together",
        "step": "the label counts of a step",
    }[plugin.level]
    more = "more" if plugin.higher_is_better else "less"
    limit = (
        f"Limit it in a policy: `metric: {plugin.name}`, `statistic: p95` (or mean, max), `max_value: 0.5`."
        if plugin.higher_is_better
        else "Read it in the report. The gate does not judge a metric of which a low value is bad."
    )
    return [
        ("It tells", f"A number for {of}. A higher number means that {more} came back."),
        (
            "It does not tell",
            "Whether a single text came back whole: an event of the gate says that. Unrelated guesses may score above 0.",
        ),
        ("What to do", limit),
    ]


def _ended(text: str) -> str:
    """Return a text with a full stop at its end."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _bare(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def _is_registered(node: ast.ClassDef, kind: str, name: str) -> bool:
    return any(ast.unparse(one) == f"{kind}({name!r})" for one in node.decorator_list)


def _attributes(module: str, node: ast.ClassDef) -> dict[str, Any]:
    """Return the class attributes of `Described`; own ones hide inherited ones."""
    found: dict[str, Any] = {}
    for statement in node.body:
        for name, value in _assigned(statement):
            if name in _READ:
                found[name] = _value(module, value)
    for base in node.bases:
        home = _definition(module, ast.unparse(base))
        if home is not None and isinstance(home[1], ast.ClassDef):
            found = {**_attributes(home[0], home[1]), **found}
    return found


def _value(module: str, node: ast.expr) -> Any:
    """Return the value of a constant, of a name of one, or of an f-string of them.

    Raises:
        ValueError: it is something else, which cannot be read without importing the module.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(_value(module, part)) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _value(module, node.value)
    home = _definition(module, node.id) if isinstance(node, ast.Name) else None
    if home is None or isinstance(home[1], ast.ClassDef):
        raise ValueError(f"{module}, line {node.lineno}: write a plain text, so that it can be read without torch")
    return _value(home[0], home[1])


def _definition(module: str, name: str) -> tuple[str, ast.expr | ast.ClassDef] | None:
    """Return the module that defines a name, and its class or value.

    Return None if it is not defined in this package.
    """
    tree = _tree(module)
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return module, statement
        for assigned, value in _assigned(statement):
            if assigned == name:
                return module, value
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            [taken] = [alias.name for alias in node.names if name == (alias.asname or alias.name)]
            home = str(node.module)
            return _definition(home, taken) if home.startswith("leakaudit.") else None
    return None


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that a statement assigns, with its value."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        yield statement.target.id, statement.value
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value


@cache
def _tree(module: str) -> ast.Module:
    path = _PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))
