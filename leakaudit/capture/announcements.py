"""The sentences that a run prints for its user when training begins and ends."""

from __future__ import annotations

from leakaudit.capture.context import OFF_SWITCH
from leakaudit.capture.plan import Plan, room_in_words, time_in_words
from leakaudit.config.audit import AuditConfig, in_a_night
from leakaudit.results.wording import counted
from leakaudit.storage.spool_files import Totals


def plan_in_words(plan: Plan, config: AuditConfig, step_bytes: int, bytes_once: int, note: str) -> tuple[str, ...]:
    """Return the plan of a run in three lines.

    They say which steps are kept and what to set if the policy is then out of reach, where the report will be and how long attacks may
    take, and how to switch the audit off.

    Args:
        plan: of the run.
        config: of the audit.
        step_bytes: size of each kept step on the disk.
        bytes_once: size of the tensors that are written once for all steps.
        note: a clause about an earlier audit in the folder; may be empty.
    """
    if plan.kept == 0:
        return ("; ".join(filter(None, [plan.steps_in_words(), note])),)
    room = max(0, int(config.max_spool_gb * 1e9) - bytes_once) // max(1, step_bytes)
    kept = [plan.steps_in_words(), room_in_words(plan, config, room), plan.policy_in_words(config, room)]
    report = [f"report: {config.out_dir / 'report.html'}, {schedule_in_words(config)} ({time_in_words(config)})", note]
    return "; ".join(filter(None, kept)), "; ".join(filter(None, report)), f"switch off: {OFF_SWITCH}=1"


def schedule_in_words(config: AuditConfig) -> str:
    """Return when and where kept steps are attacked, in a clause."""
    if config.schedule == "inline":
        return "by attacks in this process"
    if config.schedule == "deferred" and config.at_end == "leave":
        return "by the night that runs this training" if in_a_night() else "by `leakaudit worker` later"
    return "by " + ("a side process" if config.schedule == "beside" else "attacks after training")


def not_kept_in_words(totals: Totals, config: AuditConfig) -> list[str]:
    """Return how many due steps were not kept, a clause for each reason."""
    return [f"{counted(number, config.unit)} not kept: {why}" for number, why in totals.not_kept(config)]


def kept_in_words(totals: Totals, config: AuditConfig) -> str:
    """Return how many steps were kept, and for how long training was held up.

    Args:
        totals: what the training process counted.
        config: of the audit.
    """
    overhead = totals.overhead
    held_up = f"training was held up for {overhead.blocked_s:.2f} s of {overhead.training_s:.1f} s"
    return "; ".join([f"{counted(totals.kept, config.unit)} kept", *not_kept_in_words(totals, config), held_up])


def nothing_kept_in_words(steps: int, reasons: list[str], unit: str = "step") -> str:
    """Return why there is nothing to report.

    Args:
        steps: of the run.
        reasons: why no step was kept, a clause each.
        unit: what was counted, `step` or `round`.
    """
    return "; ".join(
        [f"no {unit} was kept, so there is nothing to report: the run had {counted(steps, unit)}", *reasons]
    )
