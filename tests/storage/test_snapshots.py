"""A snapshot comes back as it was written, or not at all."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickletools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from leakaudit.client.batches import with_random_state
from leakaudit.client.facts import DeclaredDefense, Granted
from leakaudit.client.observation import Observation
from leakaudit.client.snapshot import MANIFEST, OBSERVED, TRUTH, Manifest, Provenance
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.errors import NonFiniteUpdateError, SnapshotDamagedError, SnapshotError, SnapshotVersionError
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.structure import dropout_rates
from leakaudit.models.tensors import state_of
from leakaudit.registry import defenses
from leakaudit.storage.digests import digest_of
from leakaudit.storage.snapshots import read_manifest, read_snapshot, write_snapshot
from tests.support import tiny
from tests.support.snapshots import edit_manifest

ROOT = Path(__file__).parents[2]
TEXT = "the old dog chased a cat ."


def parts(model: Any = None) -> dict[str, Any]:
    """Return what `write_snapshot` takes, of one step of the tiny BERT."""
    model = model or tiny.bert(dropout=0.1)
    step = tiny.client_step(model, tiny.bert_tokenizer(), [TEXT, "a horse ate"], [1, 0], training=True)
    batches = tuple(with_random_state(batch, 5) for batch in step.truth.micro_batches)
    manifest = Manifest(
        model=ModelRecipe.of(model),
        facts=step.facts,
        recipe=step.recipe,
        provenance=Provenance(framework="test", step=12, epoch=0.5),
    )
    weights = {name: value.clone() for name, value in state_of(model).items()}
    return {"update": step.update(), "weights": weights, "truth": Truth(batches), "manifest": manifest}


def written(folder: Path, **changes: Any) -> Path:
    """Write a snapshot and return its folder."""
    write_snapshot(folder / "000012.ready", **{**parts(), **changes})
    return folder / "000012.ready"


def test_a_snapshot_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Update, weights, batch, random state and every fact, bit by bit."""
    given = parts()
    found = read_snapshot(written(tmp_path, **given))
    assert all(torch.equal(found.observation.update[name], value) for name, value in given["update"].items())
    assert set(found.observation.update) == set(given["update"])
    weights = state_of(found.observation.model)
    assert all(torch.equal(weights[name], value) for name, value in given["weights"].items())
    assert found.observation.facts == given["manifest"].facts
    assert found.recipe == given["manifest"].recipe
    assert found.provenance == given["manifest"].provenance
    for mine, theirs in zip(found.truth.micro_batches, given["truth"].micro_batches, strict=True):
        assert all(torch.equal(mine.inputs[name], value) for name, value in theirs.inputs.items())
        assert torch.equal(mine.rng["cpu"], theirs.rng["cpu"])
    assert not found.observation.model.training


def test_micro_batches_keep_their_order_and_item_count(tmp_path: Path) -> None:
    """More than ten, so that sorting by name would be wrong."""
    batches = tuple(
        MicroBatch({"input_ids": torch.tensor([[2, 5 + index, 3]])}, num_items=torch.tensor(index))
        for index in range(12)
    )
    found = read_snapshot(written(tmp_path, truth=Truth(batches))).truth
    assert [sequence[1] for sequence in found.sequences()] == [5 + index for index in range(12)]
    assert [int(batch.num_items) for batch in found.micro_batches if batch.num_items is not None] == list(range(12))


def test_tied_weights_are_written_once_and_tied_again(tmp_path: Path) -> None:
    """GPT-2's head is its word embedding; its gradient is the sum of both."""
    model = tiny.gpt2_lm()
    step = tiny.client_step(model, tiny.gpt2_tokenizer(), [TEXT], task="causal-lm")
    manifest = Manifest(
        model=ModelRecipe.of(model), facts=step.facts, recipe=step.recipe, provenance=Provenance(framework="test")
    )
    folder = written(tmp_path, update=step.update(), weights=state_of(model), truth=step.truth, manifest=manifest)
    found = read_snapshot(folder).observation
    assert "lm_head.weight" not in found.update
    assert found.model.lm_head.weight is found.model.transformer.wte.weight  # type: ignore[union-attr]


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    """0700 for the folder, 0600 for each file, whatever the umask."""
    before = os.umask(0)
    try:
        folder = written(tmp_path)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        OBSERVED: 0o600,
        TRUTH: 0o600,
        MANIFEST: 0o600,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["000012.ready"]


