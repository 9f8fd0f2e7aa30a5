"""The model that is trained, and the optimizers that move its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from leakaudit.capture.observing.optimizers import parameters_of
from leakaudit.errors import SnapshotError
from leakaudit.models.quantised_layers import QuantisedLayer
from leakaudit.models.tensors import persistent_buffers
from leakaudit.models.wrappers import plain_name


class LiveModel:
    """The audited model during training, with its base optimizers."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        quantised: Mapping[str, QuantisedLayer] | None = None,
        flat: Mapping[int, torch.Size] | None = None,
    ) -> None:
        """Hold references; nothing is copied.

        Args:
            module: the model itself, without wrappers.
            optimizers: those that move its weights.
            quantised: plain name -> layer that stores its matrix in few bits.
            flat: identity of a parameter that FSDP1 keeps in pieces -> its whole shape.
        """
        self._flat = flat or {}
        self.quantised = quantised or {}
        self._packed = {name for layer in self.quantised.values() for name in layer.packed}
        self.module = module
        self.optimizers = list(optimizers)
        self.persistent: frozenset[str] = frozenset()
        """Names of the buffers that are kept with the weights; empty until `note_persistent`."""
        self._at_the_beginning: dict[str, tuple[int, ...]] | None = None
        """Name -> shape of each parameter when `note_shapes` was called; None before."""

    def note_shapes(self) -> None:
        """Note which parameters the model has, for `check_shapes`."""
        self._at_the_beginning = _shapes(self.parameters())

    def check_shapes(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Refuse a step of a model whose parameters are not those of the beginning.

        The side process makes the model of the beginning, so it could not load the weights.

        Args:
            parameters: as `parameters` returns them now.

        Raises:
            SnapshotError: counts the parameters that came and went, and names the first.
        """
        was, now = self._at_the_beginning, _shapes(parameters)
        if was is None or was == now:
            return
        gone, new = was.items() - now.items(), now.items() - was.items()
        raise SnapshotError(
            f"the model has other parameters than at the beginning: {len(gone)} went and {len(new)} came (first "
            f"{min(gone | new)[0]!r}), as when a layer is deleted, added, tied, pruned or resized during training; the side process cannot make "
            "such a model. Begin a new audit after the change"
        )

    def note_persistent(self, more: frozenset[str]) -> None:
        """Note the buffers that the model stores, and some more, as persistent."""
        stored = {plain_name(name) for name in persistent_buffers(self.module)}
        self.persistent = frozenset((more | stored) - self._packed)

    def optimized(self) -> list[nn.Parameter]:
        """Return the parameters of all optimizers; groups may be added during training."""
        return [p for optimizer in self.optimizers for p in parameters_of(optimizer)]

    def moving(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizers move: those that require a gradient."""
        return [p for p in self.optimized() if p.requires_grad]

    def moving_ids(self) -> set[int]:
        """Return the identities of the parameters that the optimizers move.

        Under FSDP1 an optimizer may lack a parameter of which this process holds nothing; another process moves it.
        """
        elsewhere = (
            {id(p) for _, p in self.parameters() if id(p) in self._flat and p.requires_grad} if self._flat else set()
        )
        return {id(p) for p in self.moving()} | elsewhere

    def flat_shapes(self) -> dict[str, torch.Size]:
        """Return the whole shapes of the parameters that FSDP1 keeps in pieces, by name."""
        return {name: self._flat[id(p)] for name, p in self.parameters() if id(p) in self._flat} if self._flat else {}

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return every parameter of the model with its name, tied ones once."""
        return [(plain_name(name), p) for name, p in self.module.named_parameters()]

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of the model that the optimizers move, with their names."""
        moving = self.moving_ids()
        return [(plain_name(name), p) for name, p in self.module.named_parameters() if id(p) in moving]

    def names(self) -> dict[int, str]:
        """Return the names of these parameters by their identities."""
        return {id(parameter): name for name, parameter in self.trained()}

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers by name, tied ones once."""
        return {name: buffer for name, buffer in self._plain_buffers() if name in self.persistent}

    def buffers_of_a_pass(self) -> dict[str, Tensor]:
        """Return the buffers that do not hold packed numbers."""
        return {name: b for name, b in self._plain_buffers() if name not in self._packed}

    def packed_buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers that hold packed numbers of quantised layers."""
        return [(name, buffer) for name, buffer in self._plain_buffers() if name in self._packed]

    def is_packed(self, name: str) -> bool:
        """Return whether a tensor holds packed numbers of a quantised layer."""
        return name in self._packed

    def _plain_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((plain_name(name), buffer) for name, buffer in self.module.named_buffers())

    def state(self) -> dict[str, Tensor]:
        """Return every parameter and persistent buffer by name; references, not copies."""
        return {name: p.detach() for name, p in self.parameters()} | self.persistent_buffers()

    def on_gpu(self) -> bool:
        """Return whether the first parameter is on a GPU."""
        return next(self.module.parameters()).is_cuda


def _shapes(parameters: Sequence[tuple[str, nn.Parameter]]) -> dict[str, tuple[int, ...]]:
    return {name: () if is_lazy(p) else tuple(p.shape) for name, p in parameters}
