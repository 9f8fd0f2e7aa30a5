"""Label inference: from the update of an output layer to class counts.

The package may import `plugins`, `models`, `algorithms.gradient_estimate` and the public half of `client` (`facts`, `observation`,
`optimizer`).
"""

__all__ = [
    "auxiliary_data",
    "clipping",
    "counts",
    "counts_in_noise",
    "feature_roots",
    "head_loss",
    "llg",
    "local_steps",
    "logit_regression",
    "output_layer",
    "simulated_counts",
]
