"""Callbacks: keep a real client step of a training run. One adapter per framework over one recorder.

Nothing is imported here, so that no framework is pulled in by another's adapter:

    from leakaudit.callbacks.hf_trainer import LeakAuditCallback
"""
