"""Weights that training does not change, stored once for all snapshots.

Letters: V rows of a table of token vectors, D their width, R rows that changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakaudit.errors import SnapshotError

if TYPE_CHECKING:
    from torch import Tensor

    from leakaudit.storage.frozen_weights import FrozenWeights
    from leakaudit.storage.snapshot_files import Base

BASES = "base"
"""Name of the folder of shared weights in the spool. Each further process of an audit of rounds has one with its process id at the end."""


class SharedWeights:
    """The file of weights that all snapshots of a run have in common."""

    def __init__(self, root: Path, name: str = BASES) -> None:
        """Remember the spool's folder; no file is read or written.

        Args:
            root: folder of the spool.
            name: of the folder of shared weights in it.
        """
        self._folder = root / name
        self._base: Base | None = None
        """The file of frozen weights, once it is written."""
        self._checksums: dict[str, int] = {}
        """Name -> checksum of each tensor in that file. The rounds of an audit train one model after another, and each may have other
        frozen weights."""
        self._table: Tensor | None = None
        """(V, D) table of token vectors at the first kept step."""

    def take_out(
        self,
        weights: Mapping[str, Tensor],
        frozen: FrozenWeights | None,
        table: str | None,
        recipients: Sequence[str],
    ) -> dict[str, Any]:
        """Split a snapshot's weights into the shared file and the rest.

        Args:
            weights: weights of one step, without the frozen ones.
            frozen: weights that training does not change.
            table: name of one of `weights`, of which a step changes only a few rows.
            recipients: public keys to which the shared file is encrypted.

        Returns:
            Arguments of `write_snapshot`: `weights`, and also `base` and `weight_rows` if weights are shared.

        Raises:
            SnapshotError: the shared file cannot be written, or the weights changed meanwhile. No file is left.
        """
        if frozen is not None and self._file():
            frozen.check()
        if table is not None:
            frozen = self._with_table(table, weights[table], frozen)
        if frozen is None or not frozen.tensors:
            return {"weights": weights}
        base = self._written(frozen, recipients)
        more = {
            name: tensor.detach()
            for name, (tensor, checksum) in frozen.to_store().items()
            if name != table and self._checksums.get(name) != checksum
        }
        own = {**weights, **more}
        if table is not None and table in base.names:
            return {"base": base, "weights": own, **self._changed_rows(table, own)}
        return {"base": base, "weights": own}

    def remove(self) -> None:
        """Remove the file; snapshots with a link to it keep the weights."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _with_table(self, name: str, tensor: Tensor, frozen: FrozenWeights | None) -> FrozenWeights:
        """Return the frozen weights and a copy of a table from the first kept step."""
        from leakaudit.storage.frozen_weights import FrozenWeights

        if self._table is None or self._table.shape != tensor.shape:
            self._table = tensor.to("cpu", copy=True)
        return (frozen or FrozenWeights({}, {})).and_copy(name, self._table)

    def _changed_rows(self, name: str, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the weights without a table, and the table's changed rows (R, D).

        Empty if more than half of the rows changed.
        """
        from leakaudit.storage.frozen_weights import changed_rows

        now = weights[name].cpu()
        rows = changed_rows(now, self._table)  # type: ignore[arg-type]
        if 2 * len(rows) > len(now):
            return {}
        return {"weights": {n: w for n, w in weights.items() if n != name}, "weight_rows": (rows, now[rows])}

    def _file(self) -> Base | None:
        """Return the shared file; None if it is not written yet, or was removed."""
        return self._base if self._base is not None and self._base.path.is_file() else None

    def _written(self, frozen: FrozenWeights, recipients: Sequence[str]) -> Base:
        """Return the shared file; write it if it does not exist.

        Raises:
            SnapshotError: the file cannot be written, or the weights changed meanwhile. No file is left.
        """
        from leakaudit.client.snapshot import BASE
        from leakaudit.storage.snapshot_files import Base, write_tensors

        if (base := self._file()) is not None:
            return base
        try:
            self.remove()
            self._folder.mkdir(mode=0o700)
            self._folder.chmod(0o700)
            stored = frozen.to_store()
            tensors = {f"weights/{name}": tensor for name, (tensor, _) in stored.items()}
            name, digest = write_tensors(self._folder / BASE, tensors, recipients)
            frozen.check()
        except OSError as error:
            self.remove()
            raise SnapshotError(
                f"cannot write the frozen weights in {self._folder}: {error.strerror or type(error).__name__}; free some space or "
                "set `out_dir` to a folder that can be written"
            ) from None
        except BaseException:
            self.remove()
            raise
        self._base = Base(self._folder / name, digest, frozenset(stored))
        self._checksums = {name: checksum for name, (_, checksum) in stored.items()}
        return self._base
