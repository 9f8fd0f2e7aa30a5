"""What could somebody who sees a client's update read out of it?

leakaudit answers this for a real training run.

    from leakaudit.callbacks.hf_trainer import LeakAuditCallback     # the callback
    python -m leakaudit simulate --help                              # without a training loop

Nothing heavy is imported here: the gate and the report run where there is no torch.
"""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("leakaudit")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0.1.0+checkout"
