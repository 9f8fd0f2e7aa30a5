"""`leakaudit explain`: a few plain lines on a rule, an exit code, or a plugin."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.errors import ConfigError

if TYPE_CHECKING:
    from leakaudit.explanation import Explanation, Topic
    from leakaudit.gate.policy import ImportedRule, Policy, Rule
    from leakaudit.results.schema import PluginEntry, Results


@dataclass(frozen=True)
class Entry:
    """Something that can be explained; its texts are made when they are asked for."""

    kind: str
    """Its kind in the singular, such as `exit code`."""
    name: str
    topic: Callable[[], Topic]
    aliases: tuple[str, ...] = ()
    """Other words for it."""
    of_run: bool = False
    """Whether only the results of a run describe it: a plugin of another package."""

    def is_called(self, word: str) -> bool:
        """Return whether a word, with or without the kind before it, means this."""
        names = [bare(name) for name in (self.name, *self.aliases)]
        return bare(word) in [*names, *(bare(self.kind) + name for name in names)]


@click.command(short_help="Explain a rule, an exit code or another word.")
@click.argument("word", nargs=-1)
@click.option("--policy", type=EXISTING, help="YAML policy that has the rule; default: the built-in policies.")
@click.option(
    "--run", "run_dir", type=EXISTING, help="Also say what the rule saw in this run (folder or results.json)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@clear_errors
def explain(word: tuple[str, ...], policy: Path | None, run_dir: Path | None, as_json: bool) -> None:
    """Explain WORD: a rule, exit code, plugin, event, status, stamp or control.

    A plugin is an attack, a defence or a metric. Without WORD, the command lists what can be explained. If a word means two things, both are
    explained; `event exact_sentence` asks for one of them. With --run, a rule is judged on that run, without waivers.
    """
    results = _results(run_dir) if run_dir else None
    entries = [*_entries(results), *_rules(policy, results)]
    if not word:
        _show_list(entries, as_json)
        return
    asked = " ".join(word)
    found = [entry for entry in entries if entry.is_called(asked)] or _by_label(entries, asked)
    if not found:
        raise ConfigError(_unknown(asked, entries))
    if run_dir and not any(entry.kind == "rule" or entry.of_run for entry in found):
        raise ConfigError(f"--run says what a rule saw, and {asked!r} is no rule of the policy; leave --run out")
    _show(asked, [entry.topic() for entry in found], as_json)


def bare(text: str) -> str:
    """Return a name without what people write in different ways.

    >>> bare("ROUGE-L") == bare("rougeL"), bare("Positive control"), bare("prune(share=0.9)"), bare("LLG+")
    (True, 'positivecontrol', 'prune', 'llg+')
    """
    return re.sub(r"[^a-z0-9+*]", "", text.partition("(")[0].lower()).replace("defense", "defence")


def _results(run: Path) -> Results:
    from leakaudit.results.files import read_results

    return read_results(run / "results.json" if run.is_dir() else run)[0]


def _entries(results: Results | None) -> Iterator[Entry]:
    """Yield all that can be explained, but the rules."""
    yield from _codes()
    yield from _plugins(results)
    from leakaudit.gate.events import EVENTS
    from leakaudit.gate.explained import WORDS, event_topic
    from leakaudit.results.explained import STAMPS, STATUSES

    for event in EVENTS:
        yield Entry("event", event, partial(event_topic, event))
    for status, text in STATUSES.items():
        yield _written("status", status.value, f"{status.value}: how an attempt ended", text)
    for stamp, text in STAMPS.items():
        yield _written("stamp", stamp.value, f"{stamp.value}: the stamp of a step", text)
    for word, text in WORDS.items():
        kind = "control" if word.endswith("-control") else "word"
        yield _written(kind, word, f"{word}: a {kind} of the {'verdict' if kind == 'word' else 'audit'}", text)


def _written(kind: str, name: str, title: str, text: Explanation, aliases: tuple[str, ...] = ()) -> Entry:
    """Return the entry of something whose texts stand in a table."""
    from leakaudit.explanation import Topic

    return Entry(kind, name, lambda: Topic(kind, name, title, text.parts), aliases)


def _codes() -> Iterator[Entry]:
    from leakaudit.exit_codes import EXPLAINED, STOPPED, ExitCode, stopped_by
    from leakaudit.gate.verdict import Status

    verdicts = [status.exit_code for status in Status]
    for code, text in EXPLAINED.items():
        title = f"{code.name}: exit code {code.value}{', a verdict' if code in verdicts else ''}"
        yield _written("exit code", code.name, title, text, aliases=(str(code.value),))
    signals = [str(stopped_by(number)) for number in range(1, 65)]
    others = tuple(number for number in signals if number != str(ExitCode.INTERRUPTED.value))
    yield _written("exit code", "STOPPED", "STOPPED: exit codes 129 to 192", STOPPED, aliases=others)


def _plugins(results: Results | None) -> Iterator[Entry]:
    """Yield our own plugins, and those of other packages that took part in a run."""
    from leakaudit.plugins.names import own_names
    from leakaudit.registry import defenses

    names = own_names()
    tables = {"attack": names.attacks, "defense": names.defenses, "metric": names.metrics}
    former = {"defense": {old: now.name for old, now in defenses.renamed.items()}}
    for kind, own in tables.items():
        before = former.get(kind, {})
        for name in sorted(own - before.keys()):
            aliases = tuple(old for old, now in before.items() if now == name)
            yield Entry(_NOUNS[kind], name, partial(_own_plugin, kind, name), aliases)
    if results is None:
        return
    taken = results.catalogue
    described: dict[str, Mapping[str, PluginEntry]]
    described = {"attack": taken.attacks, "defense": taken.defenses, "metric": taken.metrics}
    for kind, entries in described.items():
        for name, entry in entries.items():
            if name.partition("(")[0] not in tables[kind]:
                yield Entry(_NOUNS[kind], name, partial(_of_run, kind, name, entry), of_run=True)


_NOUNS = {"attack": "attack", "defense": "defence", "metric": "metric"}
"""Kind of a plugin -> the word for it."""


def _own_plugin(kind: str, name: str) -> Topic:
    from leakaudit.plugins.described import described, plugin_topic

    return plugin_topic(described(kind, name))


def _of_run(kind: str, name: str, entry: PluginEntry) -> Topic:
    from leakaudit.plugins.described import from_entry, plugin_topic

    return plugin_topic(from_entry(kind, name, entry))


def _rules(policy: Path | None, results: Results | None) -> Iterator[Entry]:
    """Yield the rules of a policy, or of the built-in ones."""
    from leakaudit.gate.explained import built_in
    from leakaudit.gate.policy import load_policy
    from leakaudit.plugins.names import names_for

    if policy is None:
        pairs: list[tuple[Policy, Rule | ImportedRule]] = [*built_in()]
    else:
        loaded = load_policy(policy, names_for(results) if results else None)
        pairs = [*((loaded, rule) for rule in loaded.rules), *((loaded, rule) for rule in loaded.imported)]
    for of, rule in pairs:
        yield Entry("rule", rule.id, partial(_rule, of, policy, rule, results))


def _rule(policy: Policy, file: Path | None, rule: Rule | ImportedRule, results: Results | None) -> Topic:
    """Explain a rule, with what it saw in the results if there are any."""
    from datetime import UTC, datetime

    from leakaudit.gate.evaluate import evaluate
    from leakaudit.gate.explained import Seen, rule_topic
    from leakaudit.history.reference import reference_for

    if results is None:
        return rule_topic(policy, rule)
    reference = reference_for(results, policy, file)
    return rule_topic(
        policy, rule, Seen(results, evaluate(results, policy, now=datetime.now(UTC), reference=reference))
    )


def _by_label(entries: Iterable[Entry], asked: str) -> list[Entry]:
    """Return the plugins whose label, such as `DP-SGD`, is the word."""
    plugins = [entry for entry in entries if entry.kind in _NOUNS.values()]
    return [entry for entry in plugins if bare(asked) in map(bare, re.findall(r"\((.*)\):", entry.topic().title))]


def _unknown(asked: str, entries: Sequence[Entry]) -> str:
    """Return a message that nothing has this name, with the nearest names."""
    names = {bare(entry.name): entry.name for entry in entries}
    near = [names[name] for name in get_close_matches(bare(asked), names, n=3)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"nothing is called {asked!r}; {hint}`leakaudit explain` lists every word; a rule of your own policy needs --policy FILE"


def _show(asked: str, topics: Sequence[Topic], as_json: bool) -> None:
    from leakaudit.reports.escaping import plain

    if as_json:
        click.echo(json.dumps({"word": asked, "topics": [dataclasses.asdict(topic) for topic in topics]}, indent=1))
        return
    for number, topic in enumerate(topics):
        if number:
            click.echo()
        title, *lines = [plain(line) for line in topic.lines]
        click.echo(click.style(title, bold=True))
        for line in lines:
            click.echo(line)


def _show_list(entries: Iterable[Entry], as_json: bool) -> None:
    """Print the names of all that can be explained, by kind."""
    from leakaudit.reports.escaping import plain

    by_kind: dict[str, list[str]] = {}
    for entry in entries:
        names = by_kind.setdefault(entry.kind, [])
        if entry.name not in names:
            names.append(entry.name)
    if as_json:
        click.echo(json.dumps(by_kind, indent=1))
        return
    for kind, names in by_kind.items():
        plural = f"{kind}es" if kind.endswith("s") else f"{kind}s"
        for line in wrap(
            f"{plural}: {', '.join(map(plain, names))}", 80, subsequent_indent="  ", break_on_hyphens=False
        ):
            click.echo(line)
    click.echo("`leakaudit explain WORD` says what it is, what it tells, and what to do.")
