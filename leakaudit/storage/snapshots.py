"""Snapshots on disk: functions that write, check and read them.

On disk a snapshot is a folder (0700) of three or four files (0600):

    observed.safetensors    update/<parameter>, weights/<parameter or buffer>
    sent.safetensors        <parameter> as it was sent, where something changed the update of a round after the training
    base.safetensors        weights/<parameter> that training does not change: one file, linked into every snapshot of a run
    truth.safetensors       <micro-batch>/inputs/<name>, rng/<device>, num_items, options/<name>, kept_back/<name>, pulls/<path>, again
    snapshot.json           everything else, with the digests of these files, and in its last line its own

The names in `truth.safetensors` are those of schema 1.0; `leakaudit.storage.truth_tensors` says to which field each name belongs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from leakaudit.client.local_steps import delta_divisor, weight_difference
from leakaudit.client.observation import Observation, check_finite
from leakaudit.client.snapshot import (
    BASE,
    MANIFEST,
    OBSERVED,
    SCHEMA,
    SENT,
    TRUTH,
    Manifest,
    SentUpdate,
    Snapshot,
    without_retired_keys,
)
from leakaudit.client.truth import Truth, reading_of
from leakaudit.client.wire import before_on_wire, rounding_of
from leakaudit.errors import SnapshotDamagedError, SnapshotError, SnapshotVersionError
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.models.rebuilding import build_model
from leakaudit.models.recipe import ModelRecipe
from leakaudit.storage.digests import digest_of
from leakaudit.storage.manifest_seal import UNSEALED, sealed, unsealed
from leakaudit.storage.partial_steps import build_first_blocks, updates_from_rows, weights_from_rows
from leakaudit.storage.snapshot_content import MAX_MANIFEST_BYTES, check_manifest, check_size, check_truth, check_update
from leakaudit.storage.snapshot_files import Base, link_base, read_tensors, stored_name, write_bytes, write_tensors
from leakaudit.storage.truth_tensors import below, tensors_of, truth_of


def write_snapshot(
    folder: Path,
    *,
    update: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    truth: Truth,
    manifest: Manifest,
    recipients: Sequence[str] = (),
    base: Base | None = None,
    sketches: Mapping[str, Tensor] | None = None,
    weight_rows: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write a snapshot; one rename makes `folder` appear, complete or not at all.

    Args:
        folder: folder of the snapshot, which must not exist; its parent must exist.
        update: parameter name -> update; a sparse one is stored as its rows.
        weights: every parameter and persistent buffer before the step, tied ones once; without those that are the same in `base`.
        truth: the batch, on the CPU.
        manifest: everything else; this function adds the digests.
        recipients: public keys to which the tensor files are encrypted; empty for no encryption.
        base: file of frozen weights that was written before, encrypted like the other files.
        sketches: sketches of the whole update if `update` holds only parts of it.
        weight_rows: indices and values of the rows in which the weights of `manifest.parts.rows` differ from those in `base`.

    Raises:
        SnapshotError: the folder exists, or the disk is full or not writable. No file is left.
        SnapshotDamagedError: `leakaudit.storage.snapshot_content` refuses the batch.
    """
    if folder.exists():
        raise SnapshotError(f"{folder.name}: a snapshot of that name exists already in {folder.parent}")
    private = tensors_of(truth)
    _check_batch(private, manifest, f"the batch of {folder.name}")
    observed = _observed_tensors(update, weights, sketches or {}, weight_rows)
    with _appearing(folder) as temporary:
        digests = dict(
            write_tensors(temporary / name, tensors, recipients)
            for name, tensors in ((OBSERVED, observed), (TRUTH, private))
        )
        if base is not None:
            digests[link_base(base, temporary)] = base.digest
        complete = manifest.model_copy(update={"digests": digests, "encrypted_to": tuple(recipients)})
        write_bytes(temporary / MANIFEST, manifest_bytes(complete))


def _check_batch(tensors: Mapping[str, Tensor], manifest: Manifest, where: str) -> None:
    facts = manifest.facts
    check_truth(tensors, where, arrays=facts.input_shape is not None, vocabulary=facts.vocabulary.size)


