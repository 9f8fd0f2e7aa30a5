"""The checks, before the first step, of whether a model can be audited.

A snapshot must be able to hold the model's tensors, and another process must be able to make the same model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from leakaudit.capture.boundary import from_signal_handler
from leakaudit.capture.recording.kept_step import KeptStep
from leakaudit.errors import ModelError, SnapshotError
from leakaudit.models.lora import rebuild_lora
from leakaudit.models.quantised_layers import QuantisedLayer, quantised_layers
from leakaudit.models.rebuilding import blank_model
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.replaced_modules import put_modules, replaced_modules
from leakaudit.models.tensors import entries_of, state_of, tied_names
from leakaudit.models.unstored_state import Settings, changed_buffers, changed_settings, settings_of, unstored_buffers
from leakaudit.models.wrappers import plain_name
from leakaudit.storage.safetensors_stream import DTYPES


def check_tensors(model: nn.Module) -> None:
    """Refuse a model whose steps cannot be kept.

    Raises:
        SnapshotError: names a parameter or buffer without values (on `meta`), or of a type that a snapshot cannot hold.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise SnapshotError(
                f"{plain_name(name)!r} is on the device `meta`, so it has no values; load or initialise it before training "
                "(`to_empty`, `load_state_dict(..., assign=True)`)"
            )
        if tensor.dtype not in DTYPES:
            raise SnapshotError(
                f"{plain_name(name)!r} is of type {tensor.dtype}, which a snapshot cannot hold; keep it outside the model, or store "
                "it as real numbers"
            )


@dataclass(frozen=True)
class Fit:
    """The differences between the live model and the one that its recipe makes."""

    foreign: frozenset[str] = frozenset()
    """Names of parameters and stored buffers that the made model does not have."""
    unlike: frozenset[str] = frozenset()
    """Unstored buffers whose values differ; they are kept with each step."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Name of a small module that a user put in the place of another one -> how it is made again."""
    quantised: Mapping[str, QuantisedLayer] = field(default_factory=dict)
    """Plain name -> layer of the live model that stores its matrix in few bits."""
    made: Settings | None = None
    """Plain numbers on the made model's modules; None where the model could not be made here."""

    @classmethod
    def of(cls, model: nn.Module, recipe: ModelRecipe, flat: Mapping[int, torch.Size] | None = None) -> Fit:
        """Make the model once without its weights and compare.

        Args:
            model: the live one.
            recipe: how the side process makes it. A recipe that calls user code is not tried here, because that code may have effects.
            flat: identity of a parameter that FSDP1 keeps in pieces -> its whole shape.

        Raises:
            ModelError: the class makes tensors that the live model lacks or has in other shapes, so that its weights could not be
                loaded; or the live model has a part that cannot be made again.
        """
        refuse_special_tensors(model)
        live = {plain_name(name): buffer for name, buffer in unstored_buffers(model).items()}
        blank = _blank(recipe)
        if blank is None:
            return cls(unlike=frozenset(live) if recipe.made_by else frozenset())
        here = {plain_name(f"{name}.")[:-1]: module for name, module in model.named_modules()}
        quantised = quantised_layers(model, blank)
        others = {name: module for name, module in blank.named_modules() if name not in quantised}
        parts = replaced_modules(here, others)
        with torch.device("meta"):
            put_modules(blank, parts)
        unlike = changed_buffers(live, unstored_buffers(blank))
        return cls(_foreign(model, recipe, blank, quantised, flat or {}), unlike, parts, quantised, settings_of(blank))

    @property
    def computed_in(self) -> dict[str, str]:
        """Name of each quantised layer -> name of the type in which it multiplies."""
        return {name: str(layer.dtype).removeprefix("torch.") for name, layer in self.quantised.items()}

    def settings(self, model: nn.Module) -> Settings:
        """Return the live model's numbers that differ from the made one's.

        They are plain numbers on its modules, as they are at this moment.
        """
        if self.made is None:
            return {}
        live = {plain_name(f"{name}.")[:-1]: numbers for name, numbers in settings_of(model).items()}
        return changed_settings(live, self.made)


def refuse_special_tensors(model: nn.Module) -> None:
    """Refuse a model whose tensors pack quantised numbers inside them.

    torchao and optimum-quanto have such tensors: they look like floating-point numbers, and no layer says what they are. Sharded tensors
    are another kind (`full_tensor`).

    Raises:
        ModelError: says what to do.
    """
    for name, parameter in model.named_parameters():
        kind = type(parameter.data)
        if kind is not torch.Tensor and not hasattr(parameter, "full_tensor") and hasattr(kind, "__torch_dispatch__"):
            if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
                continue
            raise ModelError(
                f"{plain_name(name)!r} is quantised inside a tensor of the kind {kind.__name__} ({kind.__module__}), which no snapshot holds; "
                "quantise the model's layers instead (bitsandbytes, GPTQ, AWQ, HQQ), or train the adapters on the model in bfloat16"
            )


