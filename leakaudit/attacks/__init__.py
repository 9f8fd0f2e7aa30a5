"""Attacks: one file for each, compared in README.md.

The registry imports every module of this folder, and each registers exactly one plugin.
"""

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
