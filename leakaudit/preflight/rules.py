"""What capture does with a configuration; each rule is a property of it.

The rules repeat docs/capture.md, and tests train small models to see that capture agrees.
"""

from __future__ import annotations

from collections.abc import Iterator

from leakaudit.preflight.recipe import Finding, Recipe
from leakaudit.preflight.strategies import strategy_refusal

KNOWN_RULES = {
    "adadelta": "Adadelta",
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamax": "Adamax",
    "adamw": "AdamW",
    "adamw_hf": "AdamW",
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "AdamW",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "sgd": "SGD",
}
"""Name of an optimizer in a configuration -> its rule, for those whose local steps are computed again."""

STEPS_IN_BACKWARD = ("lomo", "layerwise")
"""Parts of the names of optimizers that move each weight during the backward pass."""

ADAPTERS = ("lora", "qlora", "ia3")
"""Adapters that the side process makes again."""


def findings(recipe: Recipe) -> list[Finding]:
    """Return what the parts of a configuration mean, refusals first."""
    order = ("refused", "untested", "weaker", "note")
    found = [one for rule in RULES for one in rule(recipe)]
    return sorted(found, key=lambda one: order.index(one.kind))


def optimizer_rule(name: str) -> str:
    """Return the rule of an optimizer whose local steps are computed again.

    Empty if there is none.
    """
    return KNOWN_RULES.get(name.lower(), "")


# ---------------------------------------------------------------------- what is refused


def _strategy(recipe: Recipe) -> Iterator[Finding]:
    if why := strategy_refusal(recipe.strategy, fsdp2=recipe.fsdp2):
        cause, _, change = why.partition("; ")
        yield Finding("refused", recipe.strategy, cause, change)
    elif recipe.fsdp2 and recipe.packed is not None:
        yield Finding(
            "untested",
            recipe.strategy,
            "a packed base under FSDP2 was not tried",
            "train with DDP, or adapters on the model in bfloat16",
        )
    elif recipe.fsdp2 and recipe.half:
        yield Finding(
            "weaker",
            recipe.strategy,
            "FSDP2 rounds weights and sums gradients in bfloat16 in a way that is not computed again: steps are `unverifiable` at best",
            "train with DDP under bf16, or with FSDP2 in float32",
        )


def _mesh(recipe: Recipe) -> Iterator[Finding]:
    if recipe.mesh:
        yield Finding(
            "refused",
            ", ".join(recipe.mesh),
            "a device mesh with several dimensions, or one model over several processes, leaves no process with a whole update",
            "train with DDP, or FSDP2 on one dimension over all processes",
        )


def _packed_tensors(recipe: Recipe) -> Iterator[Finding]:
    if recipe.packed is None:
        return
    if recipe.packed.in_layers is None:
        yield Finding(
            "untested",
            recipe.packed.said,
            "a base that is packed, or made coarse in training, in this way was not tried",
            "a base of bitsandbytes, GPTQ or AWQ, or one in bfloat16",
        )
    elif not recipe.packed.in_layers:
        yield Finding(
            "refused",
            recipe.packed.said,
            "the tensors themselves pack numbers, and their matrices cannot be read from the layers",
            "quantise linear layers (bitsandbytes, GPTQ, AWQ), or train adapters on the model in bfloat16",
        )
    elif recipe.adapter is None:
        yield Finding(
            "untested",
            recipe.packed.said,
            "a packed base is frozen, and the configuration trains no adapter beside it",
            "train LoRA adapters",
        )
    else:
        yield Finding(
            "note",
            recipe.packed.said,
            "the matrices of the packed layers are written once a run, two bytes a parameter",
        )


def _adapter(recipe: Recipe) -> Iterator[Finding]:
    if recipe.adapter is None:
        return
    if recipe.adapter.kind not in ADAPTERS:
        yield Finding(
            "refused",
            f"adapter {recipe.adapter.kind}",
            "the side process makes LoRA (with rsLoRA, DoRA, patterns, saved modules) and IA3 again, and no other adapter",
            "train LoRA adapters",
        )
    if recipe.adapter.on_tensors:
        yield Finding(
            "untested",
            f"lora_target_parameters: {', '.join(recipe.adapter.on_tensors)}",
            "adapters of parameters without a layer of their own, as of experts, were not tried",
            "adapt linear layers",
        )


def _steps_in_backward(recipe: Recipe) -> Iterator[Finding]:
    if any(part in recipe.optimizer.lower() for part in STEPS_IN_BACKWARD):
        yield Finding(
            "refused",
            f"optimizer {recipe.optimizer}",
            "it moves the weights during the backward pass, so no step has a whole update",
            "an optimizer that steps after the backward pass",
        )


# ---------------------------------------------------------------------- what nobody tried


def _pictures(recipe: Recipe) -> Iterator[Finding]:
    if recipe.pictures:
        yield Finding(
            "note",
            recipe.pictures,
            "of a language model with pictures the text is attacked, not the pictures; sound was not tried",
        )


def _objective(recipe: Recipe) -> Iterator[Finding]:
    if recipe.objective:
        yield Finding("untested", recipe.objective, "no test of capture trains like this")


def _scaler(recipe: Recipe) -> Iterator[Finding]:
    if recipe.scaled:
        yield Finding(
            "untested",
            "float16",
            "a GradScaler under a Trainer needs a GPU, where this was not tried",
            "train in bfloat16",
        )


# ---------------------------------------------------------------------- what is captured, with less evidence


def _unknown_moments(recipe: Recipe) -> Iterator[Finding]:
    if recipe.rounds is not None and recipe.optimizer and not optimizer_rule(recipe.optimizer):
        yield Finding(
            "weaker",
            f"optimizer {recipe.optimizer}",
            "a difference of weights is kept without the state of this optimizer and is `unverifiable` (unknown moments)",
            "adamw_torch, or keep gradients (`unit: step`)",
        )


def _own_code(recipe: Recipe) -> Iterator[Finding]:
    if recipe.own_code:
        yield Finding(
            "weaker",
            ", ".join(recipe.own_code),
            "the client runs other code than the model's class; a step is verified if both agree up to rounding, and `unverifiable` otherwise",
            "leave these kernels out for the audited run",
        )


def _foreign(recipe: Recipe) -> Iterator[Finding]:
    if recipe.foreign:
        yield Finding(
            "weaker",
            "trust_remote_code",
            "a class of model that transformers does not export has to be named before the side process makes it again",
            "`rebuilt_by(model, 'package.module:name')`, or a class of transformers",
        )


def _compiled(recipe: Recipe) -> Iterator[Finding]:
    if recipe.compiled:
        yield Finding(
            "note", "torch_compile", "a compiled model with dropout may be `unverifiable`: its masks are not kept"
        )


RULES = (
    _strategy,
    _mesh,
    _packed_tensors,
    _adapter,
    _steps_in_backward,
    _pictures,
    _objective,
    _scaler,
    _unknown_moments,
    _own_code,
    _foreign,
    _compiled,
)
"""Every rule."""
