"""Defences: what an eavesdropper would have seen instead. One file each, compared in README.md.

Importing this package registers them.
"""

from leakaudit.defenses import dp_sgd as dp_sgd
from leakaudit.defenses import freeze_embeddings as freeze_embeddings
from leakaudit.defenses import gaussian_noise as gaussian_noise
from leakaudit.defenses import laplace_noise as laplace_noise
from leakaudit.defenses import none as none
from leakaudit.defenses import prune as prune
from leakaudit.defenses import quantize as quantize
from leakaudit.defenses import rounding as rounding
from leakaudit.defenses import sign as sign
from leakaudit.defenses import undefended as undefended

__all__ = [
    "dp_sgd",
    "freeze_embeddings",
    "gaussian_noise",
    "laplace_noise",
    "none",
    "prune",
    "quantize",
    "rounding",
    "sign",
    "undefended",
]
