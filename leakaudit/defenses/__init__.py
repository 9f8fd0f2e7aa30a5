"""Defences: what an eavesdropper would have seen instead. One file each, compared in README.md.

Importing this package registers them.
"""

from leakaudit.defenses import freeze_embeddings as freeze_embeddings
from leakaudit.defenses import gaussian_noise as gaussian_noise
from leakaudit.defenses import none as none
from leakaudit.defenses import prune as prune
