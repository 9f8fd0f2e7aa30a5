"""The record of one audited step in the results, with its model and regime."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from leakaudit.audit.state import step_id_of
from leakaudit.client.facts import DeclaredDefense, PublicFacts
from leakaudit.client.observation import Observation
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.truth import Truth
from leakaudit.errors import AnatomyError
from leakaudit.models.array_classifier import ArrayClassifier
from leakaudit.models.structure import find_output_head, output_embedding, word_embedding
from leakaudit.results.lengths import bucket
from leakaudit.results.schema import Regime, StepRecord, Subject, Verification, VerificationStatus


def record_of(
    snapshot: Snapshot,
    verification: Verification,
    shipped: tuple[DeclaredDefense, ...],
    *,
    digest: str,
    min_tokens: int,
) -> StepRecord:
    """Return the record of a verified step.

    Args:
        snapshot: the step.
        verification: the step's stamp.
        shipped: the declared defences that are in its update, with the options that the protocol declares.
        digest: keyed hash of the observed update.
        min_tokens: number of tokens of the shortest text that counts for a sentence event.
    """
    provenance = snapshot.provenance
    sequences = snapshot.truth.sequences()
    return StepRecord(
        id=step_id_of(provenance.step),
        step=provenance.step,
        seed=provenance.seed,
        epoch=provenance.epoch,
        phase=_phase(provenance.step, provenance.total_steps),
        snapshot=f"hmac-sha256:{digest}",
        n_sequences=len(sequences),
        n_tokens_bucket=bucket(sum(map(len, sequences))),
        verification=verification,
        loss=_finite(provenance.loss),
        learning_rate=_finite(provenance.learning_rate),
        shipped_defense="+".join(map(DeclaredDefense.with_numbers, shipped)) or "none",
        n_sentences=_sentences(snapshot, min_tokens),
        beyond_hidden=beyond_hidden(snapshot),
        words_not_kept=snapshot.parts is not None and snapshot.observation.facts.task != "classification",
    )


def record_as_sent(record: StepRecord, stamp: Verification, shipped: tuple[DeclaredDefense, ...]) -> StepRecord:
    """Return the record of a step whose update was changed before it was sent.

    Args:
        record: of the step as produced.
        stamp: of the sent update.
        shipped: the declared defences in it, with the options that the protocol declares.
    """
    shown = "+".join(map(DeclaredDefense.with_numbers, shipped)) or "none"
    return record.model_copy(update={"sent": stamp, "shipped_defense": shown})


def lost_record(step: int, reason: str, *, digest: str) -> StepRecord:
    """Return the record of a step whose snapshot could not be audited.

    Args:
        step: optimizer step.
        reason: a clause without private text and without a path.
        digest: keyed hash that replaces the hash of the update.
    """
    return StepRecord(
        id=step_id_of(step),
        step=step,
        phase=_phase(step, None),
        snapshot=f"hmac-sha256:{digest}",
        n_sequences=0,
        n_tokens_bucket="unknown",
        verification=Verification(status=VerificationStatus.UNVERIFIABLE, note=reason),
    )


def subject_of(snapshot: Snapshot) -> Subject:
    """Return the audited model with its configuration's digest and its size."""
    config = json.dumps(snapshot.model_recipe.config, sort_keys=True, default=str)
    return Subject(
        model=snapshot.model_recipe.class_name,
        config_digest=f"sha256:{hashlib.sha256(config.encode()).hexdigest()}",
        parameters=snapshot.parts.parameters
        if snapshot.parts
        else sum(p.numel() for p in snapshot.observation.model.parameters()),
    )


def regime_of(snapshot: Snapshot, before: Regime | None) -> Regime:
    """Return the training regime up to and including this step.

    Args:
        snapshot: the step.
        before: the regime of the earlier steps. The result has the largest batch size and the declared defences of all steps.
    """
    facts, recipe = snapshot.observation.facts, snapshot.recipe
    declared = facts.defenses if snapshot.sent is None else snapshot.sent.facts.defenses
    batch_size = len(snapshot.truth.sequences())
    size = max(batch_size, before.batch_size or 0) if before else batch_size
    tokens = bucket(sum(map(len, texts_of(snapshot.truth, snapshot.observation))))
    parts = _trained_parts(snapshot)
    return Regime(
        dtype=recipe.autocast or facts.dtype,
        training_mode=recipe.training,
        dropout=max(facts.dropout.values(), default=0.0),
        hidden=_hidden(snapshot),
        trainable=_trainable(facts.shared, facts.frozen),
        accumulation=max((1, *recipe.step_sizes))
        if facts.view == "delta"
        else max(1, len(snapshot.truth.micro_batches)),
        max_grad_norm=_finite(recipe.max_grad_norm),
        batch_size=size,
        update=update_in_words(facts),
        declared_defenses=tuple(
            dict.fromkeys([*((before and before.declared_defenses) or ()), *(d.name for d in declared)])
        ),
        declared=tuple(
            dict.fromkeys([*(before.declared if before else ()), *map(DeclaredDefense.with_numbers, declared)])
        ),
        tokens=max(before.tokens if before else "", tokens, key=_top) if tokens != "0" else "",
        embeddings=parts.embeddings,
        head=parts.head,
        adapters_rank=snapshot.model_recipe.lora.rank if snapshot.model_recipe.lora else None,
    )


