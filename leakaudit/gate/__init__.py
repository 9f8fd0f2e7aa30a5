"""The gate, which judges results by a policy. No torch.

`events` lists what a policy may limit, and `policy` reads the limits. `evidence`, `outcome`, `controls`, `floors`,
`requirements`, `coverage`, `regression`, `claims`, `membership` and `rules` judge; `imported` judges what another auditor found, and
`pooling` joins several audits.
`verdict` holds the answer, `wording` writes its sentences, `way_out` chooses the cheapest defence that passes, and
`evaluate` calls them all.
It may import `results`, `config`, `files` and what plugins say of themselves (`plugins.names`, `plugins.described`).
"""

__all__ = [
    "claims",
    "controls",
    "coverage",
    "early",
    "evaluate",
    "events",
    "evidence",
    "explained",
    "floors",
    "imported",
    "lint",
    "membership",
    "origin",
    "outcome",
    "policy",
    "policy_diff",
    "policy_parts",
    "policy_source",
    "policy_text",
    "pooling",
    "regression",
    "requirements",
    "rules",
    "steps_needed",
    "subject",
    "undecided",
    "verdict",
    "waivers",
    "way_out",
    "wording",
]
