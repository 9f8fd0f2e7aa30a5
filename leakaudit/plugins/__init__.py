"""Plugins: the protocols of attacks, defences, metrics and priors.

Authors of plugins import every name that they need from here.

    from leakaudit.plugins import APPLIES, Budget, Observation, Reconstruction, attack

A name is imported when it is first used, so that neither the registry nor a metric loads torch. This room may import only `client`,
`models`, `config`, `results` and `files`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leakaudit.client.facts import DeclaredDefense, Granted, PublicFacts
    from leakaudit.client.observation import Observation, Update, check_finite, root_mean_square
    from leakaudit.client.step import ClientStep
    from leakaudit.errors import AnatomyError, ConfigError, LeakAuditError, ModelError, PriorError, SnapshotError
    from leakaudit.models.structure import word_embedding
    from leakaudit.models.vocabulary import Vocabulary
    from leakaudit.plugins.adapter_defense import AdapterDefense
    from leakaudit.plugins.attack_protocol import (
        APPLIES,
        FALSE_EVENTS,
        Applicability,
        Attack,
        Goal,
        GuessedSequence,
        Needs,
        Reach,
        Reads,
        Reconstruction,
        not_applicable,
    )
    from leakaudit.plugins.budget import Budget
    from leakaudit.plugins.compression import at_levels, largest_entries, possible_levels, random_mask, uniform_draws
    from leakaudit.plugins.defense_protocol import Defense
    from leakaudit.plugins.entities import entities_held, entities_in_bag, same_entity
    from leakaudit.plugins.entry_uncertainty import uncertainties
    from leakaudit.plugins.error_feedback import SentInOrder
    from leakaudit.plugins.metric_protocol import (
        Batch,
        BatchMetric,
        LabelCounts,
        Level,
        Pair,
        SequenceMetric,
        StepMetric,
        TaggedEntities,
    )
    from leakaudit.plugins.noise_scale import AdditiveNoise
    from leakaudit.plugins.overlap import (
        ROUGE_SOURCE,
        clipped_overlap,
        is_found,
        label_success_rate,
        longest_common_run,
        rouge_f,
    )
    from leakaudit.plugins.prior_loading import load_prior
    from leakaudit.plugins.prior_protocol import (
        Prior,
        Scorer,
        check_same_tokens,
        frame_of,
        tokenizer_vocabulary,
        words_of,
    )
    from leakaudit.plugins.step_defense import StepDefense
    from leakaudit.registry import attack, defense, metric, prior

_HOMES = {
    "leakaudit.client.facts": "DeclaredDefense Granted PublicFacts",
    "leakaudit.client.observation": "Observation Update check_finite root_mean_square",
    "leakaudit.client.step": "ClientStep",
    "leakaudit.errors": "AnatomyError ConfigError LeakAuditError ModelError PriorError SnapshotError",
    "leakaudit.models.structure": "word_embedding",
    "leakaudit.models.vocabulary": "Vocabulary",
    "leakaudit.plugins.adapter_defense": "AdapterDefense",
    "leakaudit.plugins.attack_protocol": "APPLIES Applicability Attack FALSE_EVENTS Goal GuessedSequence Needs Reach Reads Reconstruction not_applicable",
    "leakaudit.plugins.budget": "Budget",
    "leakaudit.plugins.compression": "at_levels largest_entries possible_levels random_mask uniform_draws",
    "leakaudit.plugins.defense_protocol": "Defense",
    "leakaudit.plugins.entities": "entities_held entities_in_bag same_entity",
    "leakaudit.plugins.entry_uncertainty": "uncertainties",
    "leakaudit.plugins.error_feedback": "SentInOrder",
    "leakaudit.plugins.metric_protocol": "Batch BatchMetric LabelCounts Level Pair SequenceMetric StepMetric TaggedEntities",
    "leakaudit.plugins.noise_scale": "AdditiveNoise",
    "leakaudit.plugins.overlap": "ROUGE_SOURCE clipped_overlap is_found label_success_rate longest_common_run rouge_f",
    "leakaudit.plugins.prior_loading": "load_prior",
    "leakaudit.plugins.prior_protocol": "Prior Scorer check_same_tokens frame_of tokenizer_vocabulary words_of",
    "leakaudit.plugins.step_defense": "StepDefense",
    "leakaudit.registry": "attack defense metric prior",
}
"""Module -> the names that this module takes from it. The imports above list the same names, but only type checkers run them."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "APPLIES",
    "FALSE_EVENTS",
    "ROUGE_SOURCE",
    "AdapterDefense",
    "AdditiveNoise",
    "AnatomyError",
    "Applicability",
    "Attack",
    "Batch",
    "BatchMetric",
    "Budget",
    "ClientStep",
    "ConfigError",
    "DeclaredDefense",
    "Defense",
    "Goal",
    "Granted",
    "GuessedSequence",
    "LabelCounts",
    "LeakAuditError",
    "Level",
    "ModelError",
    "Needs",
    "Observation",
    "Pair",
    "Prior",
    "PriorError",
    "PublicFacts",
    "Reach",
    "Reads",
    "Reconstruction",
    "Scorer",
    "SentInOrder",
    "SequenceMetric",
    "SnapshotError",
    "StepDefense",
    "StepMetric",
    "TaggedEntities",
    "Update",
    "Vocabulary",
    "at_levels",
    "attack",
    "check_finite",
    "check_same_tokens",
    "clipped_overlap",
    "defense",
    "entities_held",
    "entities_in_bag",
    "frame_of",
    "is_found",
    "label_success_rate",
    "largest_entries",
    "load_prior",
    "longest_common_run",
    "metric",
    "not_applicable",
    "possible_levels",
    "prior",
    "random_mask",
    "root_mean_square",
    "rouge_f",
    "same_entity",
    "tokenizer_vocabulary",
    "uncertainties",
    "uniform_draws",
    "word_embedding",
    "words_of",
]

if not TYPE_CHECKING:  # with `__getattr__` a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(import_module(_HOME_OF[name]), name)
        return globals()[name]

    def __dir__() -> list[str]:
        """Return the names, imported or not."""
        return sorted({*globals(), *__all__})
