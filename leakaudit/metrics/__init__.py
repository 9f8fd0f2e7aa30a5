"""Metrics: one file for each, compared in README.md.

The registry imports every module of this folder, and each registers exactly one plugin.
"""

__all__ = [
    "exact",
    "label_accuracy",
    "label_classes",
    "label_exact",
    "label_excess",
    "label_hellinger",
    "longest_run",
    "masked_token_recall",
    "rouge1",
    "rouge2",
    "rouge_l",
    "semantic_similarity",
    "token_precision",
    "token_recall",
]
