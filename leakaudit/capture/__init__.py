"""Capture: keep real client steps of a training run, whatever the framework.

It may import `client`, `models`, `config`, `storage`, `results`, `plugins`, `gate` and what an audit offers to a
running training (`audit.inline`, `audit.verification`). It imports no training framework; `callbacks` does that.
"""

__all__ = [
    "agreement",
    "array_batches",
    "boundary",
    "calls",
    "distributed",
    "fitness",
    "forward_hooks",
    "in_place",
    "inside_step",
    "optimizers",
    "outcome",
    "part_of_step",
    "plan",
    "private_sgd",
    "recorder",
    "run",
    "sketch",
    "step_facts",
    "unaudited",
    "users_state",
    "withheld_inputs",
    "witness",
    "worker_process",
    "worker_progress",
]
