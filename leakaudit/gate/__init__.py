"""The gate, which judges results by a policy. No torch.

`events` lists what a policy may limit, and `policy` reads the limits. `evidence`, `outcome`, `controls`, `floors`,
`requirements`, `coverage`, `claims` and `rules` judge.
`verdict` holds the answer, `wording` writes its sentences, and `evaluate` calls them all.
It may import `results`, `config`, `files` and the names of plugins (`plugins.names`).
"""

__all__ = [
    "claims",
    "controls",
    "coverage",
    "early",
    "evaluate",
    "events",
    "evidence",
    "floors",
    "outcome",
    "policy",
    "policy_parts",
    "requirements",
    "rules",
    "undecided",
    "verdict",
    "waivers",
    "wording",
]
