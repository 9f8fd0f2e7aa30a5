"""The gate: a policy and results give a verdict. No torch.

It may import `results`, `config`, `files` and the names of plugins (`plugins.names`).
"""

__all__ = ["evaluate"]
