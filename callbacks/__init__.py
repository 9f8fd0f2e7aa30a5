"""Callbacks: keep a real client step of a training run. One adapter per framework over one run and one recorder.

Nothing is imported here, so that no framework is pulled in by another's adapter:

    from leakaudit.callbacks.hf_trainer import LeakAuditCallback           # Hugging Face Trainer
    from leakaudit.callbacks.lightning_trainer import LeakAuditCallback    # Lightning Trainer
    from leakaudit.callbacks.torch_loop import watch                       # Accelerate, Opacus, plain torch

`docs/capture.md` says what was tried in which stack.
"""

__all__ = ["hf_trainer", "lightning_trainer", "torch_loop"]