def test_truth_and_observation_are_two_files(tmp_path: Path) -> None:
    """The observed file and the manifest hold nothing of the batch."""
    from safetensors import safe_open

    folder = written(tmp_path)
    with safe_open(folder / OBSERVED, framework="pt") as file:
        assert {key.split("/")[0] for key in file.keys()} == {"update", "weights"}  # noqa: SIM118
    with safe_open(folder / TRUTH, framework="pt") as file:
        assert {key.split("/")[1] for key in file.keys()} == {"inputs", "rng"}  # noqa: SIM118
    text = (folder / MANIFEST).read_text()
    assert "input_ids" not in text and "dog" not in text


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    """No file begins with the mark of a pickle or of a zip archive."""
    for path in written(tmp_path).iterdir():
        head = path.read_bytes()[:4096]
        assert not head.startswith((b"\x80", b"PK"))
        with pytest.raises(Exception, match=r".+"):
            list(pickletools.genops(head))


def test_no_module_of_ours_can_unpickle_anything() -> None:
    """No module imports pickle or calls torch's pickling functions."""
    for path in (p for room in ("leakaudit", "callbacks", "reports") for p in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = getattr(node, "module", None)
            assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"} & {*names, module}, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in {"load", "save"}, path


@pytest.mark.parametrize("name", [OBSERVED, TRUTH])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str) -> None:
    """Named, with the reason."""
    folder = written(tmp_path)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(SnapshotDamagedError, match=rf"{name}: its digest .* truncated or changed"):
        read_snapshot(folder)


@pytest.mark.parametrize("name", [OBSERVED, TRUTH])
def test_a_changed_byte_is_refused(tmp_path: Path, name: str) -> None:
    """The last one, which is a number and leaves the file readable."""
    folder = written(tmp_path)
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(SnapshotDamagedError, match=rf"{name}: its digest"):
        read_snapshot(folder)


@pytest.mark.parametrize("name", [OBSERVED, TRUTH, MANIFEST])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    """With what is there instead."""
    folder = written(tmp_path)
    (folder / name).unlink()
    with pytest.raises(SnapshotDamagedError, match=name):
        read_snapshot(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"facts": {}}'])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """Cut off, or something else altogether."""
    folder = written(tmp_path)
    (folder / MANIFEST).write_text(text)
    with pytest.raises(SnapshotDamagedError, match=r"not readable as a snapshot manifest"):
        read_snapshot(folder)


def test_a_changed_bit_anywhere_in_a_manifest_is_refused(tmp_path: Path) -> None:
    """One of each byte, also in the digest and in the number of the schema."""
    folder = written(tmp_path)
    whole = (folder / MANIFEST).read_bytes()
    flips = random.Random(0)
    for index in range(len(whole)):
        changed = bytearray(whole)
        changed[index] ^= 1 << flips.randrange(8)
        (folder / MANIFEST).write_bytes(changed)
        with pytest.raises(SnapshotError):
            read_manifest(folder)
    (folder / MANIFEST).write_bytes(whole)
    read_manifest(folder)


def test_a_manifest_without_its_digest_is_refused(tmp_path: Path) -> None:
    """Even if it is complete."""
    folder = written(tmp_path)
    raw = json.loads((folder / MANIFEST).read_text())
    del raw["digest"]
    (folder / MANIFEST).write_text(json.dumps(raw))
    with pytest.raises(SnapshotDamagedError, match=r"snapshot\.json: its digest is missing"):
        read_snapshot(folder)


@pytest.mark.parametrize("schema", ["leakaudit.snapshot/1.0", "leakaudit.snapshot/1.1"])
def test_a_snapshot_of_an_older_schema_is_read_and_checked(tmp_path: Path, schema: str) -> None:
    """Its digests are SHA-256, and it knows nothing of parts."""
    folder = written(tmp_path)
    expected = read_snapshot(folder).observation.digest()

    def age(raw: dict[str, Any]) -> None:
        raw["schema"] = schema
        raw["digests"] = {n: f"sha256:{hashlib.sha256((folder / n).read_bytes()).hexdigest()}" for n in raw["digests"]}
        for name in ("parts", "checked"):
            raw.pop(name, None)

    edit_manifest(folder, age)
    assert read_snapshot(folder).observation.digest() == expected
    with (folder / TRUTH).open("ab") as file:
        file.write(b"x")
    with pytest.raises(SnapshotDamagedError, match="its digest"):
        read_snapshot(folder)


def test_keys_that_earlier_versions_wrote_are_ignored(tmp_path: Path) -> None:
    """A step whose loss they described is read as one that cannot be replayed."""
    folder = written(tmp_path)

    def age(raw: dict[str, Any]) -> None:
        raw["facts"]["stage"] = "clipped"
        raw["recipe"] |= {"label_smoothing": 0.0, "pass_num_items": False, "outside": 2}

    edit_manifest(folder, age)
    recipe = read_snapshot(folder).recipe
    assert (recipe.loss, recipe.unaudited_parameters) == ("forward", 2)
    for loss in ({"loss": "label_smoothing", "label_smoothing": 0.2}, {"loss": "forward", "pass_num_items": True}):
        edit_manifest(folder, lambda raw: raw["recipe"].update(loss))  # noqa: B023 - called at once
        recipe = read_snapshot(folder).recipe
        assert recipe.loss == "unsupported" and "an earlier version recorded its loss" in recipe.note


