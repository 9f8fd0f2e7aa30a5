"""The client: its batch, its step, and what an eavesdropper sees of it.

`facts`, `noise_level`, `observation` and `optimizer` are public; `truth`, `recipe` and `step` are private to the client. It may import `registry`, `results` and
`models`.
"""

__all__ = [
    "array_batches",
    "batches",
    "facts",
    "first_blocks_step",
    "fused_head",
    "local_steps",
    "noise_level",
    "observation",
    "optimizer",
    "other_order",
    "other_steps",
    "output_gradients",
    "per_example",
    "recipe",
    "replay",
    "sequences",
    "snapshot",
    "step",
    "trace",
    "truth",
    "wire",
]
