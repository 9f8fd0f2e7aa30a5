"""The gate, which judges results by a policy. No torch.

`events` lists what a policy may limit, and `policy` reads the limits. `evidence`, `outcome`, `controls`, `requirements` and `rules` judge.
`verdict` holds the answer, `wording` writes its sentences, and `evaluate` calls them all.
It may import `results`, `config`, `files` and the names of plugins (`plugins.names`).
"""

__all__ = [
    "controls",
    "early",
    "evaluate",
    "events",
    "evidence",
    "origin",
    "outcome",
    "policy",
    "policy_source",
    "requirements",
    "rules",
    "subject",
    "verdict",
    "waivers",
    "wording",
]
