"""`powersgd`: send a matrix of low rank in place of each matrix of the update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from leakaudit.plugins import ClientStep, Defense, Update, defense
from leakaudit.plugins.defense_protocol import FLOAT_BYTES


@defense("powersgd")
@dataclass(frozen=True)
class PowerSgd(Defense):
    """Send each matrix of the update as a product of two matrices of rank `rank`.

    For a gradient M (N x K) and a start Q (K x R): P = orthonormal columns of M Q, and M is sent as P (P^T M) (Vogels et al. 2019,
    Algorithm 1, one power iteration). A tensor with more dimensions counts as a matrix with its first one as rows. Vectors, and matrices
    that would get no shorter ((N + K) R >= N K), are sent whole. Every matrix starts from the same public seed at every step; the paper
    starts from the Q of the step before, which an adversary sees as well.

    The rows that are sent are sums of rows of M, so their space is a part of the space of M's rows. A matrix of
    rank R or less is sent exactly. The gradient of a linear layer has at most as many ranks as the batch has tokens. Query, key and
    value layers read the same inputs, so together they show up to 3 R directions of the space of these inputs.
    """

    rank: int = 4
    """R: rank of what is sent; 0 does nothing. Usual: 1 to 4 (Vogels et al. 2019, Sec. 5)."""
    seed: int = 0
    """Seed of the start Q, which the protocol makes public."""
    error_feedback: bool = False
    """Whether what was not sent is added to the next update. An audit of one step refuses it."""

    label: ClassVar[str] = "PowerSGD"
    meaning: ClassVar[str] = "Sends each matrix of the update as a product of two thin matrices."
    identity: ClassVar[Mapping[str, Any]] = {"rank": 0}
    resized: ClassVar[bool] = True
    on_update = True
    source: ClassVar[str] = "PowerSGD (Vogels et al. 2019, Algorithm 1); torch's powerSGD_hook computes the same"
    protects: ClassVar[str] = "Hides all but a few directions of each matrix; batches of up to R tokens are sent whole."
    cost: ClassVar[str] = (
        "Worse training at small ranks, much less with error feedback; the traffic shrinks to two thin matrices."
    )

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        if self.rank < 0:
            raise ValueError(f"rank must be 1 or more, or 0 for none, got {self.rank}")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, got {self.seed}")

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the update with matrices of low rank; itself if none gets shorter."""
        if not any(self._shortens(tensor) for tensor in update.values()):
            return update
        return {
            name: self._approximated(tensor) if self._shortens(tensor) else tensor for name, tensor in update.items()
        }

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return the matrices of low rank, from the same start.

        Raises:
            SnapshotError: the defence has error feedback.
        """
        if self.is_identity():
            return recomputed
        self.check_one_step()
        return self.changed(recomputed, torch.Generator())

    def sent_bytes(self, sent: Update) -> float:
        """Return the bytes of an update: of a matrix the two thin ones, in float32."""
        return float(sum(FLOAT_BYTES * self._numbers(tensor) for tensor in sent.values()))

    def _numbers(self, tensor: Tensor) -> int:
        """Return how many numbers are sent for a tensor."""
        if not self._shortens(tensor):
            return tensor.numel()
        return (len(tensor) + tensor.numel() // len(tensor)) * self.rank

    def _shortens(self, tensor: Tensor) -> bool:
        if tensor.dim() < 2 or not tensor.numel() or not self.rank:
            return False
        rows, columns = len(tensor), tensor.numel() // len(tensor)
        return (rows + columns) * self.rank < rows * columns

    def _approximated(self, tensor: Tensor) -> Tensor:
        matrix = tensor.reshape(len(tensor), -1)  # (N, K)
        start = torch.randn(matrix.shape[1], self.rank, generator=torch.Generator().manual_seed(self.seed))
        return low_rank(matrix, start.to(matrix.device)).reshape(tensor.shape)


def low_rank(matrix: Tensor, start: Tensor) -> Tensor:
    """Return P (P^T M), with P an orthonormal basis of the columns of M Q.

    It is computed in float64: a matrix of smaller rank than R has columns of M Q that differ by rounding alone. Zero rows of M, such as
    those of words that are not in the batch, stay exactly zero, as with Gram-Schmidt.

    Args:
        matrix: (N, K) M.
        start: (K, R) Q.
    """
    exact = matrix.double()
    basis = torch.linalg.qr(exact @ start.double()).Q  # (N, R)
    sent: Tensor = (basis @ (basis.T @ exact)).to(matrix) * matrix.any(dim=1, keepdim=True)
    return sent
