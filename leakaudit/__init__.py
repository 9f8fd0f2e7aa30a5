"""What could somebody who sees a client's update read out of it?

leakaudit answers this for a real training run.

    from leakaudit.callbacks.hf_trainer import LeakAuditCallback     # the callback
    python -m leakaudit simulate --help                              # without a training loop
    leakaudit.load("leakaudit-audit")                                # a finished audit, in a notebook
    leakaudit.with_canaries(dataset, "audit.yaml")                   # invented records for a training that is made to be audited

Nothing heavy is imported here: the gate and the report run where there is no torch.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from leakaudit.capture.canary_records import with_canaries as with_canaries
    from leakaudit.notebook.loaded import load as load

__all__ = ["__version__", "load", "with_canaries"]


def __getattr__(name: str) -> Any:
    """Import a function, or read the version, when it is asked for."""
    if name == "__version__":
        return _version()
    if name == "load":
        from leakaudit.notebook.loaded import load

        return load
    if name == "with_canaries":
        from leakaudit.capture.canary_records import with_canaries

        return with_canaries
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("leakaudit")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0.1.0+checkout"
