"""A command whose `--help` shows its options below headings."""

from __future__ import annotations

from collections.abc import Iterator

import click

_CLIENT = (
    "batch_size steps seed seeds mode freeze grant lora_rank lora_targets lora_warmup optimizer local_steps "
    "learning_rate clients window max_grad_norm secrets"
)

HEADINGS = {
    "Model and data": "model data text_field label_field task num_labels",
    "Client": _CLIENT,
    "Trainings": "eval train_steps train_batch_size train_rate train_optimizer retune halving script",
    "Battery": "config_path attacks defenses attack_options defense_options server budget device controls sentence_model entity_tagger nonmembers",
    "Run": "shard resume limit dry_run",
    "Output": "policy text out as_json",
}
"""Heading -> names of the parameters below it, separated by blanks."""


class GroupedCommand(click.Command):
    """A command with the headings of `HEADINGS`.

    An option without a heading stands at the end.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below their headings."""
        for heading, records in self._grouped(ctx):
            with formatter.section(heading):
                formatter.write_dl(records)

    def _grouped(self, ctx: click.Context) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        left = {
            str(one.name): record for one in self.get_params(ctx) if (record := one.get_help_record(ctx)) is not None
        }
        for heading, names in HEADINGS.items():
            if records := [left.pop(name) for name in names.split() if name in left]:
                yield heading, records
        if left:
            yield "Other options", list(left.values())
