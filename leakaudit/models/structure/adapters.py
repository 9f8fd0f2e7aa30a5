"""Low-rank adapters (LoRA) beside the projections of a block, found by structure."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from leakaudit.models.structure.layers import Projection, projection_of
from leakaudit.models.structure.trace import Call, is_linear, same_tensor, trace_tokens


@dataclass(frozen=True)
class Adapter:
    """A low-rank map beside a projection (LoRA): the layer computes W x + s B A x."""

    down: Projection
    """A, which reads the attention input and returns R features."""
    up: Projection
    """B, which reads the R features and returns the adapter's output."""
    beside: int
    """Index of the projection W among the anatomy's projections."""

    @property
    def rank(self) -> int:
        """Number R of features between A and B."""
        return self.down.out_features


@dataclass(frozen=True)
class AdapterCalls:
    """Traced calls of one adapter."""

    wrapper: Call
    """The module that adds the adapter's output to the projection's."""
    base: Call
    down: Call
    up: Call

    def describe(self, model: nn.Module, readers: list[Call]) -> Adapter:
        """Return the adapter; its projection must be one of `readers`."""
        return Adapter(projection_of(model, self.down), projection_of(model, self.up), readers.index(self.base))


def split_adapters(readers: list[Call], calls: list[Call]) -> tuple[list[Call], list[AdapterCalls]]:
    """Separate the layers that read the attention input from the adapters beside them.

    An adapter is two linear layers in a row with fewer features between them than on either side, inside a module that
    reads the same input, returns as many features as the adapter, and contains another linear layer that also does both.

    Args:
        readers: calls that read the attention input, adapters and wrappers included.
        calls: all calls inside the block.
    """
    adapters = []
    for wrapper in readers:
        inside = [call for call in readers if call.name.startswith(f"{wrapper.name}.")]
        adapters += [
            AdapterCalls(wrapper, base, down, up)
            for down in inside
            for up in calls
            if is_linear(up) and same_tensor(up.given, down.made) and up.name.startswith(f"{wrapper.name}.")
            for base in inside
            if base is not down and base.made.shape == up.made.shape == wrapper.made.shape
            if down.made.shape[-1] < min(down.given.shape[-1], up.made.shape[-1])
        ]
    extra = {id(call) for adapter in adapters for call in (adapter.down, adapter.wrapper)}
    return [call for call in readers if id(call) not in extra], adapters


def adapter_groups(model: nn.Module) -> tuple[tuple[Adapter, ...], ...]:
    """Return all adapters of a text model, grouped by the tensor that they read.

    The groups stand in the order of the forward pass. The model stays unchanged.

    Raises:
        AnatomyError: the forward pass failed, or a weight is no parameter of the model.
    """
    calls = [call for call in trace_tokens(model) if call.given.dim() == 3]
    groups: list[list[Call]] = []
    for call in filter(is_linear, calls):
        known = next((group for group in groups if same_tensor(group[0].given, call.given)), None)
        if known is None:
            groups.append([call])
        else:
            known.append(call)
    found = (split_adapters(group, calls) for group in groups)
    return tuple(
        tuple(adapter.describe(model, readers) for adapter in adapters) for readers, adapters in found if adapters
    )
