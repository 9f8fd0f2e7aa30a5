"""Names -> plugins: attacks, defences, metrics, priors.

A plugin is one file with one frozen dataclass; its fields are its knobs. The decorator gives it its name:

    @attack("span")
    @dataclass(frozen=True)
    class Span: ...

Packages outside register through the entry-point group `leakaudit.plugins`: each entry point names a module
whose import runs the decorators.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from leakaudit.errors import ConfigError, UnknownPluginError

ENTRY_POINT_GROUP = "leakaudit.plugins"

Plugin = TypeVar("Plugin", bound=type)


class Registry(Generic[Plugin]):
    """The plugins of one kind, by name; filled on first look-up."""

    def __init__(self, kind: str, home: str) -> None:
        """Name the kind of plugin and the package whose import registers our own."""
        self.kind = kind
        self._home = home
        self._plugins: dict[str, Any] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[Plugin], Plugin]:
        """Return the decorator that registers a frozen dataclass under `name`."""

        def add(plugin: Plugin) -> Plugin:
            if not dataclasses.is_dataclass(plugin):
                raise TypeError(f"{self.kind} {name!r}: {plugin.__name__} is not a dataclass; its fields are its knobs")
            if name in self._plugins and self._plugins[name].__qualname__ != plugin.__qualname__:
                raise ConfigError(f"{self.kind} {name!r} is registered twice")
            plugin.name = name  # type: ignore[attr-defined]
            self._plugins[name] = plugin
            return plugin

        return add

    def names(self) -> list[str]:
        """Return every registered name, sorted."""
        self._load()
        return sorted(self._plugins)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, plugin class), sorted by name."""
        for name in self.names():
            yield name, self._plugins[name]

    def __getitem__(self, name: str) -> Any:
        """Return the plugin class called `name`, or say which names come near."""
        self._load()
        try:
            return self._plugins[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._plugins, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownPluginError(
                f"no {self.kind} is called {name!r}; {hint}known: {', '.join(sorted(self._plugins))}"
            ) from None

    def create(self, name: str, options: Mapping[str, Any] | None = None) -> Any:
        """Build the plugin `name` with its knobs set from `options` (strings are converted to the field's type).

        Raises:
            UnknownPluginError: there is no such plugin.
            ConfigError: an option is no field of it, or its value does not fit the field's type.
        """
        plugin = self[name]
        knobs = {field.name: field for field in dataclasses.fields(plugin) if field.init}
        values = {}
        for key, value in (options or {}).items():
            if key not in knobs:
                near = difflib.get_close_matches(key, knobs, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ConfigError(
                    f"{self.kind} {name!r} has no option {key!r}; {hint}it has: {', '.join(knobs) or 'none'}"
                )
            try:
                values[key] = _adapter(plugin, key).validate_python(value)
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                raise ConfigError(f"{self.kind} {name!r}, option {key!r}: {problem}") from None
        try:
            return plugin(**values)
        except ValueError as error:
            raise ConfigError(f"{self.kind} {name!r}: {error}") from None

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        import_module(self._home)
        for entry_point in entry_points(group=ENTRY_POINT_GROUP):
            entry_point.load()


@cache
def _adapter(plugin: type, key: str) -> TypeAdapter[Any]:
    """Return what checks one knob of a plugin; made once, because observations look their defences up again and again."""
    return TypeAdapter(get_type_hints(plugin)[key])


attacks: Registry[Any] = Registry("attack", "leakaudit.attacks")
defenses: Registry[Any] = Registry("defense", "leakaudit.defenses")
metrics: Registry[Any] = Registry("metric", "leakaudit.metrics")
priors: Registry[Any] = Registry("prior", "leakaudit.priors")

attack = attacks.register
defense = defenses.register
metric = metrics.register
prior = priors.register
