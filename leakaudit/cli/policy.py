"""`leakaudit policy`: check, show, compare and start the rules of the gate."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from leakaudit.cli.common import EXISTING, clear_errors, say
from leakaudit.errors import ConfigError, Problem, WrongFileError
from leakaudit.exit_codes import ExitCode

if TYPE_CHECKING:
    from leakaudit.config.yaml_document import Document
    from leakaudit.gate.lint import Battery, Finding
    from leakaudit.gate.policy import Policy
    from leakaudit.plugins.names import Names

FILE = "leakaudit.policy.yaml"
"""File of the policy where no argument names one."""
BUILT_IN = "built-in"
"""Word for the built-in policy."""
PRESETS = ("strict", "balanced", "labels-only", "federated")
"""The presets, the strictest first; a test compares them with the files of the package."""

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group(short_help="Check, show, compare and start a policy.")
def policy() -> None:
    """Write, check and compare policies: the rules of `leakaudit gate`, in YAML."""


@policy.command(short_help="Say what is wrong or weak in a policy.")
@click.argument("file", type=EXISTING, default=Path(FILE))
@click.option(
    "--config", "config", type=EXISTING, help="YAML of the audit; it says which attacks and defences will run."
)
@click.option("--strict", is_flag=True, help="End with 2 if there is a warning.")
@_JSON
@clear_errors
def check(file: Path, config: Path | None, strict: bool, as_json: bool) -> None:
    """Name every mistake in FILE, then every rule that looks strict and is not.

    FILE is leakaudit.policy.yaml in the working folder by default. Exit codes: 0 for a valid policy, 2 for a wrong one, and with --strict for one with warnings.
    """
    from leakaudit.gate.lint import lint

    try:
        battery = _battery(config)
        found, document = _read(file, _names(battery))
    except ConfigError as error:
        if not as_json:
            raise
        _end_with_problems(file, error)
    findings = lint(found, battery, document.line_of)
    code = ExitCode.USAGE if strict and findings else ExitCode.PASS
    if as_json:
        click.echo(json.dumps(_checked(file, found, findings, code), indent=1))
    else:
        _print_findings(file, findings)
        click.echo(_summary(found, findings, refused=code is not ExitCode.PASS))
    sys.exit(code)


@policy.command(short_help="Print a policy with every default.")
@click.argument("file", type=EXISTING, required=False)
@click.option("--origin", is_flag=True, help="Say of each value whether it is from the file, and from which line.")
@clear_errors
def show(file: Path | None, origin: bool) -> None:
    """Print FILE as YAML with every default written out.

    Without FILE it is the built-in policy. `policy check` accepts the output.
    """
    from leakaudit.gate.policy import default_policy
    from leakaudit.gate.policy_text import built_in, from_file, policy_yaml

    if file is None:
        click.echo(policy_yaml(default_policy(), built_in if origin else None), nl=False)
        return
    found, document = _read(file, None)
    click.echo(policy_yaml(found, from_file(document) if origin else None), nl=False)


@policy.command(short_help="Say whether a policy got looser.")
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@_JSON
@clear_errors
def diff(old: str, new: str, as_json: bool) -> None:
    """Say of each change from OLD to NEW whether it is looser, tighter or neither.

    OLD and NEW are files, objects of git such as origin/main:policy.yaml, or the word built-in. Exit codes: 0 if nothing is looser, 2 for a wrong policy, 3 if something is looser.
    """
    from leakaudit.gate.policy_diff import Direction, compare_policies

    before, after = _named(old), _named(new)
    changes = compare_policies(before, after)
    looser = [change for change in changes if change.direction is Direction.LOOSER]
    code = ExitCode.FAIL if looser else ExitCode.PASS
    if as_json:
        rows = [
            {
                "key": one.key,
                "rule": one.rule,
                "old": one.old,
                "new": one.new,
                "direction": one.direction,
                "why": one.why,
            }
            for one in changes
        ]
        told = {"old": before.digest, "new": after.digest, "looser": bool(looser), "changes": rows, "exit": int(code)}
        click.echo(json.dumps(told, indent=1))
        sys.exit(code)
    _print(change.sentence for change in changes)
    counts = [f"{sum(one.direction is word for one in changes)} {word}" for word in Direction]
    click.echo(", ".join(counts) if changes else f"no difference: both have the digest {after.digest}")
    sys.exit(code)


@policy.command(short_help="Write a policy to start from.")
@click.option(
    "--preset", type=click.Choice(PRESETS), default="balanced", show_default=True, help="What the policy is for."
)
@click.option("-o", "--output", type=EXISTING, default=Path(FILE), show_default=True, help="The file; - for stdout.")
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
@clear_errors
def init(preset: str, output: Path, force: bool) -> None:
    """Write a policy with comments: what it forbids, needs and does not look at.

    strict: texts about persons. balanced: as the built-in policy. labels-only: an audit of labels. federated: one client's rounds.
    """
    from leakaudit.gate.policy_text import preset_text

    text = preset_text(preset)
    if str(output) == "-":
        click.echo(text, nl=False)
        return
    try:
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{output}: is there already; name another file with -o, or overwrite it with --force"
        ) from None
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written ({error.strerror or type(error).__name__})") from None
    say(f"{output}: written; its first lines say what it asks")
    click.echo(f"next: leakaudit policy check {output}")


def _read(file: Path, names: Names | None) -> tuple[Policy, Document]:
    """Read a policy with the lines of its values.

    Raises:
        ConfigError: it is wrong.
    """
    from leakaudit.config.yaml_document import read_text

    if not file.exists():
        raise ConfigError(f"{file}: no such file; name a policy, or write one with `leakaudit policy init`")
    return _parsed(read_text(file), str(file), names)


def _parsed(text: str, source: str, names: Names | None) -> tuple[Policy, Document]:
    from leakaudit.config.strict_yaml import parse_document
    from leakaudit.gate.policy import Policy, unknown_names

    return parse_document(text, Policy, source, None if names is None else lambda found: unknown_names(found, names))


def _named(name: str) -> Policy:
    """Return the policy that an argument of `diff` names.

    Raises:
        ConfigError: there is none, or it is wrong.
    """
    from leakaudit.cli.git_objects import is_object, text_of
    from leakaudit.gate.policy import default_policy

    if Path(name).exists():
        return _read(Path(name), None)[0]
    if name == BUILT_IN:
        return default_policy()
    if is_object(name):
        return _parsed(text_of(name), name, None)[0]
    raise ConfigError(f"{name}: no such file; name a file, an object of git such as main:policy.yaml, or {BUILT_IN}")


def _battery(config: Path | None) -> Battery | None:
    """Return what the configuration of the audit will run."""
    if config is None:
        return None
    from leakaudit.config.audit import load_config
    from leakaudit.gate.lint import Battery
    from leakaudit.plugins.described import own_goals

    audit = load_config(config)
    return Battery(
        attacks={spec.label: own_goals().get(spec.name) for spec in audit.attacks},
        defenses=frozenset(spec.label for spec in audit.defenses),
        min_tokens=audit.min_tokens,
        controls=audit.controls,
        budget_s=audit.budget_s,
        nonmembers=audit.membership is not None,
    )


def _names(battery: Battery | None) -> Names:
    """Return the names that a policy may use, with those of other packages."""
    from importlib.metadata import entry_points

    from leakaudit.plugins.names import Names, own_names, registered_names
    from leakaudit.registry import ENTRY_POINT_GROUP
    from leakaudit.results.as_sent import AS_SENT

    names = own_names() | Names(frozenset(), frozenset({AS_SENT}), frozenset())
    if battery is not None:
        names = names | Names(frozenset(battery.attacks), battery.defenses, frozenset())
    if entry_points(group=ENTRY_POINT_GROUP):  # only then, because it imports torch
        with suppress(ImportError):  # without torch the names of other packages are known from the configuration alone
            names = names | registered_names()
    return names


def _end_with_problems(file: Path, error: ConfigError) -> NoReturn:
    """Print the problems as one document and on stderr; exit."""
    problems = error.problems if isinstance(error, WrongFileError) else (Problem(0, str(error)),)
    told = {"file": str(file), "ok": False, "problems": [_place(*one) for one in problems], "exit": int(ExitCode.USAGE)}
    click.echo(json.dumps({"error": type(error).__name__, "message": str(error), **told}, indent=1))
    say(f"error: {error}")
    sys.exit(ExitCode.USAGE)


def _place(line: int, message: str, path: tuple[str | int, ...]) -> dict[str, Any]:
    from leakaudit.config.yaml_document import dotted

    return {"line": line, "key": dotted(path), "message": message}


def _checked(file: Path, found: Policy, findings: Iterable[Finding], code: ExitCode) -> dict[str, Any]:
    """Return the answer of `check` as plain data."""
    from leakaudit.gate.steps_needed import steps_of_policy

    return {
        "file": str(file),
        "ok": code is ExitCode.PASS,
        "problems": [],
        "warnings": [
            _place(one.line, one.sentence, one.path) | {"id": one.id, "advice": one.advice} for one in findings
        ],
        "name": found.name,
        "rules": len(found.rules),
        "steps": steps_of_policy(found),
        "digest": found.digest,
        "exit": int(code),
    }


def _print_findings(file: Path, findings: Iterable[Finding]) -> None:
    from leakaudit.config.yaml_document import dotted

    for one in findings:
        _print([f"warning: {file}:{one.line}: {dotted(one.path)}: {one.sentence}", f"  {one.advice}  [{one.id}]"])


def _print(lines: Iterable[str]) -> None:
    from leakaudit.reports.escaping import plain

    for line in lines:
        click.echo(plain(line))


def _summary(found: Policy, findings: list[Finding], *, refused: bool) -> str:
    """Return the last line of `check`."""
    from leakaudit.gate.steps_needed import steps_of_policy, steps_of_rule
    from leakaudit.results.wording import counted

    most = steps_of_policy(found)
    deciding = [rule for rule in found.rules if rule.level == "error"]
    asking = sum(steps_of_rule(rule, found) == most for rule in deciding)
    steps = "no number of steps passes it" if most is None else f"{asking} need at least {counted(most, 'step')}"
    warned = f"{counted(len(findings), 'warning')}, " if findings else ""
    word = "refused (--strict)" if refused else "ok"
    return f"{word}: {warned}{counted(len(found.rules), 'rule')}, {steps}, digest {found.digest}"
