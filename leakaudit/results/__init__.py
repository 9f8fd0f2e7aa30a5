"""Results of an audit: models, files, summaries and bounds. No torch.

It may import `files`.
"""

__all__ = [
    "bounds",
    "consistency",
    "events",
    "files",
    "former_keys",
    "journal",
    "not_audited",
    "recovery",
    "schema",
    "short_outputs",
    "summary",
    "wording",
]