def _observed_tensors(
    update: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    sketches: Mapping[str, Tensor],
    weight_rows: tuple[Tensor, Tensor] | None,
) -> dict[str, Tensor]:
    """Return the tensors of the file `observed.safetensors`."""
    sparse = {name: tensor for name, tensor in update.items() if tensor.is_sparse}
    named = {
        "update": {name: tensor for name, tensor in update.items() if name not in sparse},
        "row_index": {name: tensor.indices()[0] for name, tensor in sparse.items()},
        "row_values": {name: tensor.values() for name, tensor in sparse.items()},
        "weights": weights,
        "weight_rows": {} if weight_rows is None else {"index": weight_rows[0], "values": weight_rows[1]},
        "sketch": sketches,
    }
    return {f"{part}/{name}": tensor for part, tensors in named.items() for name, tensor in tensors.items()}


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Yield a private temporary folder, which becomes `folder` or is removed.

    Raises:
        SnapshotError: the block or the rename failed because space or rights are missing.
    """
    temporary = folder.with_suffix(".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)
        temporary.chmod(0o700)  # a umask may have removed more than it should
        yield temporary
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


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the content of `snapshot.json`, with its digest in the last line."""
    return sealed(manifest.model_dump_json(by_alias=True, indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Read `snapshot.json` of a snapshot folder.

    A file of an earlier version has no digest and is read without that check.

    Raises:
        SnapshotVersionError: a newer leakaudit wrote the file.
        SnapshotDamagedError: the file is missing, is not JSON, does not fit the schema, or was changed after it was written.
    """
    path = folder / MANIFEST
    try:
        found = read_bounded(path, MAX_MANIFEST_BYTES)
        whole = unsealed(found)
        content = found if whole is None else whole
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
    if whole is None and schema not in UNSEALED:
        raise SnapshotDamagedError(
            f"{path}: its digest is missing: truncated or changed; delete the folder and keep a new step"
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
        folder: folder of the snapshot.
        identities: private keys for an encrypted snapshot.
        build: function that makes the model from recipe and weights instead of `build_model`.

    Raises:
        SnapshotSealedError: the snapshot is encrypted, and no key fits.
        SnapshotVersionError: a newer leakaudit wrote it.
        SnapshotDamagedError: a file is missing, truncated or was changed, or it holds content that no training step has
            (`leakaudit.storage.snapshot_content`).
        NonFiniteUpdateError: the update holds NaN or infinity.
        ModelError: the model cannot be rebuilt.
    """
    manifest = read_manifest(folder)
    tensors = _read_files(folder, manifest, identities)
    observation = _observation(folder, manifest, tensors, build or build_model)
    return Snapshot(
        parts=manifest.parts,
        sketches=below("sketch/", tensors[OBSERVED]),
        observation=observation,
        truth=truth_of(tensors[TRUTH], reading_of(manifest.facts)),
        recipe=manifest.recipe,
        model_recipe=manifest.model,
        provenance=manifest.provenance,
        sent=None if manifest.sent is None else _sent(manifest.sent, tensors[SENT], observation, folder),
        sent_beside=0 if manifest.sent is None else manifest.sent.beside,
        sent_differences=manifest.sent is not None and manifest.sent.differences,
    )


def _sent(facts: SentUpdate, weights: Mapping[str, Tensor], produced: Observation, folder: Path) -> Observation:
    """Return what was sent: the difference of the weights before and as sent."""
    wrong = [n for n, w in weights.items() if n not in produced.update or w.shape != produced.update[n].shape]
    if wrong or not weights:
        raise SnapshotDamagedError(
            f"{folder / SENT}: {len(wrong)} of {len(weights)} sent weights are none of the round's"
        )
    check_update(weights, str(folder / SENT))
    model = {n: parameter.detach() for n, parameter in produced.model.named_parameters() if n in weights}
    if facts.differences:
        before = {n: torch.zeros_like(w) for n, w in weights.items()}
    else:
        before = {n: before_on_wire(model[n], w) for n, w in weights.items()}
    update = weight_difference(before, weights, delta_divisor(produced.facts))
    check_finite(update)
    return produced.sent_as(update, rounding_of(weights, model, facts.defenses, differences=facts.differences))


def _read_files(folder: Path, manifest: Manifest, identities: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each file, after checking batch and update."""
    tensors: dict[str, dict[str, Tensor]] = {BASE: {}}
    for name in manifest.files():
        path = _checked(folder, name, manifest)
        tensors[name] = read_tensors(path, identities, manifest.encrypted_to)
    _check_batch(tensors[TRUTH], manifest, str(folder / TRUTH))
    update = below("update/", tensors[OBSERVED])
    check_update(update, str(folder / OBSERVED))
    check_finite(update)
    return tensors


def _observation(
    folder: Path,
    manifest: Manifest,
    tensors: Mapping[str, Mapping[str, Tensor]],
    build: Callable[[ModelRecipe, Mapping[str, Tensor]], nn.Module],
) -> Observation:
    """Return the update with the model that is rebuilt from recipe and weights."""
    observed, parts = tensors[OBSERVED], manifest.parts
    update = {
        name: tensor.float() for name, tensor in below("update/", observed).items()
    }  # exact, because the stored dtype is that of the computation
    weights = below("weights/", tensors[BASE]) | below("weights/", observed)
    update |= updates_from_rows(below("row_index/", observed), below("row_values/", observed), weights, folder)
    if parts is None:
        model = build(manifest.model, weights)
    else:
        weights |= weights_from_rows(below("weight_rows/", observed), parts.rows, weights, folder)
        model = build_first_blocks(manifest.model, parts.blocks, weights)
    kept = set(manifest.facts.shared) - set(parts.not_kept if parts else ())
    _check_update_fits(update, model, kept, folder)
    return Observation(update=update, model=model, facts=manifest.facts, whole=parts is None)


def _checked(folder: Path, name: str, manifest: Manifest) -> Path:
    """Return the path of a snapshot's file after checking its digest."""
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
"""Files whose digest this process has checked, so that the frozen weights of a run are checked once."""


def check_files(folder: Path) -> Manifest:
    """Check the digests of a snapshot's files without decrypting them.

    It needs no key.

    Raises:
        SnapshotVersionError: a newer leakaudit wrote it.
        SnapshotDamagedError: a file is missing, truncated or was changed.
    """
    manifest = read_manifest(folder)
    for name in manifest.files():
        _checked(folder, name, manifest)
    return manifest


def _listing(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"


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
