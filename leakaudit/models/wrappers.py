"""Wrappers around a model: torch.compile, DDP, FSDP, Opacus, Fabric and peft."""

from __future__ import annotations

from torch import nn

WRAPPER_PARTS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_module.")
"""Parts that DDP, torch.compile, FSDP1, checkpoint wrappers and Opacus add to the names of parameters."""


WRAPPER_CLASSES = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "AbstractGradSampleModule": "_module",
    "GradSampleModule": "_module",
    "_FabricModule": "_original_module",
}
"""Name of a class -> its attribute with the wrapped model. Names are used because most of these libraries are not imported here."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside any nesting of wrappers.

    These are torch.compile, DDP, FSDP, Opacus, Fabric and peft.
    """
    while True:
        kinds = [kind.__name__ for kind in type(model).__mro__]
        attribute = next((WRAPPER_CLASSES[kind] for kind in kinds if kind in WRAPPER_CLASSES), None)
        if attribute is not None:
            model = getattr(model, attribute)
        elif "PeftModel" in kinds:
            model = model.get_base_model()  # type: ignore[operator]
        else:
            return model


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add.

    >>> plain_name("module.encoder._checkpoint_wrapped_module.0.weight")
    'encoder.0.weight'
    """
    found = f".{name}"
    for part in WRAPPER_PARTS[1:]:
        found = found.replace(f".{part}", ".")
    return found[1:].removeprefix(WRAPPER_PARTS[0])
