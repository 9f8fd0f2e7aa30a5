"""Linear layers and blocks of a model, found by a traced forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.models.structure.trace import Call, is_linear, same_tensor


@dataclass(frozen=True)
class Projection:
    """A linear layer, usually one that reads a block's attention input."""

    module: str
    """Module name."""
    weight: str
    """Parameter name."""
    input_first: bool
    """Whether the weight is stored (in, out), as in GPT-2's Conv1D, not (out, in)."""
    out_features: int

    def by_output(self, weight: Tensor) -> Tensor:
        """Return a weight or its update as (out, in)."""
        return weight.T if self.input_first else weight


def projection_of(model: nn.Module, call: Call) -> Projection:
    """Describe the linear layer of a traced call.

    Raises:
        AnatomyError: the layer's weight is not a parameter of the model.
    """
    weight: Tensor = call.module.weight  # type: ignore[assignment]
    bias = getattr(call.module, "bias", None)
    plain = call.made - bias if isinstance(bias, Tensor) else call.made
    errors = {
        first: float((call.given @ (weight if first else weight.T) - plain).detach().abs().max())
        for first in (False, True)
        if weight.shape[0 if first else 1] == call.given.shape[-1]
    }
    input_first = min(errors, key=lambda first: errors[first])
    name = next((name for name, parameter in model.named_parameters() if parameter is weight), "")
    if not name:
        raise AnatomyError(f"{call.name}: its weight is no parameter of the model (quantised or computed on the fly)")
    return Projection(call.name, name, input_first, int(call.made.shape[-1]))


def heaviest_block_list(model: nn.Module, accepts: Callable[[nn.ModuleList], bool]) -> tuple[str, nn.ModuleList] | None:
    """Return the accepted `nn.ModuleList` with the most parameters, and its name."""
    lists = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and accepts(module)
    ]
    if not lists:
        return None
    _, name, module = max(lists, key=lambda entry: entry[0])
    return name, module


def first_block(model: nn.Module, calls: list[Call]) -> tuple[str, list[Call]]:
    """Return the name of the first block and the calls inside it.

    The first block is the first child of the heaviest list of modules that the forward pass ran.

    Raises:
        AnatomyError: there is no such list, or its first child has no inner modules.
    """
    called = {id(call.module) for call in calls}
    blocks = heaviest_block_list(model, lambda found: len(found) > 0 and id(found[0]) in called)
    if blocks is None:
        kinds = sorted({type(module).__name__ for _, module in model.named_children()})
        raise AnatomyError(
            f"{type(model).__name__}: looked for a list of blocks (nn.ModuleList run in the forward pass), "
            f"found only {', '.join(kinds)}"
        )
    name, _ = blocks
    prefix = f"{name}.0."
    inside = [call for call in calls if call.name.startswith(prefix)]
    if not inside:
        raise AnatomyError(f"{type(model).__name__}: the first block {name}.0 has no inner modules")
    return f"{name}.0", inside


def attention_readers(block: str, calls: list[Call]) -> list[Call]:
    """Return the linear layers of a block that read its attention input.

    These are the layers that read the same tensor as the block's first linear layer.

    Raises:
        AnatomyError: the block has no linear layer.
    """
    linear = [call for call in calls if is_linear(call)]
    if not linear:
        kinds = sorted({type(call.module).__name__ for call in calls})
        raise AnatomyError(f"{block}: looked for linear layers (a 2-d `weight`), found only {', '.join(kinds)}")
    first = linear[0].given
    group, seen = [], set()
    for call in linear:
        if same_tensor(call.given, first) and call.module not in seen:
            group.append(call)
            seen.add(call.module)
    return group