def _blank(recipe: ModelRecipe) -> nn.Module | None:
    """Return the model of a recipe, its parameters without values.

    Its buffers have values. None means that this cannot be tried.

    Raises:
        ModelError: the recipe makes no model, or its adapters do not fit.
    """
    if recipe.made_by or not recipe.config:
        return None
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), parameters_without_values():
            blank = blank_model(recipe)
        if recipe.lora is not None:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                rebuild_lora(blank, recipe.lora)
        return blank
    except ModelError:
        raise
    except Exception as error:  # it cannot be made without values; if anything is wrong, the side process reports it
        if from_signal_handler(error):
            raise
        return None


@contextmanager
def parameters_without_values() -> Iterator[None]:
    """Put each parameter on the device `meta` when it is registered.

    So a large model takes no memory. The hook is called for modules of all threads, and acts in this one only.
    """
    here = threading.get_ident()

    def emptied(_module: nn.Module, _name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != here:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = nn.modules.module.register_module_parameter_registration_hook(emptied)
    try:
        yield
    finally:
        hook.remove()


def _foreign(
    model: nn.Module,
    recipe: ModelRecipe,
    blank: nn.Module,
    quantised: Mapping[str, QuantisedLayer],
    flat: Mapping[int, torch.Size],
) -> frozenset[str]:
    made = {name: tuple(tensor.shape) for name, tensor in state_of(blank).items()}
    here = {plain_name(name): tuple(tensor.shape) for name, tensor in state_of(model).items()}
    here |= {plain_name(name): tuple(flat[id(p)]) for name, p in model.named_parameters() if id(p) in flat}
    packed = {name for layer in quantised.values() for name in layer.packed}
    here = {name: shape for name, shape in here.items() if name not in packed}
    here |= {f"{name}.weight": layer.shape for name, layer in quantised.items()}
    aliases = {name for pair in tied_names(blank) for name in pair}
    for name, shape in made.items():
        if name not in aliases and here.get(name) != shape:
            found = "does not have it" if name not in here else f"has it of shape {here[name]}"
            raise ModelError(
                f"{recipe.class_name}, made from its configuration, has the parameter {name!r} of shape {shape}; this model {found}, so the "
                "side process cannot load its weights. Say how the model is made with `rebuilt_by`, or set `schedule: inline`"
            )
    return frozenset(here) - frozenset(made) - aliases


def without_foreign(kept: KeptStep, foreign: frozenset[str]) -> KeptStep:
    """Return a step without the tensors that the made model lacks.

    Their update is zero, so they transmit nothing.

    Args:
        kept: the step.
        foreign: names of parameters and buffers that the model, made again, will not have.

    Raises:
        SnapshotError: one of them has a part in the update.
    """
    parts = [name for name in kept.update if name in foreign and bool(entries_of(kept.update[name]).any())]
    if parts:
        raise SnapshotError(
            f"the update of {parts[0]!r} is not zero, but {kept.manifest.model.class_name} of transformers has no such "
            "parameter; say how the model is made with `rebuilt_by`, or set `schedule: inline`"
        )
    update = {name: g for name, g in kept.update.items() if name not in foreign and g.numel()}
    weights = {name: w for name, w in kept.weights.items() if name not in foreign}
    frozen = None if kept.frozen is None else kept.frozen.without(foreign)
    part = None if kept.part is None else kept.part.without(foreign)
    state = {path: value for path, value in kept.truth.optimizer_state.items() if path.rpartition("/")[0] in update}
    trace = {key: value for key, value in kept.truth.trace.items() if key.partition("/")[2] not in foreign}
    truth = replace(kept.truth, optimizer_state=state, trace=trace)
    return replace(kept, update=update, weights=weights, frozen=frozen, part=part, truth=truth)


def left_out_in_words(foreign: frozenset[str], class_name: str) -> str:
    """Return a sentence on what is left out of the audit; empty if nothing is."""
    if not foreign:
        return ""
    count = "1 tensor" if len(foreign) == 1 else f"{len(foreign)} tensors"
    return (
        f"this model has {count} that {class_name} of transformers does not have (first {min(foreign)!r}): left out of the audit, and a "
        "step whose update contains them is not kept; with `rebuilt_by` or `schedule: inline` they are audited as well"
    )
