"""The part of an adapter that defends its training (`defense`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from leakaudit.capture.context import Source, configuration
from leakaudit.capture.notify import notify
from leakaudit.capture.refusals import auditable
from leakaudit.capture.training_defense import Trained, TrainingDefense
from leakaudit.config.audit import NONE, AuditConfig, PluginSpec
from leakaudit.errors import ConfigError, DefenseError, LeakAuditError, ModelError, type_and_place
from leakaudit.models.wrappers import unwrapped

WITHOUT = "Remove `defense` to train without it."

KEY = re.compile(r"""^\s*["']?defense["']?\s*:""", re.MULTILINE)
"""The key of the configuration, in a file that may not be valid."""


class Defended:
    """A training that can apply a defence to its own update.

    The defence does not depend on the audit: it is at work where the audit is refused, fails or is switched off.
    """

    config: Source = None
    defense: PluginSpec | str | None = None
    """Defence that changes the update which training uses, such as `gaussian-noise(scale=0.1)`; None for that of the configuration."""
    defense_seed: int | None = None
    """Seed of its random numbers, for tests: whoever knows it can remove the noise. None draws them from the operating system."""
    _defending: TrainingDefense | None = None
    _asked: PluginSpec | None = None
    """The defence that is at work, as it was asked for."""

    def _trained(self) -> Trained:
        """Return the model and the optimizer of the training that begins."""
        raise NotImplementedError

    def _refuse(self) -> None:
        """Refuse a run whose update no hook sees."""

    def _one_update_a_step(self) -> bool:
        """Return whether what is sent is what the optimizer gets in one step."""
        return True

    def _protect(self) -> None:
        """Begin to defend a training, if that is asked for.

        Raises:
            DefenseError: the defence cannot be applied here; the message says why and what to do.
        """
        self._unprotect()
        if self.defense is None and not _asks(self.config):
            return
        try:
            spec = self._spec()
            if spec is not None:
                self._begin_to_defend(spec)
        except LeakAuditError as error:
            raise DefenseError(f"`defense` was asked for and cannot be applied: {error}. {WITHOUT}") from None
        except Exception as error:
            raise DefenseError(
                f"`defense` was asked for and could not be applied ({type_and_place(error)}). {WITHOUT}"
            ) from None

    def _unprotect(self) -> None:
        if self._defending is not None:
            self._defending.end()
        self._defending = self._asked = None

    def _spec(self) -> PluginSpec | None:
        """Return the defence that is asked for.

        Raises:
            ConfigError: the argument and the configuration ask for different ones, or the configuration cannot be read.
        """
        given = self.defense
        if isinstance(given, str):
            try:
                given = PluginSpec.parse(given)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        config = configuration(self.config)
        asked = {spec.label: spec for spec in (given, config.defense) if spec is not None}
        if len(asked) > 1:
            raise ConfigError(
                f"two were asked for, {' and '.join(asked)}: one by the argument, one by the configuration; name one"
            )
        found = next(iter(asked.values()), None)
        if found is not None and config.shipped_defense not in (NONE, found):
            raise ConfigError(
                f"`shipped_defense` declares {config.shipped_defense.label}, which your own code applies; set one of the two keys"
            )
        return found

    def _begin_to_defend(self, spec: PluginSpec) -> None:
        self._refuse()
        if configuration(self.config).unit == "round" or not self._one_update_a_step():
            raise DefenseError(
                f"{spec.label} changes the gradients of each step, and this client sends something else (a difference of weights, or the "
                "share of one process): apply it where that is sent, with a mod of Flower or a filter of NVFlare, and declare it "
                "(`shipped_defense`)"
            )
        trained = self._trained()
        try:
            self._defending = TrainingDefense.begin(spec, trained, self._core(trained.model), self.defense_seed)
        except LeakAuditError as error:
            raise DefenseError(f"{spec.label}: {error}") from None
        if self._defending is None:
            notify(f"{spec.label} does nothing, so this training is not defended")
        else:
            self._asked = spec
            notify(f"{spec.label} changes the update of every step of this training before the optimizer gets it")

    def _core(self, model: nn.Module) -> nn.Module:
        """Return the model that is audited inside another one, or all of it."""
        try:
            return auditable(model, self.config)[1]
        except ModelError:
            return unwrapped(model)

    def _configuration(self) -> AuditConfig:
        """Return the audit's configuration, which declares the defence at work."""
        config = configuration(self.config)
        if self._asked is None:
            return config
        return config.model_copy(update={"defense": self._asked, "shipped_defense": self._asked})


def _asks(source: Source) -> bool:
    """Return whether a configuration asks for a defence, even one that is not valid."""
    if isinstance(source, AuditConfig):
        return source.defense is not None
    if isinstance(source, Mapping):
        return source.get("defense") is not None
    if source is None:
        return False
    try:
        return KEY.search(Path(source).read_text(encoding="utf-8")) is not None
    except (OSError, ValueError):
        return False
