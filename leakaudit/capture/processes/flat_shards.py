"""Parameters that FSDP1 keeps as pieces of a flat shard.

`FullyShardedDataParallel` flattens the parameters of a module, puts them behind each other and gives every process one stretch of that
(Zhao et al. 2023, PyTorch FSDP). With `use_orig_params=True` a parameter outside of a pass is the piece that this process
holds: one dimension, often shorter than the parameter, and empty where the whole parameter lies elsewhere. Its gradient is missing
there. The pieces of all processes, by rank, are the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from leakaudit.errors import SnapshotError
from leakaudit.models.wrappers import plain_name


class FlatPiece(Tensor):
    """A process's piece of a tensor, which has the shape of the whole tensor.

    It can be detached and sent to the first process (`TorchProcessGroup.whole`), and nothing else.
    """

    _local_tensor: Tensor
    """The entries that this process holds, (N,)."""

    def __new__(cls, piece: Tensor, shape: Sequence[int]) -> Self:
        """Make one.

        Args:
            piece: the entries that this process holds, (N,).
            shape: of the whole tensor.
        """
        made: Self = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=piece.dtype, device=piece.device)
        made._local_tensor = piece
        return made

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        """Return the two sizes."""
        return f"FlatPiece({self._local_tensor.numel()} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Detach, and refuse everything else."""
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._local_tensor.detach(), args[0].shape)
        raise SnapshotError(f"{func} needs a whole tensor, and this process holds a piece of it")

    def to_local(self) -> Tensor:
        """Return the entries that this process holds, (N,)."""
        return self._local_tensor

    def full_tensor(self) -> Tensor:
        """Refuse: only the audit's own connections put pieces together.

        Raises:
            SnapshotError: always.
        """
        raise SnapshotError("a piece of a flat shard is whole only in the first process")

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor.

        Args:
            pieces: of all processes, by rank.

        Raises:
            SnapshotError: the pieces have more or fewer entries than the whole tensor.
        """
        entries = torch.cat([piece.reshape(-1) for piece in pieces])
        if entries.numel() != self.numel():
            raise SnapshotError(f"the processes hold {entries.numel()} entries of a tensor of {self.numel()}")
        return entries.view(self.shape)


def fsdp1_modules(called: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that FSDP1 wraps, with their names."""
    for name, module in called.named_modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            yield plain_name(f"{name}.")[:-1], module


def flat_shapes(called: nn.Module) -> dict[int, torch.Size]:
    """Return the whole shapes of the parameters that this process holds a piece of.

    Args:
        called: what the loop calls, with its wrappers.

    Returns:
        Identity of the parameter -> its whole shape; empty without FSDP1.
    """
    found: dict[int, torch.Size] = {}
    for _, module in fsdp1_modules(called):
        handle: Any = getattr(module, "_handle", None)
        if handle is not None and handle.uses_sharded_strategy:
            flat = handle.flat_param
            found |= {id(p): shape for p, shape in zip(flat._params or (), flat._shapes, strict=False)}
    return found


def as_pieces(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return tensors with those that are pieces of flat shards marked as such.

    Args:
        tensors: name -> tensor.
        shapes: name -> whole shape of a parameter that is a piece.
    """
    return {name: FlatPiece(tensor, shapes[name]) if name in shapes else tensor for name, tensor in tensors.items()}


def flat_refusal(called: nn.Module) -> str:
    """Return why a model under FSDP1 cannot be audited, and what to do.

    Empty if it can, or if FSDP1 does not wrap it.
    """
    for name, module in fsdp1_modules(called):
        handle: Any = getattr(module, "_handle", None)
        where = f"FSDP1 wraps {name!r}" if name else "FSDP1 wraps the model"
        if handle is None:
            continue
        if not handle._use_orig_params:
            return (
                f"{where} with `use_orig_params=False`, where the model has no parameters but flat ones; "
                "set `use_orig_params=True`, or train with FSDP2 or DDP"
            )
        if handle._uses_param_mixed_precision or handle._uses_reduce_mixed_precision:
            return (
                f"{where} with `mixed_precision`, which changes the type of weights or gradients where no hook sees it; "
                "use `torch.autocast` instead, or train with DDP"
            )
    return ""


def unflattened(model: nn.Module, called: nn.Module) -> list[str]:
    """Return the trained parameters that FSDP1 leaves out (`ignored_states`).

    Their gradients stay those of one process. Empty without FSDP1.
    """
    handles: list[Any] = [handle for _, m in fsdp1_modules(called) if (handle := getattr(m, "_handle", None))]
    if not any(True for _ in fsdp1_modules(called)):
        return []
    known = {id(p) for handle in handles for p in (*handle.flat_param._params, *handle.flat_param._shared_params)}
    return [plain_name(name) for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
