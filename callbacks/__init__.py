"""Callbacks: one adapter per training framework.

An adapter keeps real client steps of a training run. No framework is imported here, so that no adapter imports another's framework:

    from leakaudit.callbacks.hf_trainer import LeakAuditCallback           # Hugging Face Trainer
    from leakaudit.callbacks.lightning_trainer import LeakAuditCallback    # Lightning Trainer
    from leakaudit.callbacks.torch_loop import watch                       # Accelerate, Opacus, plain torch
    from leakaudit.callbacks.rounds import finish, judge_round, open_round # an audit of rounds (`unit: round`)

`docs/capture.md` says which frameworks and features were tried.
"""

from leakaudit.parts import require_audit

__all__ = ["hf_trainer", "lightning_trainer", "rounds", "torch_loop"]

require_audit(__name__)
