"""Metrics: how much of the batch a guess got right. One file each, compared in README.md.

Importing this package registers them; `scoring.score` applies all of them to one attempt.
"""

from leakaudit.metrics import exact as exact
from leakaudit.metrics import label_accuracy as label_accuracy
from leakaudit.metrics import label_classes as label_classes
from leakaudit.metrics import label_exact as label_exact
from leakaudit.metrics import label_excess as label_excess
from leakaudit.metrics import label_hellinger as label_hellinger
from leakaudit.metrics import longest_run as longest_run
from leakaudit.metrics import masked_token_recall as masked_token_recall
from leakaudit.metrics import rouge as rouge
from leakaudit.metrics import token_precision as token_precision
from leakaudit.metrics import token_recall as token_recall

__all__ = [
    "exact",
    "label_accuracy",
    "label_classes",
    "label_exact",
    "label_excess",
    "label_hellinger",
    "longest_run",
    "masked_token_recall",
    "rouge",
    "semantic_similarity",
    "token_precision",
    "token_recall",
]
