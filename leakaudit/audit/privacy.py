"""What the results say of differential privacy: by whom, for which defence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from leakaudit.audit.accounting import epsilon_of
from leakaudit.audit.battery import labelled_defenses
from leakaudit.config.audit import NONE, AuditConfig
from leakaudit.config.privacy import PrivacyConfig
from leakaudit.plugins import Defense
from leakaudit.registry import defenses
from leakaudit.results.schema import Privacy

SHIPPED = NONE.name
"""Label under which the results show what the run itself ships."""


def privacy_of(config: AuditConfig, told: tuple[Privacy, ...], *, declared: bool) -> tuple[Privacy, ...]:
    """Return every statement on epsilon that an audit can repeat or compute.

    First what the run ships: by its accountant, and as the configuration claims. Then each defence of the battery whose noise an accountant
    can judge.

    Args:
        config: of the audit.
        told: what the accountant of the training said.
        declared: whether the run declares a defence.
    """
    own = list(told)
    if not own and declared:
        shipped: Any = defenses.create(config.shipped_defense.name, config.shipped_defense.options)
        own += _computed(shipped, SHIPPED, config.privacy)
    claimed = [] if config.privacy.epsilon is None else [_claim(config.privacy, next(iter(told), None))]
    others = [one for label, defense in labelled_defenses(config) for one in _computed(defense, label, config.privacy)]
    return (*own, *claimed, *others)


def _claim(asked: PrivacyConfig, told: Privacy | None) -> Privacy:
    """Return the claim of a configuration, with the numbers that the run shows."""
    return Privacy(
        epsilon=asked.epsilon,
        delta=asked.delta,
        accountant=asked.accountant,
        noise_multiplier=None if told is None else told.noise_multiplier,
        max_grad_norm=None if told is None else told.max_grad_norm,
        sampling_rate=asked.sampling_rate if told is None else told.sampling_rate or asked.sampling_rate,
        sampling=asked.sampling if told is None else told.sampling,
        steps=asked.steps,
        covers=asked.covers,
    )


def _computed(defense: Defense, label: str, asked: PrivacyConfig) -> Iterator[Privacy]:
    """Yield the epsilon of a defence, if an accountant can judge its noise."""
    multiplier = defense.gaussian_multiplier
    if multiplier is None or defense.is_identity():
        return
    known: dict[str, Any] = {
        "defense": label,
        "origin": "computed",
        "noise_multiplier": multiplier,
        "max_grad_norm": defense.clipping_bound,
        "sampling_rate": asked.sampling_rate,
        "sampling": asked.sampling,
        "steps": asked.steps,
        "delta": asked.delta,
    }
    if asked.sampling_rate is None or asked.steps is None or asked.delta is None:
        lacking = [key for key in ("sampling_rate", "steps", "delta") if getattr(asked, key) is None]
        yield Privacy(**known, why_not=f"the configuration does not name {', '.join(lacking)} (`privacy`)")
        return
    found = epsilon_of(multiplier, asked.sampling_rate, asked.steps, asked.delta)
    yield Privacy(**known, epsilon=found.value, accountant=found.accountant, why_not=found.why_not)
