"""Results of an audit: models, files, summaries and bounds. No torch.

It may import `files`.
"""

__all__ = [
    "artifacts",
    "as_sent",
    "binding",
    "bounds",
    "canaries",
    "conformance",
    "consistency",
    "differences",
    "epsilon_bounds",
    "events",
    "explained",
    "files",
    "former_keys",
    "gaussian_dp",
    "journal",
    "lengths",
    "membership",
    "not_audited",
    "one_run",
    "origin",
    "privacy",
    "ranking",
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
