"""Keeps pytest from importing the extension into its own process, where it would join the registry of every test."""

collect_ignore_glob = ["*.py"]
