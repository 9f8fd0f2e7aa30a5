"""Attacks: what an eavesdropper reads out of an update. One file each, compared in README.md.

Importing this package registers them.
"""

from leakaudit.attacks import dlg as dlg
from leakaudit.attacks import embedding_rows as embedding_rows
from leakaudit.attacks import feature_labels as feature_labels
from leakaudit.attacks import grab as grab
from leakaudit.attacks import gradient_mixture as gradient_mixture
from leakaudit.attacks import idlg as idlg
from leakaudit.attacks import ilrg as ilrg
from leakaudit.attacks import lamp_cos as lamp_cos
from leakaudit.attacks import lamp_l1l2 as lamp_l1l2
from leakaudit.attacks import llg as llg
from leakaudit.attacks import llg_plus as llg_plus
from leakaudit.attacks import llg_star as llg_star
from leakaudit.attacks import pooler_features as pooler_features
from leakaudit.attacks import random_labels as random_labels
from leakaudit.attacks import rlu as rlu
from leakaudit.attacks import span as span
from leakaudit.attacks import tag as tag
from leakaudit.attacks import target_tokens as target_tokens

__all__ = [
    "dlg",
    "embedding_rows",
    "feature_labels",
    "grab",
    "gradient_mixture",
    "idlg",
    "ilrg",
    "lamp_cos",
    "lamp_l1l2",
    "llg",
    "llg_plus",
    "llg_star",
    "pooler_features",
    "random_labels",
    "rlu",
    "span",
    "tag",
    "target_tokens",
]
