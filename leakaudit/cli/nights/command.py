"""`leakaudit nightly` and `leakaudit nightly init`."""

from __future__ import annotations

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from leakaudit.cli.auditing import seconds_of
from leakaudit.cli.common import EXISTING, clear_errors, say
from leakaudit.cli.memory import keep_freed_memory
from leakaudit.cli.threads import wait_passively
from leakaudit.config.nightly import FILE


def _moment(_ctx: click.Context, _param: click.Parameter, value: str | None) -> datetime:
    """Return the time of a text, UTC where it names no zone; None gives now.

    Raises:
        BadParameter: it is no time.
    """
    if value is None:
        return datetime.now(UTC)
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no time; write it as 2026-11-25 or 2026-11-25T03:30+01:00") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@click.group(invoke_without_command=True, short_help="Audit, compare, judge and report, once a night.")
@click.option("--config", "path", type=EXISTING, default=Path(FILE), show_default=True, help="YAML of the nights.")
@click.option(
    "--at",
    callback=_moment,
    metavar="TIME",
    help="Time that names the night, such as 2026-11-25; default: now. Tomorrow's date tries a second night.",
)
@click.option(
    "--time-limit",
    "limit",
    metavar="LENGTH",
    callback=seconds_of,
    help="Time for the whole night, such as 2h or 90m; default: `budget`. The night then closes what is left, and is complete.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the night as one JSON document.")
@click.pass_context
@clear_errors
def nightly(context: click.Context, path: Path, at: datetime, limit: float | None, as_json: bool) -> None:
    """Run the night that the configuration describes.

    In order: remove what is older than `keep`, audit, compare with the night before and with the baseline, judge, report, record,
    notify, and print one line.

    A second start in the same night does only what is missing. The exit code is the gate's: 0 PASS, 3 FAIL or worse than the baseline,
    4 INCONCLUSIVE, 5 the night could not run, 7 another process runs it.
    """
    if context.invoked_subcommand is not None:
        return
    wait_passively()
    keep_freed_memory()
    from leakaudit.cli.nights.night import Night
    from leakaudit.config.nightly import load_nightly
    from leakaudit.storage.parent_watch import keep_memory_private

    keep_memory_private()
    config = load_nightly(path)
    if limit is not None:
        config = config.model_copy(update={"budget": f"{limit:g}s"})
    night = Night(config, at)
    code = night.run()
    sys.stdout.write((json.dumps(night.document, indent=1) if as_json else night.line) + "\n")
    sys.exit(code)


@nightly.command(short_help="Write a commented configuration that runs as it stands.")
@click.option("--model", type=EXISTING, help="Folder as save_pretrained writes it; default: an example is made.")
@click.option("--data", type=EXISTING, help="Texts and labels, as --data of `simulate`; default: an example is made.")
@click.option("--text-field", default="text", show_default=True, help="Field of --data that holds the text.")
@click.option("--label-field", default="label", show_default=True, help="Field of --data that holds the class.")
@click.option("--out", type=EXISTING, default=Path(FILE), show_default=True, help="File to write.")
@clear_errors
def init(model: Path | None, data: Path | None, text_field: str, label_field: str, out: Path) -> None:
    """Write a commented nightly.yaml that runs as it stands.

    Without --model and --data an example of both is made in the folder leakaudit-example beside it: a tiny encoder with random weights, and
    sentences that came with leakaudit. Nothing that exists is overwritten.
    """
    from leakaudit.cli.nights.starter import EXAMPLE, write_starter

    write_starter(out, model, data, {"text_field": text_field, "label_field": label_field})
    example = f" and the example {out.parent / EXAMPLE}" if model is None else ""
    option = "" if out == Path(FILE) else f" --config {shlex.quote(str(out))}"
    say(f"wrote {out}{example}; the first night: leakaudit nightly{option}")
