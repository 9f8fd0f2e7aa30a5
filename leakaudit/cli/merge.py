"""`leakaudit merge`, which joins the shards of one audit."""

from __future__ import annotations

from pathlib import Path

import click

from leakaudit.cli.auditing import check_policy, print_outcome
from leakaudit.cli.common import EXISTING, clear_errors


@click.command(short_help="Join the shards of one audit.")
@click.argument("shards", type=EXISTING, nargs=-1, required=True)
@click.option("--out", type=EXISTING, required=True, help="Folder for the whole audit.")
@click.option("--partial", is_flag=True, help="Merge what is there, although shards are missing or unfinished.")
@click.option("--policy", type=EXISTING, help="YAML policy of the gate; default: the one that the shards name.")
@click.option("--json", "as_json", is_flag=True, help="Print the summaries as one JSON document.")
@clear_errors
def merge(shards: tuple[Path, ...], out: Path, partial: bool, policy: Path | None, as_json: bool) -> None:
    """Join SHARDS, the --out folders of `leakaudit simulate --shard`, into one audit.

    The results are those of the same audit on one machine, except for times, ids and keyed hashes. Shards of different audits and a
    shard that is given twice are refused. Steps that no shard audited are named in the results as not kept. An earlier audit in --out
    moves to OUT.1, OUT.2 and so on.
    """
    from leakaudit.audit.merging import merge as joined
    from leakaudit.audit.merging import shards_in

    if policy is not None:
        check_policy(policy)
    print_outcome(joined(shards_in(shards), out, partial=partial, policy=policy), out, as_json)
