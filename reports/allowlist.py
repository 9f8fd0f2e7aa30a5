"""The fields of results and of records of nights that a report may show.

A field that is not listed is private, so a new field is not shown until somebody lists it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from leakaudit.history.record import NightRecord, Rate
from leakaudit.results import conformance, membership
from leakaudit.results import schema as scores

Model = TypeVar("Model", bound=BaseModel)


PUBLIC: Mapping[type[BaseModel], frozenset[str]] = {
    scores.Results: frozenset(
        {
            "schema_",
            "run",
            "subject",
            "threat_model",
            "regime",
            "steps",
            "attempts",
            "summaries",
            "controls",
            "utility",
            "prices",
            "privacy",
            "conformance",
            "canaries",
            "membership",
            "coverage",
            "overhead",
            "catalogue",
            "min_tokens",
            "digest",
        }
    ),
    scores.RunInfo: frozenset(
        {
            "id",
            "started",
            "finished",
            "tool",
            "battery",
            "text_mode",
            "seed",
            "command",
            "environment",
            "interrupted",
            "simulated",
            "policy",
            "trackers",
        }
    ),
    conformance.Conformance: frozenset({"mechanism", "steps", "level", "checks", "left_out"}),
    conformance.ConformanceCheck: frozenset(
        {"about", "outcome", "sentence", "parameters", "expected", "observed", "lower", "upper", "tests"}
    ),
    membership.Membership: frozenset(membership.Membership.model_fields),
    membership.MembershipStep: frozenset(membership.MembershipStep.model_fields),
    membership.MembershipPoint: frozenset(membership.MembershipPoint.model_fields),
    scores.Battery: frozenset({"name", "version", "digest", "attacks", "defenses", "budget_s", "slow"}),
    scores.TrackerRun: frozenset({"kind", "id", "name", "url"}),
    scores.TakenPolicy: frozenset({"name", "digest", "taken_at"}),
    scores.Subject: frozenset(
        {
            "model",
            "config_digest",
            "parameters",
            "code_commit",
            "code_dirty",
            "base_model",
            "data",
            "data_invented",
            "artifacts",
        }
    ),
    scores.Artifact: frozenset({"name", "sha256"}),
    scores.ThreatModel: frozenset({"adversary", "sees", "knows", "granted"}),
    scores.Regime: frozenset(
        {
            "dtype",
            "training_mode",
            "dropout",
            "hidden",
            "trainable",
            "accumulation",
            "max_grad_norm",
            "batch_size",
            "update",
            "declared_defenses",
            "declared",
            "tokens",
            "embeddings",
            "head",
            "adapters_rank",
        }
    ),
    scores.StepRecord: frozenset(
        {
            "id",
            "step",
            "seed",
            "epoch",
            "phase",
            "snapshot",
            "n_sequences",
            "n_tokens_bucket",
            "verification",
            "loss",
            "learning_rate",
            "shipped_defense",
            "sent",
            "n_sentences",
            "beyond_hidden",
            "words_not_kept",
        }
    ),
    scores.Verification: frozenset(
        {"status", "relative_error", "scale", "sigma", "note", "absent", "noiseless", "where"}
    ),
    scores.Attempt: frozenset(
        {
            "step",
            "attack",
            "defense",
            "seed",
            "status",
            "reason",
            "stop",
            "adaptive",
            "granted",
            "wall_s",
            "gpu_s",
            "events",
            "sequences",
            "scores",
            "told_by",
            "guess_perplexity",
            "reachable_tokens",
            "reachable_sequences",
        }
    ),
    scores.SequenceScore: frozenset(
        {
            "id",
            "hmac",
            "scores",
            "min_tokens_bucket",
            "long_enough",
            "own_score",
            "proved",
            "reachable",
            "passes",
            "strip",
        }
    ),
    scores.Score: frozenset({"value", "n"}),
    scores.Missing: frozenset({"missing"}),
    scores.Summary: frozenset(
        {
            "attack",
            "defense",
            "steps",
            "sequences",
            "scores",
            "spread",
            "texts_found",
            "guess_perplexity",
            "seconds_per_step",
            "status_counts",
            "reachable_tokens",
            "reachable_sequences",
        }
    ),
    scores.Catalogue: frozenset({"attacks", "defenses", "metrics"}),
    scores.AttackEntry: frozenset({"label", "meaning", "source", "goal", "threat_model", "token_limit"}),
    scores.PluginEntry: frozenset({"label", "meaning", "source"}),
    scores.MetricEntry: frozenset({"label", "meaning", "source", "level", "higher_is_better"}),
    scores.Controls: frozenset({"positive", "negative", "kinds"}),
    scores.Tally: frozenset({"k", "n"}),
    scores.KindControl: frozenset({"k", "n", "by"}),
    scores.Control: frozenset({"k", "n", "note"}),
    scores.Utility: frozenset(
        {
            "defense",
            "metric",
            "value",
            "baseline",
            "higher_is_better",
            "difference",
            "lower",
            "upper",
            "seeds",
            "steps",
            "examples",
            "learning_rate",
            "diverged",
        }
    ),
    scores.Price: frozenset({"defense", "seconds", "traffic"}),
    scores.Privacy: frozenset(
        {
            "defense",
            "epsilon",
            "delta",
            "accountant",
            "noise_multiplier",
            "max_grad_norm",
            "sampling_rate",
            "sampling",
            "steps",
            "origin",
            "covers",
            "note",
            "why_not",
        }
    ),
    scores.Canary: frozenset(
        {
            "defense",
            "attack",
            "k",
            "n",
            "values",
            "guesses",
            "delta",
            "confidence",
            "attacks",
            "epsilon_lower",
            "covers",
            "claimed",
            "claimed_by",
            "notes",
        }
    ),
    scores.Coverage: frozenset({"not_tested", "not_run", "audited_steps", "skipped_snapshots", "total_steps"}),
    scores.NotTested: frozenset({"what", "why"}),
    NightRecord: frozenset(
        {
            "schema_",
            "night",
            "status",
            "reason",
            "verdict",
            "run",
            "steps",
            "planned",
            "repeated",
            "since_last",
            "worse",
            "rates",
        }
    ),
    Rate: frozenset(
        {
            "event",
            "min_tokens",
            "defense",
            "attack",
            "limit",
            "k",
            "n",
            "unjudged",
            "fresh_k",
            "fresh_n",
            "lower",
            "upper",
            "so_far",
            "log_e",
        }
    ),
    scores.Overhead: frozenset({"blocked_s", "training_s", "check_s", "writer_s", "memory_mb", "disk_mb"}),
}
"""Fields of the results, and of the records of nights, that a report may show. `redaction` also cleans the command, the environment and the reasons of errors."""


ENVIRONMENT = frozenset(
    {
        "accelerate",
        "cpu",
        "cuda",
        "device",
        "dtype",
        "gpu",
        "leakaudit",
        "machine",
        "numpy",
        "platform",
        "python",
        "safetensors",
        "scipy",
        "system",
        "threads",
        "torch",
        "transformers",
    }
)
"""Keys of the environment that hold versions or hardware. Anything else may hold a user or a path."""


ERROR_TYPE = re.compile(
    r"[A-Za-z_][A-Za-z0-9_.]{0,60}(?:Error|Exception|Expired|Exit|Interrupt|Warning)(?: (?:at|in) [A-Za-z0-9_.]{1,60}:\d{1,6})?"
)
"""The type and the place of an exception, such as `ValueError at span.py:120`. Its message is hidden, because it may quote private data."""


_PATH_LIKE = re.compile(r"[/\\]|^~|\.(jsonl?|csv|tsv|txt|ya?ml|safetensors|parquet|pt|bin|html)$", re.IGNORECASE)


_SECRET_OPTION = re.compile(r"token|secret|passw|key|credential", re.IGNORECASE)


# ------------------------------------------------------------------------------------------------------- the allow-list
def allowed(model: Model) -> Model:
    """Return a copy of `model` that holds the fields rated `PUBLIC` and nothing else.

    A field left out keeps its default; one without a default does not exist in the copy, and reading it fails.
    """
    rated = next(
        (kind for kind in type(model).__mro__ if kind in PUBLIC), type(model)
    )  # a field that a subclass adds is not rated
    fields = PUBLIC[rated]
    return type(model).model_construct(**{name: _allowed_value(getattr(model, name)) for name in sorted(fields)})


def _allowed_value(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return allowed(value)
    if isinstance(value, tuple):
        return tuple(_allowed_value(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _allowed_value(item) for key, item in value.items()}
    return value


def without_paths(text: str) -> str:
    """Return a sentence with a placeholder for each word that may be a path.

    >>> without_paths("step 3: the file /home/ann/notes.jsonl is missing")
    'step 3: the file <path> is missing'
    """
    return " ".join("<path>" if _PATH_LIKE.search(word.strip("'\"(),.;:")) else word for word in text.split())


def clean_command(command: str) -> str:
    """Return a command line with placeholders for paths and secrets.

    >>> clean_command("leakaudit run /home/ann/spool --seed 7 --api-key abc")
    'leakaudit run <path> --seed 7 --api-key <secret>'
    """
    try:
        words = shlex.split(command)
    except ValueError:  # an unclosed quote: the words cannot be separated
        return "<not shown>" if command else ""
    cleaned: list[str] = []
    secret_follows = False
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if secret_follows:
            cleaned.append("<secret>")
        elif equals and (_SECRET_OPTION.search(option) or _PATH_LIKE.search(value)):
            cleaned.append(option + "=" + ("<secret>" if _SECRET_OPTION.search(option) else "<path>"))
        elif _PATH_LIKE.search(word):
            cleaned.append(re.split(r"[/\\]", word)[-1] if index == 0 else "<path>")
        else:
            cleaned.append(word)
        secret_follows = word.startswith("-") and not equals and _SECRET_OPTION.search(word) is not None
    return " ".join(cleaned)
