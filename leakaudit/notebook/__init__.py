"""A finished audit as an object: results, verdict, tables and first screen.

No torch.

`leakaudit.load` is the entrance. It may import `files`, `results`, `gate`, `plugins.names`, `history` and `reports`.
"""

__all__ = ["columns", "frames", "loaded", "shown"]
