"""`leakaudit baseline`: the audit that nights and releases are compared with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from leakaudit.cli.common import EXISTING, clear_errors, say
from leakaudit.cli.compare import DESPITE_HELP, check_keys, show_comparison
from leakaudit.cli.named_audits import LAST, Nights, audit_of, nights_of, of_nights, policy_for

if TYPE_CHECKING:
    from leakaudit.gate.policy import Policy
    from leakaudit.history.baseline import SavedBaseline

_FILE = click.option(
    "--file",
    "file",
    type=EXISTING,
    help="File of the baseline; default: that of the nights, or leakaudit.baseline.json.",
)
_POLICY = click.option(
    "--policy", "rules", type=EXISTING, help="YAML policy; default: the nights', or the built-in one."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group(short_help="Set, show and compare with the baseline.")
def baseline() -> None:
    """Keep the run that nights and releases are compared with.

    Its file holds numbers and marks only and is meant to be committed beside the policy.
    """


@baseline.command("set", short_help="Make an audit the baseline.")
@click.argument("run", metavar="RUN")
@click.option("--anyway", is_flag=True, help="Accept a run whose verdict is not PASS.")
@click.option(
    "--data-name", default="", metavar="NAME", help="Name of the data set, as `data_name` in the YAML of the nights."
)
@_POLICY
@_FILE
@of_nights
@_JSON
@clear_errors
def set_baseline(
    run: str,
    anyway: bool,
    data_name: str,
    rules: Path | None,
    file: Path | None,
    config: Path | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Make RUN the baseline that nights and releases are compared with.

    RUN is an audit's folder, its results.json, the id of a night, or `last`. A run whose verdict is not PASS is refused unless --anyway is given; the exit code is that of the verdict, 3, 4 or 5. Rules with `versus_baseline` compare it with the baseline that the file holds so far; without one they are left out.
    """
    from datetime import UTC, datetime

    from leakaudit.errors import ResultsError
    from leakaudit.gate.evaluate import evaluate
    from leakaudit.gate.verdict import Status
    from leakaudit.history.baseline import baseline_of, save
    from leakaudit.history.reference import before_setting

    nights = nights_of(config, folder)
    audit = audit_of(run, nights)
    if audit.results is None:
        raise ResultsError(
            f"{run}: the results of the night were removed; a baseline needs them, so name a later night"
        )
    policy = policy_for(rules, nights, audit)
    place = file or _named_by(rules, policy) or _file(None, nights)
    reference, judged_by = before_setting(audit.results, policy, place)
    verdict = evaluate(
        audit.results, judged_by, now=datetime.now(UTC), results_sha256=audit.sha256, reference=reference
    )
    if verdict.verdict is not Status.PASS and not anyway:
        why = f"{run}: its verdict is {verdict.verdict}, not PASS: {verdict.sentence} To take it nevertheless, add --anyway."
        if as_json:
            click.echo(json.dumps({"error": "NotPassed", "message": why, "exit": int(verdict.verdict.exit_code)}))
        say(f"error: {why}")
        sys.exit(verdict.verdict.exit_code)
    found = baseline_of(audit.results, policy, verdict, audit.data or data_name)
    save(found, place)
    if not found.keys["data"]:
        say(
            "note: the data set has no name here; nights that have one are not compared with this baseline (--data-name)"
        )
    _show(found, as_json, f"written to {place}")


@baseline.command(short_help="Print the baseline.")
@_FILE
@of_nights
@_JSON
@clear_errors
def show(file: Path | None, config: Path | None, folder: Path | None, as_json: bool) -> None:
    """Print the baseline: its run, verdict, comparability keys and rates."""
    place = _file(file, nights_of(config, folder))
    _show(_loaded(place), as_json, f"read from {place}")


@baseline.command(short_help="Compare an audit with the baseline.")
@click.argument("run", metavar="[RUN]", default=LAST)
@click.option("--despite", multiple=True, metavar="KEY", help=DESPITE_HELP)
@_POLICY
@_FILE
@of_nights
@_JSON
@clear_errors
def diff(
    run: str,
    despite: tuple[str, ...],
    rules: Path | None,
    file: Path | None,
    config: Path | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Say what got better or worse from the baseline to RUN.

    The rates that the baseline holds are compared. RUN is an audit's folder, its results.json, or the id of a night; default: the last night. Exit codes as for `leakaudit compare`.
    """
    from leakaudit.history.compare import Counted, compare_counts

    nights = nights_of(config, folder)
    saved = _loaded(_file(file, nights))
    audit = audit_of(run, nights)
    policy = policy_for(rules, nights, audit)
    check_keys(despite)
    base = Counted(saved.run, saved.keys, saved.rates)
    names = f"baseline {base.run}", audit.shown
    show_comparison(
        compare_counts(base, audit.counted(policy), policy, despite=despite), policy, names, as_json=as_json
    )


def _file(file: Path | None, nights: Nights | None) -> Path:
    from leakaudit.history.baseline import FILE

    return file or (nights.config.baseline if nights and nights.config else Path(FILE))


def _named_by(path: Path | None, policy: Policy) -> Path | None:
    """Return the file in which a policy looks for its baseline.

    None if the command names no policy, or if no rule of it asks for a baseline.
    """
    return path.parent / policy.baseline.file if path is not None and policy.compares else None


def _loaded(place: Path) -> SavedBaseline:
    """Read the baseline.

    Raises:
        ResultsError: there is none, or it cannot be read.
    """
    from leakaudit.errors import ResultsError
    from leakaudit.history.baseline import load

    found = load(place)
    if found is None:
        raise ResultsError(f"{place}: no baseline is set; `leakaudit baseline set RUN` sets one")
    return found


def _show(found: SavedBaseline, as_json: bool, place: str) -> None:
    from leakaudit.reports.escaping import plain

    if as_json:
        click.echo(json.dumps(found.model_dump(mode="json", by_alias=True), indent=1))
        return
    lines = [f"baseline: run {found.run}, verdict {found.verdict}, judged {found.set_at}, {place}"]
    lines += [f"  {name}: {value or 'unknown'}" for name, value in found.keys.items()]
    lines.append("rates:")
    for rate in found.rates:
        attack = "any attack" if rate.attack == "any" else rate.attack
        length = f", {rate.min_tokens} tokens or more" if rate.min_tokens is not None else ""
        counts = f"{rate.k} of {rate.n} steps" if rate.n else "no step could be judged"
        unjudged = f", {rate.unjudged} could not be judged" if rate.unjudged and rate.n else ""
        lines.append(f"  {rate.event} ({rate.defense}, {attack}{length}): {counts}{unjudged}")
    click.echo("\n".join(plain(line) for line in lines))
