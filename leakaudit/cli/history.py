"""`leakaudit history`: the nights as a table, a chart and one sentence."""

from __future__ import annotations

import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.cli.named_audits import Nights, needed, nights_of, of_nights
from leakaudit.errors import ConfigError, ResultsError

if TYPE_CHECKING:
    from leakaudit.history.trend import Trend

SHOWN = 30
"""Nights that are shown unless the user asks for more. Our choice: a month, as in the report."""


@click.command(short_help="Print the nights: a table, a chart and a bound.")
@click.option(
    "--last", type=click.IntRange(min=1), help=f"Most nights; default: {SHOWN}, and every night with --export."
)
@click.option("--export", type=click.Choice(["parquet", "csv"]), help="Write a table of all rates; needs --out.")
@click.option("--out", type=EXISTING, help="File to write with --export.")
@of_nights
@click.option("--json", "as_json", is_flag=True, help="Print the nights as one JSON document.")
@clear_errors
def history(
    last: int | None, export: str | None, out: Path | None, config: Path | None, folder: Path | None, as_json: bool
) -> None:
    """Print what each night found, what changed, and how large the leak rate can be.

    The bound holds however often you look. Nights are joined while their comparability keys agree.

    Exit codes: 0 done, 2 wrong usage, 5 no record can be read.
    """
    if (export is None) != (out is None):
        raise ConfigError("--export and --out belong together; give both, such as --export csv --out nights.csv")
    if export and as_json:
        raise ConfigError("--export writes a file and --json prints a document; give one of them")
    nights = needed(nights_of(config, folder))
    if not nights.history.records:
        if nights.history.unreadable:
            raise ResultsError(f"{nights.history.folder}: none of its records can be read")
        raise ResultsError(f"{nights.history.folder}: no night is recorded yet; `leakaudit nightly` runs one")
    if export and out:
        _write(nights, export, out, last)
        return
    trend = _trend(nights, last or SHOWN)
    click.echo(json.dumps(_document(nights, trend), indent=1)) if as_json else _print(nights, trend)


def _trend(nights: Nights, last: int) -> Trend:
    from leakaudit.history.trend import trend_of

    unreadable = {bad.night: bad.problem for bad in nights.history.unreadable}
    return trend_of(nights.history.records, period=nights.period, last=last, unreadable=unreadable)


def _write(nights: Nights, export: str, out: Path, last: int | None) -> None:
    from leakaudit.history.export import write_csv, write_parquet
    from leakaudit.results.wording import counted

    records = nights.history.records[-last:] if last else nights.history.records
    (write_csv if export == "csv" else write_parquet)(records, out)
    click.echo(f"{out}: {counted(len(records), 'night')} written")


def _confidence(nights: Nights, trend: Trend) -> float | None:
    """Return the confidence of the bounds; None if it is unknown.

    It is unknown if the last night had another policy than today's.
    """
    from leakaudit.gate.policy import default_policy, load_policy
    from leakaudit.history.keys import policy_key

    if nights.config is None:
        return None
    policy = load_policy(nights.config.policy) if nights.config.policy else default_policy()
    keys = next((point.record.keys for point in reversed(trend.points) if point.record and not point.gap), {})
    return policy.nights.confidence if keys.get("policy") == policy_key(policy) else None


def _overdue(nights: Nights, now: datetime) -> str:
    """Say how many nights are missing since the last one.

    The text is empty if none is, or if the period is unknown.
    """
    from leakaudit.history.trend import time_of
    from leakaudit.results.wording import counted

    last = max([record.night for record in nights.history.records] + [bad.night for bad in nights.history.unreadable])
    missed = int((now - time_of(last)) / nights.period) - 1 if nights.period else 0
    if missed < 1:
        return ""
    return f"No night was started since {last}: {counted(missed, 'night is', 'nights are')} missing."


def _print(nights: Nights, trend: Trend) -> None:
    from rich.console import Console
    from rich.text import Text

    from leakaudit.reports.history_terminal import history_lines, marks_for

    encoding = sys.stdout.encoding or "ascii"
    width = shutil.get_terminal_size((100, 24)).columns
    marks = marks_for(encoding)
    lines = history_lines(trend, width=width, marks=marks, confidence=_confidence(nights, trend))
    lines += [Text(note) for note in [_overdue(nights, datetime.now(UTC))] if note]
    for line in lines:  # of the table as well: a reason may hold a letter that the terminal cannot show
        line.plain = line.plain.encode(encoding, "replace").decode(encoding)
    Console(highlight=False).print(Text("\n").join(lines), soft_wrap=True)


def _document(nights: Nights, trend: Trend) -> dict[str, Any]:
    """Return the nights as plain JSON data.

    Marks of steps are left out, because they serve later nights only.
    """
    from leakaudit.reports.history_terminal import bound_sentence

    return {
        "schema": "leakaudit.history/1",
        "sentence": bound_sentence(trend, _confidence(nights, trend)),
        "overdue": _overdue(nights, datetime.now(UTC)),
        "series": [dict(zip(("event", "min_tokens", "defense", "attack"), one, strict=True)) for one in trend.series],
        "nights": [
            {
                "night": point.night,
                "gap": point.gap,
                "changed": list(point.breaks),
                "new_version": point.new_version,
                "record": point.record.model_dump(mode="json", by_alias=True, exclude={"units"})
                if point.record
                else None,
            }
            for point in trend.points
        ],
        "unreadable": [{"night": bad.night, "problem": bad.problem} for bad in nights.history.unreadable],
    }
