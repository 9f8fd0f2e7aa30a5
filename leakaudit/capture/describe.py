"""The description of a training run and its steps, as snapshots keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from leakaudit.capture.array_batches import labels_only
from leakaudit.capture.boundary import Hook
from leakaudit.capture.context import StepContext, TrainerContext
from leakaudit.capture.fitness import Fit
from leakaudit.capture.observing.accountant import RunAccount
from leakaudit.capture.observing.entry_sample import own_part
from leakaudit.capture.observing.optimizers import base_optimizers, parameters_of
from leakaudit.capture.observing.private_sgd import PrivateSgd, private_sgd
from leakaudit.capture.processes.flat_shards import flat_shapes
from leakaudit.client.array_batches import array_facts
from leakaudit.client.batches import public_facts
from leakaudit.client.facts import DeclaredDefense, PublicFacts
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.snapshot import Manifest, Provenance
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.config.privacy import PrivacyConfig
from leakaudit.errors import ConfigError, ModelError, SnapshotError
from leakaudit.models.array_classifier import ArrayClassifier, NoText, array_recipe
from leakaudit.models.code_marks import CodeMarks, code_marks, with_layers_of
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.structure import dropout_rates
from leakaudit.models.tensors import coarsest_dtype, dtype_of
from leakaudit.models.wrappers import plain_name, unwrapped
from leakaudit.registry import defenses
from leakaudit.results.schema import Privacy

AUTOCAST_DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16"}
"""Autocast, as the recipe of a step names it -> type in which the update is computed."""


@dataclass(frozen=True)
class RunDescription:
    """The facts about model and trainer that are the same for all steps of a run."""

    trainer: TrainerContext
    model: nn.Module
    """The model itself, without wrappers."""
    recipe: ModelRecipe
    """How the side process makes the model."""
    fit: Fit
    """How the live model differs from the one that its recipe makes."""
    facts: PublicFacts
    """The facts that are public during the whole run; `manifest` adds the facts that change from step to step."""
    shipped_defense: PluginSpec
    """The defence that the protocol applies to the update, by the configuration."""
    private: PrivateSgd | None
    """Differentially private training by the optimizer; None where the optimizer adds no noise."""
    account: RunAccount | None
    """The accountant of that training."""
    unaudited_parameters: int
    """Parameters that are trained but stand outside the model."""

    @classmethod
    def of(
        cls,
        config: AuditConfig,
        trainer: TrainerContext,
        model: nn.Module,
        recipe: ModelRecipe,
        fit: Fit | None = None,
    ) -> RunDescription:
        """Describe a run that begins.

        Args:
            config: the audit's configuration.
            trainer: what the adapter knows.
            model: the model itself, without wrappers.
            recipe: how the side process makes it.
            fit: how an earlier model of the same architecture differed from the one that the recipe makes; None compares them.

        Raises:
            ModelError: the recipe makes another model than the live one.
        """
        if fit is None:
            fit = Fit() if config.schedule == "inline" else Fit.of(model, recipe, flat_shapes(trainer.loop_calls))
        private = private_sgd(trainer.optimizer)
        declared = declared_defenses(config.shipped_defense, private)
        moved = {id(p) for mover in base_optimizers(trainer.optimizer) for p in parameters_of(mover) if p.requires_grad}
        return cls(
            trainer=trainer,
            model=model,
            recipe=recipe,
            fit=fit,
            facts=run_facts(trainer, model, declared),
            shipped_defense=config.shipped_defense,
            private=private,
            account=RunAccount.of(private),
            unaudited_parameters=len(moved - {id(p) for p in model.parameters()}),
        )

    def manifest(self, now: StepContext, skipped_before: int) -> Manifest:
        """Describe a step that begins.

        The manifest says what is public about the step, and how its update is computed.

        Args:
            now: what the framework knows of it.
            skipped_before: due steps since the last kept one that were not recorded.
        """
        recipe = self._step_recipe(now)
        return Manifest(
            model=self.recipe.model_copy(
                update={
                    "parts": dict(self.fit.parts),
                    "settings": self.fit.settings(self.model),
                    "computed_in": self.fit.computed_in,
                }
            ),
            facts=self._step_facts(recipe),
            recipe=recipe,
            provenance=Provenance(
                framework=self.trainer.framework,
                versions=dict(self.trainer.versions),
                step=now.step,
                epoch=now.epoch,
                total_steps=now.total_steps,
                loss=now.loss,
                learning_rate=now.learning_rate,
                skipped_before=skipped_before,
            ),
        )

    def with_current_defenses(self, manifest: Manifest) -> Manifest:
        """Return a manifest with the current numbers of the private optimizer.

        Schedulers change them after each step.
        """
        if self.private is None:
            return manifest
        facts = manifest.facts.model_copy(update={"defenses": self._declared()})
        return manifest.model_copy(update={"facts": facts})

    def privacy(self, asked: PrivacyConfig, trained: int) -> tuple[Privacy, ...]:
        """Return what the accountant of the run says; empty for a run that is not private.

        Args:
            asked: what the configuration says.
            trained: optimizer steps of this run so far.
        """
        return () if self.account is None else (self.account.stated(asked, trained, self.trainer.loop_calls),)

    @cached_property
    def _code(self) -> CodeMarks:
        """Digests of the code of the model at the first kept step."""
        return code_marks(self.model, _is_ours)

    def _step_recipe(self, now: StepContext) -> StepRecipe:
        observe, peers = self.trainer.observe, self.trainer.peers
        clipped = observe != "local" and bool(now.max_grad_norm or now.max_grad_value)
        return StepRecipe(
            max_grad_norm=now.max_grad_norm if clipped else None,
            max_grad_value=now.max_grad_value if clipped else None,
            autocast=now.autocast if now.autocast in AUTOCAST_DTYPES else None,  # type: ignore[arg-type]
            kept_rng=now.kept_rng,
            neftune_alpha=_neftune_alpha(self.model),
            attention=str(getattr(getattr(self.model, "config", None), "_attn_implementation", None) or ""),
            processes=1 if peers is None or observe == "local" else peers.mean_over,
            unaudited_parameters=self.unaudited_parameters,
            code=with_layers_of(self._code, self.model, _is_ours),
            rounding_layers=tuple(name for name, layer in self.fit.quantised.items() if not layer.is_linear),
            note=now.note,
        )

    def _step_facts(self, recipe: StepRecipe) -> PublicFacts:
        return self.facts.model_copy(
            update={
                "dropout": dropout_rates(self.model.named_modules()),
                "max_grad_norm": recipe.max_grad_norm,
                "dtype": AUTOCAST_DTYPES.get(str(recipe.autocast), self.facts.dtype),
                "defenses": self._declared(),
            }
        )

    def _declared(self) -> tuple[DeclaredDefense, ...]:
        return declared_defenses(self.shipped_defense, self.private)


# ---------------------------------------------------------------------- the model


def audited_model(trainer: TrainerContext) -> tuple[TrainerContext, nn.Module]:
    """Return the run with a model that computes its loss, and that model.

    The model has no wrappers. A model of text already computes its loss. For a classifier of arrays the loop computes the loss, so the
    audited model adds the loss to the classifier, and the loop continues to call the classifier alone.

    Raises:
        SnapshotError: the run has neither a tokenizer nor `num_labels`.
    """
    if trainer.num_labels is not None:
        trainer = replace(
            trainer,
            model=labels_only(trainer.model, trainer.num_labels, trainer.criterion),
            called=trainer.loop_calls,
            tokenizer=NoText(),
        )
    if trainer.tokenizer is None:
        raise SnapshotError(
            "there is no tokenizer, and attacks need one: give it (`processing_class`, `tokenizer`), or `num_labels` where "
            "the model classifies pictures or tables"
        )
    return trainer, unwrapped(trainer.model)


def recipe_of(model: nn.Module, config: AuditConfig) -> tuple[ModelRecipe, AuditConfig]:
    """Return how to rebuild a model, and when it is attacked.

    If attacks run in this process (`schedule: inline`), the name of the model's class is enough. Attacks on labels take milliseconds, so
    a classifier of arrays that the side process cannot make is attacked in this process unless the configuration sets `schedule`.

    Raises:
        ModelError: nothing says how to make the model, and another process would have to.
    """
    inline = config.schedule == "inline"
    if isinstance(model, ArrayClassifier):
        recipe = array_recipe(model)
        if recipe.made_by or inline:
            return recipe, config
        if "schedule" not in config.model_fields_set:
            return recipe, config.model_copy(update={"schedule": "inline"})
        ModelRecipe.of(model.net)  # its error says what to do
    try:
        return ModelRecipe.of(model), config
    except ModelError:
        if not inline:
            raise
        return ModelRecipe(class_name=type(model).__name__), config


def has_fresh_adapters(model: nn.Module) -> bool:
    """Return whether LoRA's B matrices are all zero, as they are made.

    Then the update of every A is zero, and an attack learns nothing from it.
    """
    last = [p for name, p in model.named_parameters() if ".lora_B." in name and p.requires_grad]
    return bool(last) and not any(bool(own_part(p.detach()).any()) for p in last)


def _is_ours(hook: object) -> bool:
    return isinstance(hook, Hook)


def _neftune_alpha(model: nn.Module) -> float | None:
    """Return the strength of NEFTune's noise; None without NEFTune.

    transformers and trl keep it as an attribute of the word embeddings.
    """
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    alpha = getattr(table, "neftune_noise_alpha", None)
    return None if alpha is None else float(alpha)


# ---------------------------------------------------------------------- the facts of a run


def run_facts(trainer: TrainerContext, model: nn.Module, declared: tuple[DeclaredDefense, ...]) -> PublicFacts:
    """Return what is public about every step of a run.

    Args:
        trainer: what the adapter knows.
        model: the model itself, without wrappers.
        declared: defences that the protocol declares.
    """
    known: dict[str, Any] = {
        "training": True,
        "batch_size_bound": trainer.batch_size_bound,
        "dtype": precision_of(_update_dtype(trainer.optimizer, model), next(model.parameters()).device),
        "defenses": declared,
    }
    if isinstance(model, ArrayClassifier):
        facts = array_facts(model, (), **known)  # the shape is known from the first batch on
    else:
        facts = public_facts(model, trainer.tokenizer, task=_task(model), **known)
    update: dict[str, Any] = {
        "shared": tuple(plain_name(name) for name in facts.shared),
        "tied": tuple((plain_name(a), plain_name(b)) for a, b in facts.tied),
        "view": "delta" if trainer.observe == "delta" else "local",
    }
    if trainer.observe == "update" and trainer.peers is not None:
        update["view"] = "reduced"
    return facts.model_copy(update=update)


def declared_defenses(shipped: PluginSpec, private: PrivateSgd | None) -> tuple[DeclaredDefense, ...]:
    """Return the defences that the protocol of a run declares.

    The defences of the optimizer are first, then the shipped defence. If both are the same defence, the optimizer's numbers count.

    Raises:
        ConfigError: the shipped defence is a recipe of the step, which the recorder sees by itself.
    """
    optimizer = private.declared() if private else ()
    defense: Any = defenses.create(shipped.name, shipped.options)
    if defense.of_step:
        raise ConfigError(
            f"shipped_defense: {shipped.name} says how the client trains, and the recorder sees that by itself; leave it out, or list it "
            "under `defenses` to try it on the recorded steps"
        )
    if defense.is_identity() or any(declared.name == defense.name for declared in optimizer):
        return optimizer
    return (*optimizer, defense.declared())


def precision_of(dtype: torch.dtype, device: torch.device) -> str:
    """Return the precision of an update: its type, or `tf32`.

    On a GPU products of float32 matrices may be rounded to TF32, if the training allows it.
    """
    rounded = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if rounded and dtype == torch.float32 else str(dtype).removeprefix("torch.")


def _update_dtype(optimizer: Any, model: nn.Module) -> torch.dtype:
    """Return the type in which the update is computed.

    It is the coarsest type of the parameters that are trained.
    """
    moved = {id(p) for mover in base_optimizers(optimizer) for p in parameters_of(mover)}
    trained = (p for p in model.parameters() if id(p) in moved)
    return coarsest_dtype(trained) or dtype_of(model)


def _task(model: nn.Module) -> Any:
    """Return the task that the model is made for.

    It follows from the names of the model's class and of that class's base classes.
    """
    names = [kind.__name__ for kind in type(model).__mro__]
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "classification"
    config = getattr(model, "config", None)
    words = hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None  # type: ignore[operator]
    if words and getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder"
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return "causal-lm"
    return "masked-lm" if words and any(name.endswith(("ForMaskedLM", "ForPreTraining")) for name in names) else "other"
