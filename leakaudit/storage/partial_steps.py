"""Snapshots of parts of a step: its first blocks, and changed rows of a table.

Letters: V rows of a table, D their width, R rows that were kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from leakaudit.client.observation import check_finite
from leakaudit.client.snapshot import OBSERVED
from leakaudit.errors import ModelError, SnapshotDamagedError
from leakaudit.models.first_blocks import fill_missing, first_blocks
from leakaudit.models.rebuilding import build_model
from leakaudit.models.recipe import ModelRecipe


def updates_from_rows(
    index: Mapping[str, Tensor], values: Mapping[str, Tensor], weights: Mapping[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    """Return the updates (V, D), float32, of tables of which some rows were kept.

    Args:
        index: parameter name -> positions of the rows (R,).
        values: parameter name -> rows (R, D).
        weights: weights of the model, including the tables.
        folder: folder of the snapshot, for messages.

    Raises:
        SnapshotDamagedError: the rows do not fit their table.
        NonFiniteUpdateError: a row holds NaN or infinity.
    """
    updates = {}
    for name in index.keys() | values.keys():
        places, rows = _checked_rows(index.get(name), values.get(name), name, weights, folder)
        updates[name] = torch.zeros(weights[name].shape)
        updates[name][places] = rows.float()
    check_finite(updates)
    return updates


def weights_from_rows(
    rows: Mapping[str, Tensor], name: str | None, weights: Mapping[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    """Return the weights (V, D) of a table of which the changed rows were kept.

    Args:
        rows: `index` (R,) and `values` (R, D); empty where nothing was kept in rows.
        name: parameter name of the table.
        weights: weights of the model, including the table before the changes.
        folder: folder of the snapshot, for messages.

    Raises:
        SnapshotDamagedError: the rows do not fit the table.
    """
    if name is None or not rows:
        return {}
    index, values = _checked_rows(rows.get("index"), rows.get("values"), name, weights, folder)
    table = weights[name].clone()
    table[index] = values.to(table.dtype)
    return {name: table}


def _checked_rows(
    index: Tensor | None, values: Tensor | None, name: str, weights: Mapping[str, Tensor], folder: Path
) -> tuple[Tensor, Tensor]:
    """Return indices and values of rows of a table.

    Raises:
        SnapshotDamagedError: the rows do not fit the table.
    """
    table = weights.get(name)
    if index is not None and values is not None and table is not None:
        shaped = values.shape == (len(index), *table.shape[1:]) if index.dim() == 1 else False
        inside = not index.numel() or (int(index.min()) >= 0 and int(index.max()) < len(table))
        if shaped and inside and index.dtype == torch.int64 and values.is_floating_point():
            return index, values
    raise SnapshotDamagedError(f"{folder}: the rows of {name!r} in {OBSERVED} do not fit the table")


def build_first_blocks(recipe: ModelRecipe, blocks: int, weights: Mapping[str, Tensor]) -> nn.Module:
    """Rebuild the first blocks of a model.

    Weights that were not kept get other values.

    Raises:
        ModelError: the recipe cannot be shortened, or the weights do not fit it.
    """
    try:
        cut = first_blocks(recipe, blocks)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ModelError(f"cannot rebuild {recipe.class_name} from its recipe: {type(error).__name__}") from None
    if cut is None:
        raise ModelError(f"{recipe.class_name}: its configuration does not say how its first {blocks} blocks are made")
    return build_model(cut, weights, fill_missing)
