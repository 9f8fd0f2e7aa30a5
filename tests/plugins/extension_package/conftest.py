"""Keeps pytest from importing the extension.

It would otherwise join the registry of every test.
"""

collect_ignore_glob = ["*.py"]
