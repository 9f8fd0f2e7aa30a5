"""Columns of the tables of a loaded audit: name, dtype, unit and meaning.

Every table begins with the column `run`, so that tables of several audits can be put below each other.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Dtype = Literal["string", "Int64", "Float64", "boolean", "datetime64[ns, UTC]"]
"""A dtype of pandas. All of them have a value for "nothing was measured": `<NA>`, or `NaT` for times."""


class Column(NamedTuple):
    """One column of a table."""

    name: str
    dtype: Dtype
    meaning: str
    unit: str = ""


SCORE = "score_"
"""Beginning of the name of a column with the number of one metric, dtype `Float64`, a fraction from 0 to 1."""

_ATTEMPT = (
    Column("run", "string", "id of the audit"),
    Column("step", "string", "id of the client step"),
    Column("attack", "string", "the attack, with its options"),
    Column("defense", "string", "the defence, with its options; `none` without one"),
    Column("seed", "Int64", "seed of the attempt"),
    Column("status", "string", "how the attempt ended, such as `ran` or `not_applicable`"),
)
"""Columns that name an attempt."""

TABLES: dict[str, tuple[Column, ...]] = {
    "runs": (
        Column("run", "string", "id of the audit"),
        Column("started", "datetime64[ns, UTC]", "beginning of the audit"),
        Column("finished", "datetime64[ns, UTC]", "end of the audit"),
        Column("tool", "string", "version of leakaudit"),
        Column("model", "string", "class of the model"),
        Column("parameters", "Int64", "size of the model", "parameters"),
        Column("data", "string", "name of the data set, as its owner calls it"),
        Column("simulated", "boolean", "whether the steps were simulated"),
        Column("interrupted", "boolean", "whether the audit did not come to its end"),
        Column("steps", "Int64", "audited steps", "client steps"),
        Column("total_steps", "Int64", "steps of the training", "client steps"),
        Column("attempts", "Int64", "attempts of all attacks", "attempts"),
        Column("verdict", "string", "`PASS`, `FAIL`, `INCONCLUSIVE` or `ERROR`"),
        Column("deciding_rule", "string", "id of the rule that decides"),
        Column("policy", "string", "name of the policy"),
        Column("training_s", "Float64", "time of the training", "seconds"),
        Column("blocked_s", "Float64", "the part of it that the training spent in the audit", "seconds"),
    ),
    "attempts": (
        *_ATTEMPT,
        Column("step_number", "Int64", "number of the step, counted from 0"),
        Column("phase", "string", "third of the training in which the step lies"),
        Column("verification", "string", "stamp of the step, such as `verified`"),
        Column("shipped_defense", "string", "defence that the training itself applied"),
        Column("reason", "string", "why the attempt did not run; empty if it ran"),
        Column("stop", "string", "why the attack stopped"),
        Column("adaptive", "boolean", "whether the attack knew the parameters of the defence"),
        Column("granted", "string", "what the attack was given besides the update, joined by `+`"),
        Column("leaked", "boolean", "whether a leak event happened; `<NA>` if the attack did not run"),
        Column("events", "string", "leak events, joined by `+`"),
        Column("wall_s", "Float64", "time of the attempt", "seconds"),
        Column("gpu_s", "Float64", "the part of it on a GPU", "seconds"),
        Column("guess_perplexity", "Float64", "perplexity of the guessed texts"),
        Column("reachable_tokens", "Float64", "share of the true tokens among the candidates", "fraction"),
        Column("reachable_sequences", "Float64", "share of the true texts that pass the attack's own test", "fraction"),
    ),
    "texts": (
        *_ATTEMPT,
        Column("text", "string", "id of the true text within its step"),
        Column("hmac", "string", "keyed hash of the true text: the same text has the same hash within an audit"),
        Column("length", "string", "range of its length, such as `9-16`", "tokens"),
        Column("long_enough", "boolean", "whether it has as many tokens as a sentence event asks for"),
        Column(
            "exact", "boolean", "whether it was recovered exactly; `<NA>` for an attack that guesses a bag of words"
        ),
        Column("outcome", "string", "`recovered`, `search gave up` or `out of reach`"),
        Column("own_score", "Float64", "the attack's own score of its guess; no probability", "fraction"),
        Column("proved", "boolean", "whether the attacker could prove that the guess is right"),
        Column("reachable", "Float64", "share of its tokens among the candidates", "fraction"),
        Column("passes", "boolean", "whether the true text passes the attack's own test"),
        Column("strip", "string", "which sixteenths of it were recovered; no characters"),
    ),
    "labels": (
        *_ATTEMPT,
        Column("recovered", "boolean", "whether all label counts of the step were recovered; `<NA>` without a guess"),
        Column("batch_size_known", "boolean", "whether the attack knew the batch size"),
    ),
}
"""Table -> its columns. Behind those of `attempts`, `texts` and `labels` stands a column `score_METRIC` for each metric that was measured."""