@pytest.mark.parametrize("schema", ["leakaudit.snapshot/2.0", "leakaudit.snapshot/10.0", "something"])
def test_a_newer_schema_asks_for_an_upgrade(tmp_path: Path, schema: str) -> None:
    """Not guessed at."""
    folder = written(tmp_path)
    edit_manifest(folder, lambda raw: raw.update(schema=schema, facts={"unheard": "of"}))
    with pytest.raises(SnapshotVersionError, match=rf"schema {schema}; this version reads .*Upgrade leakaudit"):
        read_snapshot(folder)


def test_a_manifest_that_does_not_fit_names_the_place(tmp_path: Path) -> None:
    """And none of its values."""
    folder = written(tmp_path)
    edit_manifest(folder, lambda raw: raw["facts"].update(task="the old dog"))
    with pytest.raises(SnapshotDamagedError, match=r"does not fit .* at facts\.task") as caught:
        read_snapshot(folder)
    assert "dog" not in str(caught.value)


def test_a_manifest_and_an_update_that_differ_are_refused(tmp_path: Path) -> None:
    """A shared parameter without an update."""
    given = parts()
    given["update"].pop("classifier.bias")
    with pytest.raises(SnapshotDamagedError, match=r"40 updates; the first .* is 'classifier\.bias'"):
        read_snapshot(written(tmp_path, **given))


def test_an_update_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    """Both shapes are named."""
    given = parts()
    given["update"]["classifier.bias"] = torch.zeros(7)
    with pytest.raises(SnapshotDamagedError, match=r"'classifier\.bias': update \(7,\), model \(2,\)"):
        read_snapshot(written(tmp_path, **given))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_an_update_that_is_not_finite_is_refused(tmp_path: Path, bad: float) -> None:
    """Nothing can be said about it."""
    given = parts()
    given["update"]["classifier.bias"] = torch.tensor([0.0, bad])
    with pytest.raises(NonFiniteUpdateError, match=r"not finite in 1 of 41 parameters, first 'classifier\.bias'"):
        read_snapshot(written(tmp_path, **given))


@pytest.mark.parametrize("tensors", [{"x/inputs/input_ids": torch.zeros(1)}, {"0/inputs/labels": torch.zeros(1)}])
def test_a_truth_that_is_none_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """Also with a digest that fits."""
    folder = written(tmp_path)
    save_file(tensors, folder / TRUTH)
    edit_manifest(folder, lambda raw: raw["digests"].update({TRUTH: digest_of(folder / TRUTH)}))
    with pytest.raises(SnapshotDamagedError, match=r"truth\.safetensors.* holds a"):
        read_snapshot(folder)


def test_a_folder_that_cannot_be_written_is_said_to_be_one(tmp_path: Path) -> None:
    """Here the parent is missing; the message says what to do."""
    with pytest.raises(SnapshotError, match=r"cannot write snapshot 000012\.ready .*set `out_dir`"):
        written(tmp_path / "nowhere")


