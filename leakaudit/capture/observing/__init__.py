"""Observing: what a training does in a step, seen by hooks.

`forward_hooks` records the model's calls and the gradients at its outputs, `optimizers` and `optimizer_hooks` find what moves the weights. It
may import what `capture` may.
"""

__all__ = [
    "calls",
    "entry_sample",
    "forward_hooks",
    "optimizer_hooks",
    "optimizer_step",
    "optimizers",
    "private_sgd",
    "withheld_inputs",
]
