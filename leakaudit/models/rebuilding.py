"""Models rebuilt from a recipe and stored weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.errors import ModelError
from leakaudit.models.attention import set_attention
from leakaudit.models.config_numbers import check_numbers
from leakaudit.models.factories import factory_named
from leakaudit.models.loading import quiet_transformers
from leakaudit.models.lora import rebuild_lora
from leakaudit.models.quantised_layers import stand_in
from leakaudit.models.recipe import ModelRecipe, only_declared, untagged
from leakaudit.models.replaced_modules import put_modules
from leakaudit.models.tensors import tied_names
from leakaudit.models.unstored_state import (
    apply_settings,
    match_dtypes,
    set_buffers,
    unstored_buffers,
    with_dense_gradients,
)
from leakaudit.models.versions import no_init_weights

SPARE_PARAMETERS = 1_000
"""Number of parameters that a model may register beyond four times those in the snapshot, because some are replaced."""


SPARE_NUMBERS = 2**28
"""Number of entries that a model may register beyond four times those in the snapshot. Our choice: 1 GiB in float32, for masks and tables
that are not stored."""


def build_model(
    recipe: ModelRecipe,
    weights: Mapping[str, Tensor],
    fill: Callable[[nn.Module, list[str]], None] | None = None,
) -> nn.Module:
    """Rebuild a model with eager attention, in eval mode, on the CPU.

    Attention is eager because gradient matching needs a second derivative, which scaled-dot-product attention does not have on a CPU. A
    model whose class cannot change its attention has the client's, without which it may compute something else.

    Args:
        recipe: class and configuration.
        weights: every parameter and persistent buffer, tied ones once, and unstored buffers whose values differ from those of the class.
        fill: function that gives values to missing weights; None if no weight may be missing.

    Raises:
        ModelError: the recipe cannot be followed, or the weights do not fit the model.
    """
    try:
        with _no_larger_than(weights):
            model = blank_model(recipe)
        if recipe.lora is not None:
            rebuild_lora(model, recipe.lora)
        put_modules(model, recipe.parts)
        stand_in(model, recipe.computed_in)
        match_dtypes(model, weights)
        beside = {name: weights[name] for name in unstored_buffers(model) if name in weights}
        outcome = model.load_state_dict({k: v for k, v in weights.items() if k not in beside}, strict=False)
        set_buffers(model, beside)
        check_numbers(recipe.settings)
        apply_settings(model, recipe.settings)
        with_dense_gradients(model)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, MemoryError) as error:
        raise ModelError(f"cannot rebuild {recipe.class_name} from its recipe: {type(error).__name__}") from None
    aliases = {second for _, second in tied_names(model)} | {first for first, _ in tied_names(model)}
    missing = [name for name in outcome.missing_keys if name not in aliases]
    if missing and fill is not None:
        fill(model, missing)
        missing = []
    if missing or outcome.unexpected_keys:
        first = (missing or outcome.unexpected_keys)[0]
        raise ModelError(
            f"{recipe.class_name}: {len(missing)} weights are missing and {len(outcome.unexpected_keys)} are not its own, "
            f"first {first!r}"
        )
    return model.eval()


@contextmanager
def _no_larger_than(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse a model that is much larger than its stored weights during the block.

    The model is refused before it fills the memory.

    Raises:
        ModelError: there are more than four times as many parameters or entries, plus `SPARE_PARAMETERS` or `SPARE_NUMBERS`.
    """
    most = (
        4 * len(weights) + SPARE_PARAMETERS
    )  # tied weights register twice, and so do models that are first made on the meta device
    room = 4 * sum(weight.numel() for weight in weights.values()) + SPARE_NUMBERS
    count = 0

    def watch(_module: nn.Module, _name: str, tensor: Tensor | None) -> None:
        nonlocal count, room
        if tensor is None:
            return
        count, room = count + 1, room - tensor.numel()
        if count > most or room < 0:
            raise ModelError(
                f"the recipe makes a model that is larger than its {len(weights)} stored weights, so they do not belong together; "
                "remove the snapshot and keep a new step"
            )

    with (
        nn.modules.module.register_module_parameter_registration_hook(watch),
        nn.modules.module.register_module_buffer_registration_hook(watch),
    ):
        yield


def blank_model(recipe: ModelRecipe) -> nn.Module:
    """Return the model of a recipe, without adapters and without its weights.

    Raises:
        ModelError: the class or function of the recipe cannot be found, or makes no model.
    """
    return _made(recipe) if recipe.made_by else _instantiated(recipe)


def _instantiated(recipe: ModelRecipe) -> nn.Module:
    """Return an instance of a class of transformers, without its weights."""
    import transformers

    kind: Any = getattr(transformers, recipe.class_name, None)
    if not hasattr(kind, "_from_config"):
        raise ModelError(f"transformers {transformers.__version__} has no class {recipe.class_name!r}")
    check_numbers(recipe.config)
    # Every weight is loaded afterwards, and initialising them would take longer than all other work.
    with quiet_transformers(), torch.random.fork_rng(devices=[]), no_init_weights():
        config = kind.config_class.from_dict(only_declared(kind.config_class, untagged(recipe.config)))
        attention = recipe.attention or "eager"
        with torch.device("meta"):  # takes no memory, even if the configuration is huge
            kind._from_config(config, attn_implementation=attention)
        model: nn.Module = kind._from_config(config, attn_implementation=attention)
    model.tie_weights()  # type: ignore[operator]
    return model


def _made(recipe: ModelRecipe) -> nn.Module:
    """Return the model that the recipe's call makes."""
    make = factory_named(recipe.made_by)
    with torch.random.fork_rng(devices=[]):
        model = make(**recipe.arguments)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{recipe.made_by!r} made a {type(model).__name__}, not a model")
    if hasattr(model, "set_attn_implementation"):
        set_attention(model, "eager")
    return model
