"""The battery: the labelled attacks and defences of one audit."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from leakaudit import __version__
from leakaudit.audit.active_server import WidePooler, named_server
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.config.invocation import public_label
from leakaudit.plugins.attack_protocol import Attack
from leakaudit.plugins.defense_protocol import Defense
from leakaudit.registry import attacks as attack_registry
from leakaudit.registry import defenses as defense_registry
from leakaudit.results.schema import Battery


@dataclass(frozen=True)
class Plugins:
    """The plugins of one audit, created from its configuration."""

    attacks: tuple[tuple[str, Attack], ...]
    """Pairs of label in the results and attack, in the order in which they run."""
    defenses: tuple[tuple[str, Defense], ...]
    """Pairs of label in the results and defence, in the order in which they are tried."""
    server: WidePooler | None
    """The active server; None for a server that sends the model unchanged."""

    @classmethod
    def of(cls, config: AuditConfig) -> Plugins:
        """Create the plugins of a configuration.

        Raises:
            ConfigError: a plugin or an option does not exist.
        """
        server = config.server
        return cls(
            attacks=tuple(_create(attack_registry, config.attacks, by_name=True)),
            defenses=labelled_defenses(config),
            server=None if server is None else named_server(server.name, server.options),
        )


def labelled_defenses(config: AuditConfig) -> tuple[tuple[str, Defense], ...]:
    """Return pairs of label in the results and defence, in the order of the battery.

    Raises:
        ConfigError: a defence or an option does not exist.
    """
    return tuple(_create(defense_registry, config.defenses, by_name=False))


def battery_of(config: AuditConfig) -> Battery:
    """Return the battery of a configuration: labels and digest.

    Raises:
        ConfigError: a plugin or an option does not exist.
    """
    return described(config, Plugins.of(config))


def described(config: AuditConfig, plugins: Plugins) -> Battery:
    """Return the battery of created plugins, as the results show it."""
    members = {
        "attacks": {label: asdict(plugin) for label, plugin in plugins.attacks},  # type: ignore[call-overload]
        "defenses": {label: asdict(plugin) for label, plugin in plugins.defenses},  # type: ignore[call-overload]
        "budget_s": config.budget_s,
        "seed": config.seed,
        "server": None if config.server is None else config.server.label,
        "min_tokens": config.min_tokens,
        "attack_recovered_steps": config.attack_recovered_steps,
        "tool": __version__,
        **({} if config.adaptive else {"adaptive": False}),
    }
    digest = hashlib.sha256(json.dumps(members, sort_keys=True, default=str).encode()).hexdigest()
    return Battery(
        digest=f"sha256:{digest}",
        attacks=tuple(label for label, _ in plugins.attacks),
        defenses=tuple(label for label, _ in plugins.defenses),
        budget_s=config.budget_s,
        slow=tuple(label for label, attack in plugins.attacks if is_slow(attack)),
    )


def is_slow(attack: Attack) -> bool:
    """Return whether an attack waits until every waiting step had the others."""
    return bool(getattr(attack, "slow", False))


def _create(registry: Any, specs: Iterable[PluginSpec], *, by_name: bool) -> list[tuple[str, Any]]:
    """Create plugins under the labels that the results use.

    A label leaves out options that are paths or free text. If several labels are then equal, all but the first get a number.

    Args:
        registry: registry of attacks or of defences.
        specs: names and options.
        by_name: use the name without options as label if only one plugin has it.
    """
    specs = list(specs)
    names = [spec.name for spec in specs]
    built: list[tuple[str, Any]] = []
    for spec in specs:
        made = registry.create(spec.name, spec.options)
        label = spec.name if by_name and names.count(spec.name) == 1 else public_label(spec, made)
        taken = {known for known, _ in built}
        others = (f"{label} #{number}" for number in itertools.count(2))
        built.append((label if label not in taken else next(name for name in others if name not in taken), made))
    return built
