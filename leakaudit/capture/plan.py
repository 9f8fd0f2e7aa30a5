"""The plan of which steps of a training run are kept.

The plan also says whether these steps can be enough for the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import ceil

from leakaudit.config.audit import MAX_COUNT, AuditConfig
from leakaudit.gate.policy import Policy, Rule
from leakaudit.results import bounds as stats
from leakaudit.results.wording import counted, duration, ordinal

LEAST_DISTANCE = 10
"""Least distance in steps between two kept ones under `every_n_steps: auto`. Our choice: on a busy machine a kept step costs about one
step of training (docs/capture.md), so this bounds the cost by a tenth of training; 59 steps then fit into runs of 581 steps and more."""
LEAST_STEPS = 10
"""Steps that `auto` keeps of a short run, even if they are closer than `LEAST_DISTANCE`. Our choice: ten more steps take little time,
and a client of federated learning trains only a few steps, so that all of them are kept."""
MARGIN = 1.1
"""Factor by which `max_snapshots: auto` exceeds the steps that the policy needs. Our choice: some steps are not evidence, because they
hold no long sentence, are not finite or cannot be checked."""
GROWTH = 10
"""If the length of the run is unknown, the distance to the next kept step is the number of steps so far divided by this, and at least
`LEAST_DISTANCE`. Our choice: 59 steps then reach to step 6,686, and 39 of them lie in the first 1,000 steps."""
_MOST_STEPS = 10_000_000
"""Steps that a policy is said to need if no number of steps is enough."""


def steps_to_pass(policy: Policy) -> int:
    """Return the smallest number of steps without a leak that lets a policy pass.

    >>> from leakaudit.gate.policy import default_policy
    >>> steps_to_pass(default_policy())
    59
    """
    deciding = [_steps_of(rule, policy.statistics.confidence) for rule in policy.rules if rule.level == "error"]
    return max(policy.evidence.min_steps, *deciding)


def _steps_of(rule: Rule, confidence: float) -> int:
    """Return the smallest number of steps without a leak that lets one rule pass."""
    if rule.max_rate is not None:
        return stats.steps_needed(0, rule.max_rate, confidence) or _MOST_STEPS
    if rule.versus_baseline is not None:  # what clean pairs need; with a baseline on other batches it may take more
        return stats.steps_needed(0, rule.versus_baseline.margin, confidence) or _MOST_STEPS
    if rule.statistic == "p95":  # the largest of so many values bounds the percentile
        return max(stats.MIN_STEPS_FOR_BOOTSTRAP, stats.steps_needed(0, 0.05, confidence) or _MOST_STEPS)
    return stats.MIN_STEPS_FOR_BOOTSTRAP if rule.statistic == "mean" else 1


@dataclass(frozen=True)
class Plan:
    """The steps of one run that are due for the audit.

    They are the same in all processes of the run.
    """

    first: int
    """First step that may be kept, counted from 0."""
    every: int | None
    """Distance in steps between two due ones; None for distances that grow with the run, because its length is unknown."""
    most: int
    """Most steps that are kept."""
    needed: int
    """Number of steps without a leak that the policy needs to pass."""
    total: int | None = None
    """Number of steps of the run; None if unknown."""
    waits: bool = False
    """Whether a due step waits for the disk: the user gave the distance, or the run is so short that `auto` keeps steps closer than
    `LEAST_DISTANCE`."""
    unit: str = "step"
    """What is counted: `step` or `round`."""

    @classmethod
    def of(cls, config: AuditConfig, policy: Policy, total: int | None) -> Plan:
        """Choose the values that `auto` leaves open.

        Args:
            config: the audit's configuration.
            policy: the gate's.
            total: steps of the run, rounds of local steps counted once; None if unknown.
        """
        needed = steps_to_pass(policy)
        most = max(LEAST_STEPS, ceil(MARGIN * needed)) if config.max_snapshots == "auto" else config.max_snapshots
        every = config.every_n_steps
        if every != "auto":
            return cls(config.first_step, every, most, needed, total, waits=config.unit == "step", unit=config.unit)
        wanted = max(LEAST_STEPS, needed) if config.max_snapshots == "auto" else most
        if config.unit == "round":
            spread = 1 if total is None else max(1, (total - config.first_step) // wanted)
            return cls(config.first_step, spread, most, needed, total, unit="round")
        distance = None if total is None else distance_for(total - config.first_step, wanted)
        waits = distance is not None and distance < LEAST_DISTANCE
        return cls(config.first_step, distance, most, needed, total, waits)

    def due(self, step: int) -> bool:
        """Return whether a step is due; its number alone decides."""
        if self.every is None:
            return step in self._growing
        return step >= self.first and (step - self.first) % self.every == 0

    def nth(self, number: int) -> int:
        """Return the step that is the `number`-th to be due, counted from 0."""
        if self.every is None:
            return next(islice(growing(self.first), number, None))
        return self.first + number * self.every

    @property
    def kept(self) -> int | None:
        """Number of steps that are kept if no due step is missed.

        It is None if the length of the run is unknown.
        """
        return None if self.total is None else min(self.most, self._due_before(self.total))

    def _due_before(self, total: int) -> int:
        if self.every is None:
            return sum(step < total for step in self._growing)
        return max(0, ceil((total - self.first) / self.every))

    @cached_property
    def _growing(self) -> frozenset[int]:
        return frozenset(growing(self.first))

    # ------------------------------------------------------------------ in words

    def steps_in_words(self) -> str:
        """Return which steps are kept, in a clause.

        >>> Plan(first=0, every=20, most=65, needed=59, total=1200).steps_in_words()
        'keeps 60 of 1,200 steps (every 20th)'
        """
        kept = self.kept
        if kept == 0:
            return f"will keep no {self.unit}: the run has {self.total}, and `first_step` is {self.first}"
        start = f" from {self.unit} {self.first}" if self.first else ""
        if self.every is None:
            shown = ", ".join(str(self.nth(number)) for number in range(6))
            return (
                f"keeps steps {shown} and so on at growing distances (up to {self.most}; the run's length is not known)"
            )
        rhythm = f"every {self.unit}" if self.every == 1 else f"every {ordinal(self.every)}"
        if kept is None:
            return f"keeps {rhythm}{start if self.every == 1 else f' {self.unit}{start}'} (up to {self.most})"
        if kept == self.total:
            return f"keeps the only {self.unit}" if kept == 1 else f"keeps all {kept:,} {self.unit}s"
        capped = f", up to {self.unit} {self.nth(kept - 1):,}" if kept < self._due_before(self.total or 0) else ""
        return f"keeps {kept:,} of {self.total:,} {self.unit}s ({rhythm}{start}{capped})"

    def policy_in_words(self, config: AuditConfig, room: int) -> str:
        """Return what the policy needs that this plan cannot reach, and what to set.

        It is one clause. It is empty if the plan reaches what the policy needs.

        Args:
            config: the audit's configuration.
            room: steps that the spool holds at a time.
        """
        need = f"the policy needs {counted(self.needed, self.unit)} to pass"
        if self.total is not None and self.total - self.first < self.needed:
            return f"{need}, more than this run has, so it can fail the policy and not pass it"
        changes = list(self._changes(config, room))
        if changes:
            return f"{need}, which this plan cannot reach: set {' and '.join(changes)}"
        if self.every is None:
            return f"{need}, which are kept by step {self.nth(self.needed - 1):,} (`total_steps` spreads them over the run)"
        return ""

    def _changes(self, config: AuditConfig, room: int) -> Iterator[str]:
        """Yield settings with which the plan could reach the policy's minimum.

        Each is a key and the value that would be enough.
        """
        if self.most < self.needed:
            yield f"`max_snapshots: {self.needed}`"
        if self.total is not None and self._due_before(self.total) < self.needed:
            yield f"`every_n_steps: {(self.total - self.first) // self.needed}`"
        if config.schedule == "deferred" and room < self.needed:
            yield f"`max_spool_gb: {ceil(config.max_spool_gb * self.needed / max(1, room))}`"


def distance_for(steps: int, wanted: int) -> int:
    """Return the distance at which `wanted` steps are spread over a run.

    It is bounded from below, because each kept step has a cost.

    Args:
        steps: of the run, from the first that may be kept.
        wanted: steps to keep.

    >>> [distance_for(steps, 59) for steps in (3, 80, 300, 1200, 100_000)]
    [1, 8, 10, 20, 1694]
    """
    spread = max(steps // wanted, LEAST_DISTANCE)
    return max(1, min(spread, steps // min(wanted, LEAST_STEPS)))


def growing(first: int) -> Iterator[int]:
    """Yield steps of a run whose length is unknown.

    The distance doubles up to `LEAST_DISTANCE`; later it is a fixed part of the steps so far.

    >>> list(islice(growing(0), 9))
    [0, 1, 2, 4, 8, 16, 26, 36, 46]
    """
    passed = 0
    while first + passed <= MAX_COUNT:
        yield first + passed
        passed += max(1, passed if passed < LEAST_DISTANCE else max(LEAST_DISTANCE, passed // GROWTH))


def room_in_words(plan: Plan, config: AuditConfig, room: int) -> str:
    """Return how many kept steps fit on the disk, in a clause.

    The clause is empty if all of them fit.

    >>> room_in_words(Plan(0, 20, most=65, needed=59, total=1200), AuditConfig(), room=22)
    'the disk space allowed holds 22 of them at a time (`max_spool_gb: 20`)'
    """
    if room >= (plan.most if plan.kept is None else plan.kept):
        return ""
    at_a_time = "" if config.schedule == "deferred" else " at a time"
    return f"the disk space allowed holds {room} of them{at_a_time} (`max_spool_gb: {config.max_spool_gb:g}`)"


def time_in_words(config: AuditConfig) -> str:
    """Return how many attacks run on each step, and how long they may take.

    The time is the sum of the budgets. The result is one clause.

    >>> time_in_words(AuditConfig())
    '7 attacks, up to 60 s each: up to 7 min a step'
    """
    attempts = counted(len(config.attacks), "attack")
    if len(config.defenses) > 1:
        attempts += f" x {counted(len(config.defenses), 'defence')}"
    seconds = len(config.attacks) * len(config.defenses) * config.budget_s
    return f"{attempts}, up to {config.budget_s:g} s each: up to {duration(seconds)} a {config.unit}"
