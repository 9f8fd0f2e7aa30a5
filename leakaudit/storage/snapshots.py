"""Writes and reads the files of a snapshot.

On disk a snapshot is a folder (0700) of three or four files (0600):

    observed.safetensors    update/<parameter>, weights/<parameter or buffer>
    base.safetensors        weights/<parameter> that training does not move: one file, linked into every snapshot of a run
    truth.safetensors       <micro-batch>/inputs/<name>, rng/<device>, num_items, options/<name>, kept_back/<name>, pulls/<path>, again
    snapshot.json           everything else, with the digests of these files
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from leakaudit.client.observation import Observation, check_finite
from leakaudit.client.sequences import PLAIN, Reading
from leakaudit.client.snapshot import BASE, MANIFEST, OBSERVED, SCHEMA, TRUTH, Manifest, Snapshot, without_retired_keys
from leakaudit.client.truth import MicroBatch, Truth, reading_of
from leakaudit.errors import ModelError, SnapshotDamagedError, SnapshotError, SnapshotVersionError
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.models.first_blocks import fill_missing, first_blocks
from leakaudit.models.rebuilding import build_model
from leakaudit.models.recipe import ModelRecipe
from leakaudit.storage.digests import digest_of
from leakaudit.storage.snapshot_content import MAX_MANIFEST_BYTES, check_manifest, check_size, check_truth, check_update
from leakaudit.storage.snapshot_files import Base, link_base, read_tensors, stored_name, write_tensors, write_text


def write_snapshot(
    folder: Path,
    *,
    update: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    truth: Truth,
    manifest: Manifest,
    recipients: Sequence[str] = (),
    base: Base | None = None,
    rows: tuple[Tensor, Tensor] | None = None,
    sketches: Mapping[str, Tensor] | None = None,
    weight_rows: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the files of a snapshot into `folder`, with one rename.

    They have a temporary name before.

    Args:
        folder: must not exist; its parent must. Appears complete or not at all.
        update: parameter name -> update.
        weights: every parameter and persistent buffer before the step, tied ones once; those in `base` only where they differ.
        truth: the batch, on the CPU.
        manifest: everything else; its digests are filled in here.
        recipients: public keys to encrypt both tensor files to; none to leave them in clear.
        base: frozen weights that were written before, in clear or encrypted like the rest.
        rows: indices (R,) and values (R, D) of the rows of `manifest.parts.rows` that are not zero.
        sketches: of the whole update, where `update` holds parts of it.
        weight_rows: indices and values of the rows in which the weights of `manifest.parts.rows` differ from those in `base`.

    Raises:
        SnapshotError: the folder exists, or the disk is full or not writable; nothing is left behind.
        SnapshotDamagedError: the batch is none that `leakaudit.storage.snapshot_content` lets pass.
    """
    if folder.exists():
        raise SnapshotError(f"{folder.name}: a snapshot of that name exists already in {folder.parent}")
    temporary = folder.with_suffix(".tmp")
    observed = {f"update/{name}": tensor for name, tensor in update.items()}
    observed |= {f"weights/{name}": tensor for name, tensor in weights.items()}
    observed |= {f"sketch/{name}": tensor for name, tensor in (sketches or {}).items()}
    if rows is not None:
        observed |= {"rows/index": rows[0], "rows/values": rows[1]}
    if weight_rows is not None:
        observed |= {"weight_rows/index": weight_rows[0], "weight_rows/values": weight_rows[1]}
    digests: dict[str, str] = {}
    private = tensors_of(truth)
    check_truth(
        private,
        f"the batch of {folder.name}",
        arrays=manifest.facts.input_shape is not None,
        vocabulary=manifest.facts.vocabulary.size,
    )
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)
        temporary.chmod(0o700)  # a umask may have taken away more than it should
        for name, tensors in ((OBSERVED, observed), (TRUTH, private)):
            stored, digest = write_tensors(temporary / name, tensors, recipients)
            digests[stored] = digest
        if base is not None:
            digests[link_base(base, temporary)] = base.digest
        complete = manifest.model_copy(update={"digests": digests, "encrypted_to": tuple(recipients)})
        write_text(temporary / MANIFEST, complete.model_dump_json(by_alias=True, indent=1))
        temporary.rename(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise SnapshotError(
            f"cannot write snapshot {folder.name} in {folder.parent}: {error.strerror or type(error).__name__}; "
            "free some space or set `out_dir` to a folder that can be written"
        ) from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


STORED_PARTS = {"inputs": "inputs", "rng": "rng", "withheld_inputs": "kept_back", "output_gradients": "pulls"}
"""Field of a micro-batch -> what the file calls it, since schema 1.0."""


def tensors_of(truth: Truth) -> dict[str, Tensor]:
    """Return the tensors of a batch by the names that the file `truth.safetensors` gives them."""
    tensors: dict[str, Tensor] = {}
    for index, batch in enumerate(truth.micro_batches):
        for part, stored in STORED_PARTS.items():
            values = getattr(batch, part)
            tensors |= {f"{index}/{stored}/{name}": value.contiguous() for name, value in values.items()}
        tensors |= {f"{index}/options/{name}": _scalar(value) for name, value in batch.options.items()}
        if batch.num_items is not None:
            tensors[f"{index}/num_items"] = batch.num_items
        if batch.repeated_pass:
            tensors[f"{index}/again"] = torch.tensor(True)
    return tensors


def _scalar(value: bool | float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def truth_of(tensors: Mapping[str, Tensor], reading: Reading = PLAIN) -> Truth:
    """Return the batch that such tensors hold; `check_truth` has looked at them."""
    found: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, rest = key.partition("/")
        found.setdefault(int(number), {})[rest] = value
    return Truth(tuple(_micro_batch(found[number]) for number in sorted(found)), reading)


def _micro_batch(mine: Mapping[str, Tensor]) -> MicroBatch:
    return MicroBatch(
        inputs=_below("inputs/", mine),
        rng=_below("rng/", mine),
        num_items=mine.get("num_items"),
        options={name: value.item() for name, value in _below("options/", mine).items()},
        withheld_inputs=_below("kept_back/", mine),
        output_gradients=_below("pulls/", mine),
        repeated_pass="again" in mine,
    )


def read_manifest(folder: Path) -> Manifest:
    """Read `snapshot.json` of a snapshot folder.

    Raises:
        SnapshotVersionError: written by a newer leakaudit.
        SnapshotDamagedError: missing, no JSON, or does not fit the schema.
    """
    path = folder / MANIFEST
    try:
        content = read_bounded(path, MAX_MANIFEST_BYTES)
        parsed = parse_json(content)
        schema = str(parsed["schema"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = str(error) if type(error) is ValueError else type(error).__name__
        raise SnapshotDamagedError(
            f"{path}: not readable as a snapshot manifest ({why}); delete the folder and keep a new step"
        ) from None
    if not schema.startswith("leakaudit.snapshot/1."):
        raise SnapshotVersionError(
            f"{path}: schema {ascii(schema[:60])[1:-1]}; this version reads leakaudit.snapshot/1.x. Upgrade leakaudit."
        )
    try:
        earlier = without_retired_keys(parsed)
        text = content.removeprefix(b"\xef\xbb\xbf") if earlier is None else json.dumps(earlier)
        manifest = Manifest.model_validate_json(text, strict=True)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise SnapshotDamagedError(
            f"{path}: does not fit {SCHEMA} at {ascii(where[:200])[1:-1]} ({error.error_count()} problems)"
        ) from None
    check_manifest(manifest, str(path))
    return manifest


def read_snapshot(
    folder: Path,
    identities: Sequence[str] = (),
    build: Callable[[ModelRecipe, Mapping[str, Tensor]], nn.Module] | None = None,
) -> Snapshot:
    """Read a snapshot, check it against its digests and rebuild the model.

    Args:
        folder: of the snapshot.
        identities: private keys, where it is encrypted.
        build: makes the model of its recipe and weights, where `build_model` cannot.

    Raises:
        SnapshotSealedError: encrypted, and no key fits.
        SnapshotVersionError: written by a newer leakaudit.
        SnapshotDamagedError: a file is missing, truncated or was changed, or what it holds is nothing that a training step has
            (`leakaudit.storage.snapshot_content`).
        NonFiniteUpdateError: the update holds NaN or infinity.
        ModelError: the model cannot be rebuilt.
    """
    manifest = read_manifest(folder)
    tensors: dict[str, dict[str, Tensor]] = {BASE: {}}
    for name in manifest.files():
        path = _checked(folder, name, manifest)
        tensors[name] = read_tensors(path, identities, manifest.encrypted_to)
    update, facts = _below("update/", tensors[OBSERVED]), manifest.facts
    check_truth(
        tensors[TRUTH],
        str(folder / TRUTH),
        arrays=facts.input_shape is not None,
        vocabulary=facts.vocabulary.size,
    )
    check_update(update, str(folder / OBSERVED))
    check_finite(update)
    update = {name: tensor.float() for name, tensor in update.items()}  # exact: kept in the type of the gradient
    weights = _below("weights/", tensors[BASE]) | _below("weights/", tensors[OBSERVED])
    parts = manifest.parts
    if parts is None:
        model = (build or build_model)(manifest.model, weights)
    else:
        update |= _from_rows(_below("rows/", tensors[OBSERVED]), parts.rows, weights, folder)
        weights |= _changed_by(_below("weight_rows/", tensors[OBSERVED]), parts.rows, weights, folder)
        model = build_first_blocks(manifest.model, parts.blocks, weights)
    kept = set(manifest.facts.shared) - set(parts.not_kept if parts else ())
    _check_update_fits(update, model, kept, folder)
    return Snapshot(
        parts=parts,
        sketches=_below("sketch/", tensors[OBSERVED]),
        observation=Observation(update=update, model=model, facts=manifest.facts, whole=parts is None),
        truth=truth_of(tensors[TRUTH], reading_of(facts)),
        recipe=manifest.recipe,
        model_recipe=manifest.model,
        provenance=manifest.provenance,
        checked=manifest.checked,
    )


def _checked(folder: Path, name: str, manifest: Manifest) -> Path:
    """Return where a file of a snapshot lies, once its bytes are known to be those that were written."""
    stored = stored_name(folder, name)
    if stored is None:
        raise SnapshotDamagedError(f"{folder}: {name} is missing; found {_listing(folder)}")
    check_size((folder / stored).stat().st_size, str(folder / stored))
    expected = manifest.digests.get(stored, "")
    stat = (folder / stored).stat()
    same = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, expected)
    if name == BASE and same in _CHECKED:
        return folder / stored
    if digest_of(folder / stored, expected) != expected:
        raise SnapshotDamagedError(f"{folder / stored}: its digest is not the one in {MANIFEST}: truncated or changed")
    _CHECKED.add(same)
    return folder / stored


_CHECKED: set[tuple[int, int, int, int, str]] = set()
"""Files whose digest this process has seen to be right: one file of frozen weights belongs to all snapshots of a run."""


def check_files(folder: Path) -> Manifest:
    """Hold a snapshot's files against their digests, without reading what is in them; no key is needed.

    Raises:
        SnapshotVersionError: written by a newer leakaudit.
        SnapshotDamagedError: a file is missing, truncated or was changed.
    """
    manifest = read_manifest(folder)
    for name in manifest.files():
        _checked(folder, name, manifest)
    return manifest


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _listing(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"


def _from_rows(
    rows: Mapping[str, Tensor], name: str | None, weights: Mapping[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    """Return the update of a table, float32.

    Only its rows that are not zero were kept.

    Raises:
        SnapshotDamagedError: the rows do not fit the table.
    """
    if name is None or not rows:
        return {}
    index, values = _checked_rows(rows, name, weights, folder)
    check_finite({name: values})
    dense = torch.zeros(weights[name].shape)
    dense[index] = values.float()
    return {name: dense}


def _changed_by(
    rows: Mapping[str, Tensor], name: str | None, weights: Mapping[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    """Return the weights of a table of which the rows that changed were kept.

    Raises:
        SnapshotDamagedError: the rows do not fit the table.
    """
    if name is None or not rows:
        return {}
    index, values = _checked_rows(rows, name, weights, folder)
    table = weights[name].clone()
    table[index] = values.to(table.dtype)
    return {name: table}


def _checked_rows(
    rows: Mapping[str, Tensor], name: str, weights: Mapping[str, Tensor], folder: Path
) -> tuple[Tensor, Tensor]:
    """Return indices and values of rows of a table.

    Raises:
        SnapshotDamagedError: they do not fit it.
    """
    index, values, table = rows.get("index"), rows.get("values"), weights.get(name)
    if index is not None and values is not None and table is not None:
        shaped = values.shape == (len(index), *table.shape[1:]) if index.dim() == 1 else False
        inside = not index.numel() or (int(index.min()) >= 0 and int(index.max()) < len(table))
        if shaped and inside and index.dtype == torch.int64 and values.is_floating_point():
            return index, values
    raise SnapshotDamagedError(f"{folder}: the rows of {name!r} in {OBSERVED} do not fit the table")


def build_first_blocks(recipe: ModelRecipe, blocks: int, weights: Mapping[str, Tensor]) -> nn.Module:
    """Rebuild the first blocks of a model; what was not kept has other values.

    Raises:
        ModelError: the recipe cannot be cut, or the weights do not fit it.
    """
    try:
        cut = first_blocks(recipe, blocks)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ModelError(f"cannot rebuild {recipe.class_name} from its recipe: {type(error).__name__}") from None
    if cut is None:
        raise ModelError(f"{recipe.class_name}: its configuration does not say how its first {blocks} blocks are made")
    return build_model(cut, weights, fill_missing)


def _check_update_fits(update: Mapping[str, Tensor], model: nn.Module, shared: set[str], folder: Path) -> None:
    if set(update) != shared:
        first = min(set(update) ^ shared)
        raise SnapshotDamagedError(
            f"{folder}: {MANIFEST} names {len(shared)} shared parameters, {OBSERVED} has {len(update)} updates; "
            f"the first that only one of them has is {first!r}"
        )
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    wrong = [name for name, tensor in update.items() if shapes.get(name) != tensor.shape]
    if wrong:
        raise SnapshotDamagedError(
            f"{folder}: {len(wrong)} updates do not fit the model, first {wrong[0]!r}: "
            f"update {tuple(update[wrong[0]].shape)}, model {tuple(shapes.get(wrong[0], ()))}"
        )
