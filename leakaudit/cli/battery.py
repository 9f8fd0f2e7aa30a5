"""A parser of the attacks and defences on the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.errors import ConfigError

if TYPE_CHECKING:
    from leakaudit.config.audit import PluginSpec
    from leakaudit.config.membership import MembershipConfig


def specs_of(text: str) -> tuple[PluginSpec, ...]:
    """Split `a,b(x=1,y=2),c` at the commas outside brackets.

    Raises:
        ConfigError: the brackets do not close, or the list is empty.
    """
    from leakaudit.config.audit import PluginSpec

    parts, depth, current = [], 0, ""
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += letter
    parts = [part.strip() for part in (*parts, current) if part.strip()]
    if depth or not parts:
        raise ConfigError(f"{text!r}: expected names separated by commas, such as span,tag(steps=300)")
    try:
        return tuple(PluginSpec.parse(part) for part in parts)
    except ValueError as error:
        raise ConfigError(f"{error}{_named(parts)}") from None


def _named(parts: Sequence[str]) -> str:
    """Return how the first part with a bare value, such as `prune(0.9)`, is written.

    Empty if no plugin has its name.
    """
    from leakaudit import registry
    from leakaudit.plugins.knobs import knobs_of

    found = next((match for part in parts if (match := re.fullmatch(r"([\w-]+)\(([^=,()]+)\)", part))), None)
    for kind in (registry.attacks, registry.defenses):
        if found is not None and found[1] in kind.names() and (knobs := knobs_of(kind[found[1]])):
            return f". Did you mean {found[1]}({knobs[0].name}={found[2].strip()})?"
    return ""


def with_options(specs: tuple[PluginSpec, ...], options: tuple[str, ...]) -> tuple[PluginSpec, ...]:
    """Add options such as `name.knob=value` to the plugins that they name.

    Raises:
        ConfigError: an option has another form, or names a plugin that is not in the list.
    """
    added: dict[str, dict[str, str]] = {spec.name: {} for spec in specs}
    for option in options:
        target, equals, value = option.partition("=")
        name, dot, knob = target.rpartition(".")
        if not equals or not dot:
            raise ConfigError(f"{option!r}: expected name.option=value, such as tag.steps=300")
        if name not in added:
            raise ConfigError(f"{option!r}: {name!r} is not in this battery ({', '.join(added)})")
        added[name][knob] = value
    return tuple(spec.model_copy(update={"options": {**spec.options, **added[spec.name]}}) for spec in specs)


class BatteryOption(click.Option):
    """An option whose help names the default attacks of the configuration.

    The configuration is imported only when help is printed.
    """

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option and its help with the default."""
        from leakaudit.config.audit import DEFAULT_ATTACKS, LABEL_ATTACKS

        record = super().get_help_record(ctx)
        if record is None:
            return None
        texts, arrays = (",".join(spec.label for spec in specs) for specs in (DEFAULT_ATTACKS, LABEL_ATTACKS))
        return record[0], f"{record[1]}  [default: {texts}; for arrays: {arrays}]"


def battery_of_data(data: Path) -> tuple[PluginSpec, ...]:
    """Return the default attacks: on text, or on labels if batches hold no text."""
    from leakaudit.config.audit import DEFAULT_ATTACKS, LABEL_ATTACKS

    return LABEL_ATTACKS if data.suffix == ".safetensors" else DEFAULT_ATTACKS


def membership_of(given: Mapping[str, Any], base: MembershipConfig | None) -> dict[str, Any]:
    """Return the keys of `membership` for a file of non-members.

    Its fields are called like those of the data, unless the configuration says otherwise.

    Args:
        given: the options of `leakaudit simulate`.
        base: what the configuration says; None for nothing.
    """
    kept = {} if base is None else base.model_dump(mode="json", exclude_unset=True)
    fields = {key: given[key] for key in ("text_field", "label_field")}
    return fields | kept | {"nonmembers": str(given["nonmembers"])}
