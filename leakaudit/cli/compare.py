"""`leakaudit compare`: what got better or worse, and what cannot be compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.cli.named_audits import audit_of, nights_of, of_nights, policy_for
from leakaudit.exit_codes import ExitCode

if TYPE_CHECKING:
    from leakaudit.cli.named_audits import Audited
    from leakaudit.gate.policy import Policy
    from leakaudit.history.compare import Comparison, Difference

CODES = {"no worse": ExitCode.PASS, "worse": ExitCode.FAIL, "cannot be compared": ExitCode.INCONCLUSIVE}
"""Answer on two audits -> exit code."""

_ORDER = ("worse", "better", "cannot be compared", "no difference shown")

DESPITE_HELP = "Compare although this comparability key differs, such as defenses. May be given several times."


@click.command(short_help="Compare two audits: better, worse, or not comparable.")
@click.argument("base", metavar="BASE")
@click.argument("new", metavar="NEW")
@click.option("--despite", multiple=True, metavar="KEY", help=DESPITE_HELP)
@click.option(
    "--policy",
    "rules",
    type=EXISTING,
    help="YAML policy that names the events; default: the nights', or the built-in one.",
)
@of_nights
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as one JSON document.")
@clear_errors
def compare(
    base: str,
    new: str,
    despite: tuple[str, ...],
    rules: Path | None,
    config: Path | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Say what got better, worse or cannot be compared from BASE to NEW, and why.

    Each is an audit's folder, its results.json, or in a folder of nights the id of a night or `last`. Steps on the same batches are compared
    in pairs, else the two rates are compared.

    Exit codes: 0 no worse, 2 wrong usage, 3 worse, 4 cannot be compared, 5 an audit cannot be read. It is 4, too, if an event of a rule at
    level error could not be judged in both audits.
    """
    nights = nights_of(config, folder)
    first, second = audit_of(base, nights), audit_of(new, nights)
    policy = policy_for(rules, nights, first, second)
    check_keys(despite)
    names = first.shown, second.shown
    show_comparison(compared(first, second, policy, despite), policy, names, as_json=as_json)


def check_keys(despite: tuple[str, ...]) -> None:
    """Refuse a name that is no comparability key.

    Raises:
        ConfigError: the message names the nearest key.
    """
    import difflib

    from leakaudit.errors import ConfigError
    from leakaudit.history.keys import NAMES

    for key in despite:
        if key not in NAMES:
            near = difflib.get_close_matches(key, NAMES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(NAMES)}"
            raise ConfigError(f"--despite {key}: no such comparability key; {hint}")


def compared(base: Audited, new: Audited, policy: Policy, despite: tuple[str, ...]) -> Comparison:
    """Compare two audits, by their counts if the results of one were removed."""
    from leakaudit.history.compare import compare as compare_results
    from leakaudit.history.compare import compare_counts

    if base.results is None or new.results is None:
        counts = base.counted(policy), new.counted(policy)
        return compare_counts(*counts, policy, despite=despite)
    return compare_results(
        base.results,
        new.results,
        policy,
        despite=despite,
        data=(base.data, new.data),
        keys=(base.record.keys, new.record.keys) if base.record and new.record else None,
    )


def show_comparison(comparison: Comparison, policy: Policy, names: tuple[str, str], *, as_json: bool) -> None:
    """Print a comparison and end with its exit code.

    Args:
        comparison: of two audits.
        policy: that names the events.
        names: of the two audits, on the screen; the JSON document has the ids of the runs.
        as_json: whether to print one JSON document.
    """
    code = CODES[comparison.answer]
    document = _document(comparison, policy, code)
    click.echo(json.dumps(document, indent=1) if as_json else _screen(comparison, policy, names))
    sys.exit(code)


def _document(comparison: Comparison, policy: Policy, code: ExitCode) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "schema": "leakaudit.comparison/1",
        "answer": comparison.answer,
        **asdict(comparison),
        "policy": policy.name,
        "policy_digest": policy.digest,
        "exit": int(code),
    }


def _screen(comparison: Comparison, policy: Policy, names: tuple[str, str]) -> str:
    from leakaudit.reports.escaping import plain

    lines = [f"{names[0]} -> {names[1]}: {comparison.answer}, by the policy {policy.name!r}"]
    lines += [comparison.refused] if comparison.refused else []
    for answer in _ORDER:
        found = [one for one in comparison.differences if one.answer == answer]
        lines += [f"{answer}:", *(f"  {_subject(one)}: {one.sentence}" for one in found)] if found else []
    if not comparison.refused and not comparison.differences:
        lines.append("The policy has no rule on an event, so there is nothing to compare.")
    lines += comparison.notes
    return "\n".join(plain(line) for line in lines)


def _subject(difference: Difference) -> str:
    attack = "any attack" if difference.attack == "any" else difference.attack
    length = "" if difference.min_tokens is None else f", {difference.min_tokens} tokens or more"
    return f"{difference.event} ({difference.defense}, {attack}{length})"
