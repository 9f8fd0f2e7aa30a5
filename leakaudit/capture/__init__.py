"""Capture: the recording of real client steps of a training run, in any framework.

It may import `client`, `models`, `config`, `storage`, `results`, `plugins`, `gate` and what an audit offers to a
running training (`audit.inline`). It imports no training framework; `callbacks` does that.

How a step is captured: a trainer announces it to `adapter`, `run` decides whether it is due, hooks of `observing` see it, `recording`
copies it and writes a snapshot, and `worker` starts the side process that verifies and attacks it. With `processes`, the ranks of a
distributed run agree on each step. `rounds` makes one audit of several trainings. `boundary` guards every function that torch, a framework
or the user's loop calls. Nothing here calls the user's model, hooks, loss or loop.
"""

__all__ = [
    "adapter",
    "announcements",
    "array_batches",
    "background_tasks",
    "boundary",
    "canary_records",
    "cell_output",
    "context",
    "defended",
    "describe",
    "finished",
    "fitness",
    "missed_steps",
    "notify",
    "observing",
    "origin",
    "outcome",
    "plan",
    "processes",
    "recording",
    "red_line",
    "refusals",
    "remaining_snapshots",
    "results_log",
    "rounds",
    "run",
    "run_name",
    "secret_generator",
    "step_counter",
    "trackers",
    "training_defense",
    "unaudited",
    "worker",
]
