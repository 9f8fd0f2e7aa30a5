"""Callbacks: one adapter per training framework.

An adapter keeps real client steps of a training run. Nothing is imported here, so that no adapter imports another's framework:

    from leakaudit.callbacks.hf_trainer import LeakAuditCallback           # Hugging Face Trainer
    from leakaudit.callbacks.lightning_trainer import LeakAuditCallback    # Lightning Trainer
    from leakaudit.callbacks.torch_loop import watch                       # Accelerate, Opacus, plain torch

    from leakaudit.callbacks import finish                                # ends an audit of rounds (`unit: round`)

`docs/capture.md` says which frameworks and features were tried.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["finish", "hf_trainer", "lightning_trainer", "torch_loop"]


def finish(out_dir: Path | str | None = None) -> None:
    """End an audit of rounds: one report and one verdict on all of them.

    Without this call the audit ends with the last of the planned `rounds`, or with the program. It waits for the attacks as `at_end` and
    `wait_at_end_s` of the configuration say, and never raises.

    Args:
        out_dir: folder of the audit, as its configuration names it; None for every audit of rounds in this process.
    """
    from leakaudit.capture.rounds.registry import finish_rounds

    finish_rounds(out_dir)
