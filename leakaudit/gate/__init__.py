"""The gate: a policy and results give a verdict. No torch.

`events` says what a policy may ask about; `policy` reads what it allows; `evidence`, `outcome`, `controls` and `rules` judge;
`verdict` is the answer and `wording` its sentences; `evaluate` puts them together.
It may import `results`, `config`, `files` and the names of plugins (`plugins.names`).
"""

__all__ = ["controls", "evaluate", "events", "evidence", "outcome", "policy", "rules", "verdict", "wording"]
