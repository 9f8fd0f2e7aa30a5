"""Descriptions of the plugins of an audit, for its results.

Every plugin describes itself. Reports and the gate read labels and meanings from the results, so they need to know no plugin by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from leakaudit.results.schema import AttackEntry, Catalogue, MetricEntry, PluginEntry

Named = Iterable[tuple[str, Any]]
"""Plugins, or their classes, under the names that the results use."""


def catalogue(attacks: Named, defenses: Named, metrics: Named) -> Catalogue:
    """Describe the plugins that took part in an audit.

    A plugin without a label is called by its name, so that an audit does not fail because of a missing label.
    """
    return Catalogue(
        attacks={
            name: AttackEntry(
                **_description(name, plugin),
                goal=plugin.goal,
                threat_model=getattr(plugin, "threat_model", ""),
                token_limit=getattr(plugin, "token_limit", False),
            )
            for name, plugin in attacks
        },
        defenses={name: PluginEntry(**_description(name, plugin)) for name, plugin in defenses},
        metrics={
            name: MetricEntry(
                **_description(name, plugin),
                level=plugin.level,
                higher_is_better=plugin.higher_is_better,
            )
            for name, plugin in metrics
        },
    )


def _description(name: str, plugin: Any) -> dict[str, str]:
    defaults = {"label": name, "meaning": "", "source": ""}
    return {key: getattr(plugin, key, default) for key, default in defaults.items()}
