"""Results of an audit: models, files, summaries and bounds. No torch.

It may import `files`.
"""

__all__ = [
    "as_sent",
    "bounds",
    "consistency",
    "events",
    "files",
    "former_keys",
    "journal",
    "lengths",
    "not_audited",
    "privacy",
    "recovery",
    "regime",
    "schema",
    "sequential",
    "short_outputs",
    "summary",
    "wording",
]
