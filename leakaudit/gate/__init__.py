"""The gate, which judges results by a policy. No torch.

`events` lists what a policy may limit, and `policy` reads the limits. `evidence`, `outcome`, `controls`, `floors`,
`requirements`, `coverage` and `rules` judge.
`verdict` holds the answer, `wording` writes its sentences, `way_out` chooses the cheapest defence that passes, and `evaluate` calls them all.
It may import `results`, `config`, `files` and the names of plugins (`plugins.names`).
"""

__all__ = [
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
    "way_out",
    "wording",
]
