"""Recording: the copy of what a client transmits in a step.

The copy is made before the weights move. How a step is recorded: `current_step` has the order of events, `pass_recorder` and
`local_gradients` take what `capture.observing` sees, `step_keeper` and `step_copier` copy the step, `background_writer` and
`step_writer` make a snapshot of it. This package may import what `capture` may.
"""

__all__ = [
    "background_writer",
    "copies",
    "current_step",
    "kept_step",
    "live_model",
    "local_gradients",
    "local_round",
    "part_of_step",
    "pass_recorder",
    "recorder",
    "recorder_setup",
    "round_recorder",
    "sketch",
    "step_copier",
    "step_facts",
    "step_keeper",
    "step_recording",
    "step_tensors",
    "step_trace",
    "step_writer",
]
