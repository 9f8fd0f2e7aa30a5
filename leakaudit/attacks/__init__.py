"""Attacks: what an eavesdropper reads out of an update. One file each, compared in README.md.

Importing this package registers them.
"""

from leakaudit.attacks import embedding_rows as embedding_rows
from leakaudit.attacks import idlg as idlg
from leakaudit.attacks import llg as llg
from leakaudit.attacks import span as span
from leakaudit.attacks import tag as tag
