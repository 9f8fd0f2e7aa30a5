"""The gate, which judges results by a policy. No torch.

`events` lists what a policy may limit, and `policy` reads the limits. `evidence`, `outcome`, `controls`, `requirements` and `rules` judge.
`verdict` holds the answer, `wording` writes its sentences, and `evaluate` calls them all. `lint`, `policy_diff` and `policy_text` help to write a
policy, and `steps_needed` counts the steps that one takes.
It may import `results`, `config`, `files` and the names of plugins (`plugins.names`).
"""

__all__ = [
    "controls",
    "early",
    "evaluate",
    "events",
    "evidence",
    "lint",
    "outcome",
    "policy",
    "policy_diff",
    "policy_text",
    "requirements",
    "rules",
    "steps_needed",
    "verdict",
    "waivers",
    "wording",
]