def test_a_file_in_the_way_is_not_written_through(tmp_path: Path) -> None:
    """A link under the temporary name is removed or refused, never followed."""
    target = tmp_path / "elsewhere"
    target.mkdir()
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / "000012.tmp").symlink_to(target)
    with pytest.raises(SnapshotError, match="cannot write snapshot"):
        written(spool)
    assert list(target.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a snapshot is worse than none."""
    real = os.write
    written_bytes = 0

    def full(descriptor: int, data: Any) -> int:
        nonlocal written_bytes
        if written_bytes > 10_000:
            raise OSError(28, os.strerror(28))
        done = real(descriptor, data[:5000])  # a disk that is nearly full takes less than it is given
        written_bytes += done
        return done

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SnapshotError, match="No space left on device; free some space"):
        written(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_is_not_overwritten(tmp_path: Path) -> None:
    """A second one of the same step is an error."""
    written(tmp_path)
    with pytest.raises(SnapshotError, match=r"000012\.ready: a snapshot of that name exists already"):
        written(tmp_path)


def test_sequences_are_read_without_padding() -> None:
    """Left or right of the text."""
    batch = MicroBatch(
        {
            "input_ids": torch.tensor([[2, 7, 3, 0], [0, 2, 8, 3]]),
            "attention_mask": torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]),
        }
    )
    assert Truth((batch,)).sequences() == [(2, 7, 3), (2, 8, 3)]


def test_packed_sequences_are_told_apart_by_their_positions() -> None:
    """Each begins at 0 again; a row without positions is one sequence."""
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    packed = MicroBatch({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1]])})
    assert Truth((packed,)).sequences() == [(5, 6, 7), (8, 9)]
    assert Truth((MicroBatch({"input_ids": ids}),)).sequences() == [(5, 6, 7, 8, 9)]


@pytest.mark.parametrize("labels", [None, torch.tensor([[1, 2], [3, 4]]), torch.tensor([0.5, 0.1])])
def test_labels_that_are_no_classes_are_none(labels: Tensor | None) -> None:
    """Missing, of tokens, or regression targets."""
    inputs = {"input_ids": torch.tensor([[2, 3], [2, 3]])} | ({} if labels is None else {"labels": labels})
    assert Truth((MicroBatch(inputs),)).labels() is None


def test_a_defence_narrows_what_is_seen() -> None:
    """What it withholds is frozen, and it is declared; what is granted is named."""
    seen = tiny.observe([TEXT], [0])
    name = "classifier.bias"
    left = {key: value for key, value in seen.update.items() if key != name}
    under = seen.under(DeclaredDefense(name="x"), left)
    assert name in under.facts.frozen and name not in under.facts.shared
    assert under.facts.defenses == (DeclaredDefense(name="x"),) and seen.facts.defenses == ()
    assert seen.granting(Granted(lengths=(4,))).facts.granted.names() == ("lengths",)
    assert under.digest() != seen.digest()


def test_dropout_rates_name_every_active_dropout() -> None:
    """And none whose rate is 0."""
    assert dropout_rates(tiny.bert().named_modules()) == {}
    rates = dropout_rates(tiny.bert(dropout=0.25).named_modules())
    assert rates["bert.embeddings.dropout"] == 0.25
    assert set(rates.values()) == {0.25}


def _under(seen: Observation, **declared: dict[str, Any]) -> Observation:
    """Return the observation with declared defences; `_` in a name stands for `-`."""
    found = tuple(DeclaredDefense(name=name.replace("_", "-"), parameters=knobs) for name, knobs in declared.items())
    return replace(seen, facts=seen.facts.model_copy(update={"defenses": found}))


def test_declared_noises_add_by_their_squares() -> None:
    """Nothing declared is nothing there."""
    seen = tiny.observe([TEXT], [1])
    assert seen.noise_sigma == 0.0
    assert _under(seen, gaussian_noise={"sigma": 3.0}, laplace_noise={"sigma": 4.0}).noise_sigma == pytest.approx(5.0)


def test_the_noise_of_private_sgd_is_known_from_its_declaration() -> None:
    """Multiplier x bound / expected batch / processes; nothing has to be measured."""
    knobs = {"noise_multiplier": 2.0, "max_grad_norm": 3.0, "expected_batch_size": 4.0, "processes": 5}
    seen = _under(tiny.observe([TEXT], [1]), dp_sgd=knobs)
    assert seen.noise_sigma == pytest.approx(2.0 * 3.0 / 4.0 / 5)
    assert seen.clipping_bound == 3.0 and seen.resized and not seen.zeroed


@pytest.mark.parametrize("name", ["gaussian-noise", "laplace-noise"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_relative_noise_is_read_off_the_noised_update(name: str, scale: float) -> None:
    """As a run declares it that ships it: by its scale alone."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), [TEXT], [1])
    noised = defenses.create(name, {"scale": scale})(step, step.observe(), torch.Generator().manual_seed(0))
    declared = _under(noised, **{name: {"scale": scale}})
    assert declared.noise_sigma == pytest.approx(noised.noise_sigma, rel=0.02)


def test_a_defence_that_nobody_knows_is_never_taken_for_none() -> None:
    """All of the update may be noise, and all of its zeros may have been put there."""
    seen = tiny.observe([TEXT], [1])
    update = torch.cat([tensor.flatten() for tensor in seen.update.values()])
    cases: list[dict[str, dict[str, Any]]] = [
        {"secret_sauce": {}}, {"gaussian_noise": {"noise_multiplier": 1.0}}, {"prune": {"share": 2.0}}
    ]  # fmt: skip
    for declared in cases:
        under = _under(seen, **declared)
        assert under.noise_sigma == pytest.approx(float(update.square().mean().sqrt()), rel=1e-5)
        assert under.zeroed and under.resized


def test_what_zeroes_and_what_resizes_is_said() -> None:
    """Pruning zeroes; signs have no length; freezing does neither."""
    seen = tiny.observe([TEXT], [1], max_grad_norm=7.0)
    assert (seen.zeroed, seen.resized, seen.clipping_bound) == (False, False, 7.0)
    assert _under(seen, prune={"share": 0.5}).zeroed and not _under(seen, prune={"share": 0.5}).resized
    assert _under(seen, sign={}).resized and not _under(seen, sign={}).zeroed
    frozen = _under(seen, freeze_embeddings={})
    assert not frozen.resized and not frozen.zeroed and frozen.noise_sigma == 0.0
