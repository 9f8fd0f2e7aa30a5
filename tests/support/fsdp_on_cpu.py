"""FSDP2 of Accelerate on CPUs, which Accelerate itself offers on GPUs only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from accelerate import state as accelerate_state
from accelerate.utils import DistributedType


@contextlib.contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Let Accelerate shard a model over processes on CPUs.

    With several CPUs it ignores the plugin and uses DDP. Here its state takes the plugin as it does with several GPUs; how it prepares the
    model and the optimizer and how it clips and accumulates is its own code.
    """
    kind: Any = accelerate_state.AcceleratorState
    real = kind.__init__

    def begin(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        real(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
            accelerate_state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    settings = dict(os.environ)  # in which the plugin tells every later training to shard too
    kind._reset_state(True)
    kind.__init__ = begin
    try:
        yield
    finally:
        kind.__init__ = real
        os.environ.clear()
        os.environ.update(settings)
        kind._reset_state(True)
