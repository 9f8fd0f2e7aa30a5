"""Comparability keys: what must agree before two audits are compared.

A key is a short text without private content. Its name says what it is about, so that a report can say what changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from leakaudit.gate.policy import Policy
from leakaudit.results.files import minor_version
from leakaudit.results.schema import Results

NAMES: Mapping[str, str] = {
    "model": "the model's architecture",
    "data": "the data set",
    "attacks": "the attacks, their options or the version of leakaudit",
    "granted": "what the attacker is granted",
    "defenses": "the defences",
    "shipped": "the defences that the run declares",
    "batch": "the shape of a batch",
    "update": "what the client sends",
    "budget": "the time limit of an attempt",
    "hardware": "the device",
    "policy": "the policy",
}
"""Key -> what it is about, in words."""

_SHORT = 12
"""Digits of a digest that a key shows, as elsewhere in reports."""

_LONG = 60
"""Most characters of a value that a refusal shows. Our choice: two of them fit a line of a terminal."""


def keys_of(results: Results, policy: Policy, data: str = "") -> dict[str, str]:
    """Return the comparability keys of an audit.

    Args:
        results: the audit.
        policy: the policy that judges it.
        data: name of the data set, or a mark of it; empty if unknown.
    """
    run, regime, subject = results.run, results.regime, results.subject
    if minor_version(results) >= 6:
        declared = list(
            regime.declared
        )  # what was found instead is an outcome: a defence that is gone is compared, not excused
    else:
        declared = sorted({step.shipped_defense for step in results.steps if step.n_sequences} - {"none"})
    unaware = "" if all(attempt.adaptive for attempt in results.attempts) else "; attacks do not know the defences"
    return {
        "model": f"{subject.model} {_short(subject.config_digest)}",
        "data": data,
        "attacks": f"{', '.join(run.battery.attacks)}; leakaudit {run.tool}",
        "granted": ", ".join(results.threat_model.granted) + f"; {results.threat_model.adversary}" + unaware,
        "defenses": ", ".join(run.battery.defenses),
        "shipped": ", ".join(declared) or "none",
        "batch": f"{regime.batch_size} texts, {'training' if regime.training_mode else 'eval'} mode, dropout {regime.dropout:g}, {regime.dtype}",
        "update": f"{regime.update}; trained: {regime.trainable}; accumulation {regime.accumulation}",
        "budget": f"{run.battery.budget_s:g} s",
        "hardware": run.environment.get("device", ""),
        "policy": policy_key(policy),
    }


def policy_key(policy: Policy) -> str:
    """Return the value of the key `policy`."""
    return _short(policy.digest)


def changed(base: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the names of the keys that differ, in the order of `NAMES`.

    A key that only one of the two has differs.
    """
    known = [name for name in NAMES if base.get(name, "") != new.get(name, "")]
    return known + sorted(name for name in (base.keys() | new.keys()) - NAMES.keys() if base.get(name) != new.get(name))


def in_words(names: list[str]) -> str:
    """Return keys as a reader knows them, such as "the data set and the policy"."""
    words = [NAMES.get(name, name) for name in names]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def differences_in_words(names: list[str], base: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return what keys are about, with the values that both audits have."""
    values = "; ".join(f"{name}: {_shown(base.get(name))} and {_shown(new.get(name))}" for name in names)
    return f"{in_words(names)} ({values})"


def _shown(value: str | None) -> str:
    """Return the value of a key as a refusal shows it."""
    if not value:
        return "unknown"
    return value if len(value) <= _LONG else value[: _LONG - 3] + "..."


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:_SHORT]
