"""Observing: hooks that see what a training does in a step.

`forward_hooks` records the model's calls and the gradients at its outputs; `optimizers` and `optimizer_hooks` find the optimizers that
move the weights and watch their steps. This package may import what `capture` may.
"""

__all__ = [
    "accountant",
    "calls",
    "entry_sample",
    "forward_hooks",
    "local_optimizer",
    "optimizer_hooks",
    "optimizer_step",
    "optimizers",
    "private_sgd",
    "waiting_gradients",
    "withheld_inputs",
]
