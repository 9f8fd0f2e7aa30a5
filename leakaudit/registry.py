"""Registries of plugins by name: attacks, defences, metrics and priors.

A plugin is one file with one frozen dataclass; its fields are its options (knobs). The decorator registers it under a name:

    @attack("span")
    @dataclass(frozen=True)
    class Span: ...

Our own plugins need no list: the registry imports every module of a plugin folder, and each module must register one plugin. Other
packages use the entry-point group `leakaudit.plugins`: each entry point names a module, and importing it runs the decorators.
"""

from __future__ import annotations

import dataclasses
import difflib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from leakaudit.errors import ConfigError, PluginError, UnknownPluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "leakaudit.plugins"

Plugin = TypeVar("Plugin", bound=type)


@dataclasses.dataclass(frozen=True)
class Renamed:
    """What a plugin and its options are called now. Old names are still read."""

    name: str
    options: Mapping[str, str]
    """Old name of an option -> its name now; the others have kept their names."""


class Registry(Generic[Plugin]):
    """The plugins of one kind, by name; loaded at the first look-up."""

    def __init__(
        self,
        kind: str,
        home: str | None = None,
        unless_stated: Mapping[str, Any] | None = None,
        renamed: Mapping[str, Renamed] | None = None,
    ) -> None:
        """Start empty.

        Args:
            kind: the noun for messages, such as `attack`; also the name of the decorator.
            home: the package whose modules hold our own plugins, one each; None for a registry that imports nothing.
            unless_stated: class attribute -> default value for a plugin that does not define the attribute.
            renamed: old name of a plugin -> what it is called now.
        """
        self.kind = kind
        self._home = home
        self._unless_stated = dict(unless_stated or {})
        self.renamed = dict(renamed or {})
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
            for attribute, value in self._unless_stated.items():
                if not hasattr(plugin, attribute):
                    setattr(plugin, attribute, value)
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
        """Return the plugin class called `name`.

        Raises:
            UnknownPluginError: there is none; the message suggests the nearest name and lists all.
        """
        self._load()
        try:
            return self._plugins[self.current(name, {})[0]]
        except KeyError:
            near = difflib.get_close_matches(name, self._plugins, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownPluginError(
                f"no {self.kind} is called {name!r}; {hint}known: {', '.join(sorted(self._plugins))}"
            ) from None

    def current(self, name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the present names of a plugin and of its options.

        >>> defenses.current("clip-difference", {"norm": 1.0})
        ('clip-noise', {'bound': 1.0})
        """
        now = self.renamed.get(name)
        if now is None:
            return name, dict(options)
        return now.name, {now.options.get(option, option): value for option, value in options.items()}

    def create(self, name: str, options: Mapping[str, Any] | None = None) -> Any:
        """Return the plugin `name` with its fields set from `options`.

        Strings are converted to the type of the field.

        Raises:
            UnknownPluginError: there is no such plugin.
            ConfigError: an option is not a field of the plugin, or the plugin does not accept its value.
        """
        name, options = self.current(name, options or {})
        plugin = self[name]
        knobs = {field.name: field for field in dataclasses.fields(plugin) if field.init}
        values = {}
        for key, value in options.items():
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

    def registered_in(self, module: str) -> list[str]:
        """Return the names of the plugins in a module or in the modules of a package."""
        inside = (name for name, plugin in self._plugins.items() if f"{plugin.__module__}.".startswith(f"{module}."))
        return sorted(inside)

    def _load(self) -> None:
        """Import our own plugins and those of other packages.

        Raises:
            PluginError: a file or a package does not register what it should; the message names it.
        """
        if self._loaded or self._home is None:
            return
        from importlib.metadata import entry_points

        self._loaded = True  # set first: a plugin may look up another one while it is imported
        try:
            self._load_own(self._home)
            for entry_point in entry_points(group=ENTRY_POINT_GROUP):
                _load_other(entry_point)
        except BaseException:
            self._loaded = False  # the next look-up fails in the same way, instead of finding half of the plugins
            raise

    def _load_own(self, home: str) -> None:
        """Import a module, or every module of a package.

        Each module of a package must register exactly one plugin.
        """
        path = getattr(import_module(home), "__path__", ())
        for found in pkgutil.iter_modules(path, f"{home}."):
            module = import_module(found.name)
            names = self.registered_in(found.name)
            if len(names) != 1:
                what = f"registers {', '.join(names)}" if names else f"registers no {self.kind}"
                raise PluginError(
                    f"{module.__file__}: {what}; a file in {home.replace('.', '/')}/ registers exactly one, with "
                    f'`@{self.kind}("name")` on its class. What several of them share stands in another room, such as leakaudit/algorithms'
                )


def _load_other(entry_point: EntryPoint) -> None:
    """Import the module that another package names.

    The import must register at least one plugin, of any kind.

    Raises:
        PluginError: the module cannot be imported, or it registers nothing.
    """
    package = entry_point.dist.name if entry_point.dist else "unknown"
    asked = f"the entry point {entry_point.name} = {entry_point.value!r} of the package {package!r}"
    try:
        module = entry_point.load()
    except Exception as error:
        raise PluginError(f"{asked} cannot be imported: {type(error).__name__}: {error}") from error
    packages = {entry_point.module.partition(".")[0], *_packages_in(module)}
    if not any(registry.registered_in(package) for registry in _REGISTRIES for package in packages):
        raise PluginError(
            f"{getattr(module, '__file__', entry_point.module)}: registers no plugin, and {asked} names it; a plugin registers "
            'with a decorator on its class, such as `@attack("name")`, when its module is imported'
        )


def _packages_in(module: Any) -> set[str]:
    """Return the top-level packages that define the names in a module, except ours."""
    homes = (getattr(thing, "__module__", None) or getattr(thing, "__name__", "") for thing in vars(module).values())
    return {str(home).partition(".")[0] for home in homes if home} - {"leakaudit"}


@cache
def _adapter(plugin: type, key: str) -> TypeAdapter[Any]:
    """Return the validator of one knob.

    It is cached, because observations look up their defences many times.
    """
    return TypeAdapter(get_type_hints(plugin)[key])


attacks: Registry[Any] = Registry(
    "attack",
    "leakaudit.attacks",
    {"needs": "everything", "reads": "gradient", "blind": False, "token_limit": False, "slow": False},
)
defenses: Registry[Any] = Registry(
    "defense",
    "leakaudit.defenses",
    renamed={"clip-difference": Renamed("clip-noise", {"norm": "bound"})},
)
metrics: Registry[Any] = Registry(
    "metric", "leakaudit.metrics", {"needs_guess": False, "needs_model": False, "missing_because": ""}
)
priors: Registry[Any] = Registry("prior", "leakaudit.priors")

_REGISTRIES = (attacks, defenses, metrics, priors)

attack = attacks.register
defense = defenses.register
metric = metrics.register
prior = priors.register