def joined_regime(regimes: Sequence[Regime]) -> Regime:
    """Return the regime of all steps of several shards.

    Args:
        regimes: of the shards, the one with the latest step last.
    """
    declared = [regime.declared_defenses for regime in regimes if regime.declared_defenses is not None]
    sizes = [regime.batch_size for regime in regimes if regime.batch_size is not None]
    return regimes[-1].model_copy(
        update={
            "batch_size": max(sizes, default=None),
            "tokens": max((regime.tokens for regime in regimes), key=_top),
            "declared_defenses": tuple(dict.fromkeys(name for names in declared for name in names))
            if declared
            else None,
        }
    )


def beyond_hidden(snapshot: Snapshot) -> bool | None:
    """Return whether a step has at least as many different inputs as the hidden size.

    An input is a token at its place; with dropout in training every one differs from all others. None for arrays, and if the hidden size is
    unknown.
    """
    hidden, texts = _hidden(snapshot), texts_of(snapshot.truth, snapshot.observation)
    if hidden is None or not texts:
        return None
    facts = snapshot.observation.facts
    if facts.training_mode and any(facts.dropout.values()):
        return sum(map(len, texts)) >= hidden
    return len({placed for text in texts for placed in enumerate(text)}) >= hidden


def _hidden(snapshot: Snapshot) -> int | None:
    config: Any = getattr(snapshot.observation.model, "config", None)
    return getattr(config, "hidden_size", None)


@dataclass(frozen=True)
class _TrainedParts:
    """Which parts of a model its training changes, as `Regime` says it."""

    embeddings: Literal["trained", "frozen"] | None
    head: Literal["trained", "tied", "frozen"] | None


def _trained_parts(snapshot: Snapshot) -> _TrainedParts:
    """Return whether word embeddings and head of a model are trained."""
    model, facts = snapshot.observation.model, snapshot.observation.facts
    frozen, words, head = set(facts.frozen), word_embedding(model), output_embedding(model)
    if head is None and facts.num_labels:
        head = _class_head(model, facts.num_labels)
    tied = head is not None and head == words and head not in frozen
    return _TrainedParts(
        embeddings=None if words is None else "frozen" if words in frozen else "trained",
        head=None if head is None else "tied" if tied else "frozen" if head in frozen else "trained",
    )


def _class_head(model: nn.Module, classes: int) -> str | None:
    """Return the weight's name of a classifier's output layer, None if it has none."""
    try:
        weight = find_output_head(model, classes).weight
    except AnatomyError:
        return None
    return next((name for name, parameter in model.named_parameters() if parameter is weight), None)


def _top(tokens: str) -> int:
    """Return the end of a range of numbers such as `9-16`; 0 for no range."""
    return int(tokens.rpartition("-")[2] or 0)


def update_in_words(facts: PublicFacts) -> str:
    """Return what a client sends, in words for a report."""
    if facts.view != "delta":
        return "gradient" if facts.view == "local" else "gradient, mean over all processes"
    steps = "1 step" if facts.local_steps == 1 else f"{facts.local_steps:,} steps"
    optimizer = facts.optimizer
    name = "SGD" if optimizer is None else optimizer.algorithm
    rate = "" if facts.learning_rate is None else f", learning rate {facts.learning_rate:g}"
    kept = (
        "" if optimizer is None or optimizer.kind == "sgd" else ", new moments" if optimizer.fresh else ", kept moments"
    )
    return f"difference of weights after {steps} of {name}{rate}{kept}"


def texts_of(truth: Truth, seen: Observation) -> list[tuple[int, ...]]:
    """Return the true sequences; empty if the batch holds arrays instead of text."""
    return [] if isinstance(seen.model, ArrayClassifier) else truth.sequences()


def _sentences(snapshot: Snapshot, min_tokens: int) -> int:
    """Count the texts that are long enough for a sentence event.

    Special tokens do not count, as in scoring.
    """
    special = snapshot.observation.facts.vocabulary.wordless_ids
    texts = texts_of(snapshot.truth, snapshot.observation)
    return sum(sum(token not in special for token in ids) >= min_tokens for ids in texts)


def _phase(step: int, total: int | None) -> Any:
    """Return the third of the run that contains a step.

    It is "simulated" if the length of the run is unknown.
    """
    if not total:
        return "simulated"
    return ("early", "middle", "late")[min(2, 3 * step // total)]


def _finite(number: float | None) -> float | None:
    """Return a finite number unchanged, None for any other.

    A trainer may log a loss of NaN, or clip at infinity only to learn the norm.
    """
    return number if number is not None and math.isfinite(number) else None


def _trainable(shared: tuple[str, ...], frozen: tuple[str, ...]) -> str:
    """Return which parameters are trained, in words."""
    if not frozen:
        return "all"
    kinds = sorted({"embeddings" if "embed" in name else name.rsplit(".", 1)[0] for name in frozen})
    shown = ", ".join(kinds[:3]) + (f" and {len(kinds) - 3} more" if len(kinds) > 3 else "")
    return f"{len(shared)} of {len(shared) + len(frozen)} parameters; frozen: {shown}"
