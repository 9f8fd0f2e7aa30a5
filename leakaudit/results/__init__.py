"""Results of an audit: models, files, summaries and bounds. No torch.

It may import `files`.
"""

__all__ = [
    "artifacts",
    "as_sent",
    "as_written",
    "binding",
    "bounds",
    "consistency",
    "differences",
    "events",
    "explained",
    "files",
    "former_keys",
    "journal",
    "lengths",
    "not_audited",
    "origin",
    "plain_attempts",
    "plain_rows",
    "privacy",
    "recovery",
    "regime",
    "replay_command",
    "schema",
    "sequential",
    "short_outputs",
    "summary",
    "usual",
    "utility",
    "wording",
]
