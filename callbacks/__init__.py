"""Callbacks: one adapter per training framework.

An adapter keeps real client steps of a training run. Nothing is imported here, so that no adapter imports another's framework:

    from leakaudit.callbacks.hf_trainer import LeakAuditCallback           # Hugging Face Trainer
    from leakaudit.callbacks.lightning_trainer import LeakAuditCallback    # Lightning Trainer
    from leakaudit.callbacks.torch_loop import watch                       # Accelerate, Opacus, plain torch

`docs/capture.md` says which frameworks and features were tried.
"""

__all__ = ["hf_trainer", "lightning_trainer", "torch_loop"]
