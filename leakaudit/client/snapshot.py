"""One training step kept for audit: what an eavesdropper saw, and what was really in the batch, held apart.

`Observation` and `Truth` are two types and two files. Attacks are handed the first; the second is for scoring and for
re-simulating defences only.

On disk a snapshot is a folder (0700) of three or four files (0600):

    observed.safetensors    update/<parameter>, weights/<parameter or buffer>
    base.safetensors        weights/<parameter> that training does not move: one file, linked into every snapshot of a run
    truth.safetensors       <micro-batch>/inputs/<name>, rng/<device>, num_items, options/<name>, kept_back/<name>, pulls/<path>, again
    snapshot.json           everything else, with the digests of these files
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from leakaudit.client.sequences import IGNORED_LABEL as IGNORED_LABEL  # noqa: PLC0414  attacks take it from here
from leakaudit.client.sequences import PLAIN, Reading, Text, texts_of, texts_read
from leakaudit.errors import (
    ConfigError,
    ModelError,
    NonFiniteUpdateError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotVersionError,
)
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.models.parts import fill_missing, first_blocks
from leakaudit.models.recipe import ModelRecipe, Vocabulary, build_model
from leakaudit.registry import defenses
from leakaudit.results.schema import Verification
from leakaudit.storage.digests import digest_of
from leakaudit.storage.snapshot_content import MAX_MANIFEST_BYTES, check_manifest, check_size, check_truth, check_update
from leakaudit.storage.snapshot_files import Base, link_base, read_tensors, stored_name, write_tensors, write_text

SCHEMA = "leakaudit.snapshot/1.2"
OBSERVED, TRUTH, MANIFEST = "observed.safetensors", "truth.safetensors", "snapshot.json"
BASE = "base.safetensors"


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DeclaredDefense(_Facts):
    """A defence that the protocol declares, so that an adversary knows it (architecture, honesty rule 5)."""

    name: str
    parameters: dict[str, float | int | str | bool] = {}

    def known(self) -> Any:
        """Return the registered `leakaudit.plugins.defense.Defense` with these knobs; None where there is none that has them.

        A protocol outside this project may declare what no plugin implements. Whoever asks then knows nothing about the update:
        any part of it may be noise, and any of its zeros may have been put there.
        """
        try:
            return defenses.create(self.name, self.parameters)
        except ConfigError:
            return None


class DeclaredServer(_Facts):
    """What an active server changed in the model before it sent it out. It is the adversary, so attacks know it."""

    name: str
    parameters: dict[str, float | int | str | bool] = {}


class Granted(_Facts):
    """What the threat model gives an attack beyond the update; printed with every score."""

    labels: tuple[int, ...] | None = None
    """One class per sequence, in the order of the batch."""
    lengths: tuple[int, ...] | None = None
    """Number of tokens of each sequence, special tokens included, padding excluded, in the order of the batch."""

    def names(self) -> tuple[str, ...]:
        """Return what is granted, by name."""
        return tuple(name for name in ("labels", "lengths") if getattr(self, name) is not None)


class PublicFacts(_Facts):
    """What everybody who takes part in the protocol knows about a client's step."""

    task: Literal["classification", "causal-lm", "masked-lm", "encoder-decoder", "other"]
    num_labels: int | None = None
    training_mode: bool
    """Whether dropout was active."""
    dropout: dict[str, float] = {}
    """Module name -> dropout rate, for every dropout module with a rate above 0."""
    shared: tuple[str, ...]
    """Parameters with a transmitted update."""
    frozen: tuple[str, ...] = ()
    """Parameters without."""
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs of names of one and the same parameter, such as input embedding and language-model head."""
    vocabulary: Vocabulary
    input_shape: tuple[int, ...] | None = None
    """Of one example, where the model classifies arrays; None for text."""
    batch_size_bound: int | None = None
    """Largest batch the protocol allows; the batch size itself is not public."""
    max_grad_norm: float | None = None
    """Clipping bound of the whole update, if the client clips."""
    loss_divisor: float | None = 1.0
    """What the trainer divides each micro-batch's loss by (gradient accumulation); None where it is not one number."""
    own_loss: bool | None = None
    """Whether the loss of the step is the one that the model's class computes, up to a factor; the protocol makes the loss public. None
    where that was not looked at."""
    dtype: str = "float32"
    """Precision in which the client computed the update."""
    view: Literal["local", "reduced", "delta"] = "local"
    """`delta`: (weights before - weights after) / (learning rate * local steps), of plain SGD: the mean of the gradients that
    the client saw on its way, plus what rounding the weights added."""
    local_steps: int = 1
    """K: steps that the client took before it sent its `delta`; the protocol sets them."""
    learning_rate: float | None = None
    """Of these steps."""
    stage: Literal["raw", "clipped", "protected"] = "clipped"
    defenses: tuple[DeclaredDefense, ...] = ()
    granted: Granted = Granted()
    server: DeclaredServer | None = None
    """None for a server that sends the model as it is, as in every recorded run."""

    @property
    def known_defenses(self) -> tuple[Any, ...]:
        """The declared defences as plugins, in the order in which they are applied; None for one that is not registered."""
        return tuple(declared.known() for declared in self.defenses)


@dataclass(frozen=True)
class Observation:
    """What an eavesdropper sees of one client step; never the batch itself."""

    update: Mapping[str, Tensor]
    """Parameter name -> transmitted update, the parameter's shape, float32."""
    model: nn.Module
    """The public model with the weights before the step, in eval mode with eager attention. Attacks leave it unchanged."""
    facts: PublicFacts
    whole: bool = True
    """Whether the model and its update are there as a whole. If not, only the first blocks were kept: what is behind them in `model` has
    other values, and no step can be simulated."""

    @cached_property
    def noise_sigma(self) -> float:
        """Standard deviation of the declared additive noise on every entry, in the update's units; 0 without noise.

        The declared defences know it. Under a declared defence that is not registered it is the root mean square of the whole
        update, which no noise on it can exceed.
        """
        sigma = 0.0
        for defense in self.facts.known_defenses:
            sigma = root_mean_square(self.update) if defense is None else defense.noise(self.update, sigma)
        return float(sigma)

    @cached_property
    def zeroed(self) -> bool:
        """Whether a declared defence may have set entries to zero, so that a zero says nothing about the gradient there.

        True under a declared defence that is not registered.
        """
        return any(defense is None or defense.zeroed for defense in self.facts.known_defenses)

    @cached_property
    def resized(self) -> bool:
        """Whether a declared defence changed the length of the update by an unknown factor: signs, clipping of each example.

        True under a declared defence that is not registered.
        """
        return any(defense is None or defense.resized for defense in self.facts.known_defenses)

    @property
    def clipping_bound(self) -> float | None:
        """Smallest norm to which the protocol clips the update or the gradient of each example; None where it clips neither."""
        bounds = [self.facts.max_grad_norm, *(d.clipping_bound for d in self.facts.known_defenses if d is not None)]
        return min((bound for bound in bounds if bound is not None), default=None)

    def under(self, defense: DeclaredDefense, update: Mapping[str, Tensor]) -> Observation:
        """Return this observation with another update, as a declared defence leaves it."""
        facts = self.facts.model_copy(update={"defenses": (*self.facts.defenses, defense)})
        return replace(self, facts=facts)._sending(update)

    def declaring(self, defenses: tuple[DeclaredDefense, ...]) -> Observation:
        """Return this observation with these declared defences.

        Parameters that one of them withholds are frozen, where a recorder saw zeros; what was sent is seen, whatever is declared.
        """
        seen = replace(self, facts=self.facts.model_copy(update={"defenses": defenses}))
        known = [defense for defense in seen.facts.known_defenses if defense is not None]
        gone = frozenset().union(*(defense.withheld(self.model) for defense in known))
        return seen._sending({name: g for name, g in self.update.items() if name not in gone or bool(g.any())})

    def _sending(self, update: Mapping[str, Tensor]) -> Observation:
        """Return this observation with another update; parameters that have none in it are frozen."""
        gone = [name for name in self.facts.shared if name not in update]
        shared = tuple(name for name in self.facts.shared if name in update)
        facts = self.facts.model_copy(update={"shared": shared, "frozen": (*self.facts.frozen, *gone)})
        return replace(self, update=update, facts=facts)

    def granting(self, granted: Granted) -> Observation:
        """Return this observation with what the threat model grants."""
        return replace(self, facts=self.facts.model_copy(update={"granted": granted}))

    def to(self, device: torch.device) -> Observation:
        """Return this observation on `device`; the model is moved in place."""
        return replace(
            self, update={name: g.to(device) for name, g in self.update.items()}, model=self.model.to(device)
        )

    def digest(self) -> str:
        """Return `sha256:` over names, shapes and values of the update."""
        digest = hashlib.sha256()
        for name in sorted(self.update):
            tensor = self.update[name].detach().to("cpu", torch.float32).contiguous()
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().data)
        return f"sha256:{digest.hexdigest()}"


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of the step."""

    inputs: Mapping[str, Tensor]
    """Keyword arguments of the model's forward as the trainer passed them, labels included; `input_ids` is (B, T), or
    (B, choices, T) for multiple choice."""
    rng: Mapping[str, Tensor] = field(default_factory=dict)
    """Device type -> state of its random generator immediately before the forward pass; empty where it was not kept."""
    num_items: Tensor | None = None
    """The trainer's `num_items_in_batch`, where it passed one."""
    options: Mapping[str, bool | float] = field(default_factory=dict)
    """Plain values that the model's forward was given beside the tensors."""
    kept_back: Mapping[str, Tensor] = field(default_factory=dict)
    """What the trainer had in the batch and kept from the model, such as labels for a loss of its own."""
    pulls: Mapping[str, Tensor] = field(default_factory=dict)
    """Path of an output of the model -> gradient that the client's loss sent there, accumulation and weights included. Where the
    model computes the loss, it is `loss` and one number; empty where it was not kept."""
    again: bool = False
    """A further forward pass over the tokens of another one (R-Drop): part of the step, but not of the batch."""

    @property
    def labels(self) -> Tensor | None:
        """The labels, wherever the trainer kept them; None where they are not known."""
        return self.inputs.get("labels", self.kept_back.get("labels"))

    @property
    def unlabelled(self) -> bool:
        """Whether the trainer had labels, but none for the texts of this pass."""
        kept = self.kept_back.get("labels")
        rows = self.inputs["input_ids"].shape[:-1].numel()
        return "labels" not in self.inputs and kept is not None and len(kept) == 0 and rows > 0


@dataclass(frozen=True)
class Truth:
    """The private batch. Only scoring, verification and defences may see it."""

    micro_batches: tuple[MicroBatch, ...]
    reading: Reading = PLAIN
    """How their tensors are read as texts; public."""

    def texts(self) -> list[Text]:
        """Return every text of the batch.

        Of each micro-batch: those that the model read, then those that its decoder had to write.
        """
        return [text for batch in self._distinct() for text in texts_of(batch.inputs, batch.labels, self.reading)]

    def sequences(self) -> list[tuple[int, ...]]:
        """Return the token ids of every text of the batch without padding.

        Special tokens are included, words that a mask hid are filled in. Of a multiple choice each text is a sequence, and so is each
        target of a decoder.
        """
        return [text.ids for text in self.texts()]

    def examples(self) -> int:
        """Return the number of sequences that the model read.

        A bound on the batch size bounds this number.
        """
        return sum(len(texts_read(batch.inputs, batch.labels, self.reading)) for batch in self._distinct())

    def labels(self) -> list[int] | None:
        """Return the class of every sequence, or None.

        None means that the labels are not one class a sequence.

        A pass over texts for which the trainer had no labels (FixMatch) adds none.
        """
        found: list[int] = []
        known = False
        for batch in self._distinct():
            labels = batch.labels
            if labels is None or labels.dim() != 1 or labels.dtype.is_floating_point:
                return None
            if batch.unlabelled:
                continue
            if len(labels) != len(texts_read(batch.inputs, labels, self.reading)):
                return None  # such as one label for two texts that are compared
            known = True
            found += [int(label) for label in labels if label != IGNORED_LABEL]
        return found if known else None

    def _distinct(self) -> list[MicroBatch]:
        """Return the micro-batches that hold sequences of their own."""
        return [batch for batch in self.micro_batches if not batch.again]

    def to(self, device: torch.device) -> Truth:
        """Return this batch on `device`; random states stay on the CPU, where generators take them from."""

        def move(batch: MicroBatch) -> MicroBatch:
            items = None if batch.num_items is None else batch.num_items.to(device)
            moved: Any = {
                part: {name: value.to(device) for name, value in getattr(batch, part).items()}
                for part in ("inputs", "kept_back", "pulls")
            }
            return replace(batch, **moved, num_items=items)

        return replace(self, micro_batches=tuple(move(batch) for batch in self.micro_batches))


class StepRecipe(_Facts):
    """How the client turned its batch into an update, as far as tensors do not say it."""

    training: bool = True
    loss: Literal["forward", "pulls", "label_smoothing", "unsupported"] = "forward"
    """Where the loss came from: the model's own output, wherever it was as far as its pulls on the model's outputs tell, the
    trainer's label smoother, or code that cannot be replayed."""
    label_smoothing: float = 0.0
    loss_divisor: float = 1.0
    """The trainer divides each micro-batch's loss by this before the backward pass."""
    pass_num_items: bool = False
    """Whether the model's forward was given `num_items_in_batch`."""
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    """Every entry of the update was cut to this size, if at all."""
    autocast: Literal["bf16", "fp16"] | None = None
    loss_scale: float = 1.0
    """Factor that a GradScaler put on the loss and took out of the update, so that small gradients survive in fp16."""
    kept_rng: bool = True
    eval_modules: tuple[str, ...] = ()
    """Modules that the client kept in eval mode while the model as a whole trained."""
    attention: str = ""
    """Implementation of attention in the client's model, as transformers calls it (`sdpa`); empty where it is not known."""
    neftune_alpha: float | None = None
    """Uniform noise of alpha / sqrt(T D) on the word embeddings (NEFTune, Jain et al. 2023, Algorithm 1)."""
    processes: int = 1
    """Processes over whose gradients the update is the mean; the micro-batches are those of all of them."""
    outside: int = 0
    """Parameters that the client trains outside the model that is rebuilt; they are not part of the update here."""
    patched: tuple[str, ...] = ()
    """Parts of the model that had a `forward` or hooks of their own when the step began; a model that is made again has none."""
    note: str = ""


class Provenance(_Facts):
    """Where a snapshot comes from. Nothing of it is private."""

    framework: str
    versions: dict[str, str] = {}
    step: int = 0
    epoch: float | None = None
    total_steps: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    created: str = ""
    copy_seconds: float = 0.0
    check_seconds: float = 0.0
    """What repeating the step in place took of the training process; 0 where it was not repeated."""
    not_in_place: str = ""
    """Why it was not; empty where it was, or where that was not asked for."""
    skipped_before: int = 0
    """Steps that were due since the last snapshot and not recorded: the writer was at work, or the spool was full."""


class KeptParts(_Facts):
    """What is there of a step of which the first blocks were kept only (`keep: auto`)."""

    blocks: int
    """Of the model that is rebuilt; they are the first ones of the client's."""
    parameters: int
    """Of the client's model, in all."""
    rows: str | None = None
    """Parameter whose update is kept as the rows that are not zero."""
    not_kept: tuple[str, ...] = ()
    """Shared parameters of whose update only a sketch was kept (`leakaudit.capture.sketch`)."""


class Manifest(_Facts):
    """`snapshot.json`."""

    schema_: str = Field(default=SCHEMA, alias="schema")
    model: ModelRecipe
    facts: PublicFacts
    recipe: StepRecipe
    provenance: Provenance
    checked: Verification | None = None
    """Stamp of a step that was repeated where it was made; None where the rebuilt model is to check it."""
    digests: dict[str, str] = {}
    """File name -> digest of its bytes, which begins with the algorithm (`leakaudit.storage.digests`); `sha256:` before schema 1.2."""
    encrypted_to: tuple[str, ...] = ()
    """Public keys; empty where the tensors lie there in clear."""
    parts: KeptParts | None = None
    """None where the step was kept as a whole."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def files(self) -> tuple[str, ...]:
        """Return the names of the snapshot's tensor files.

        They are the names before encryption.
        """
        has_base = any(name.startswith(BASE) for name in self.digests)
        return (OBSERVED, TRUTH, BASE) if has_base else (OBSERVED, TRUTH)


@dataclass(frozen=True)
class Snapshot:
    """One step kept for audit."""

    observation: Observation
    truth: Truth
    recipe: StepRecipe
    model_recipe: ModelRecipe
    provenance: Provenance
    checked: Verification | None = None
    """Its stamp, where the step was repeated where it was made."""
    parts: KeptParts | None = None
    """None where the step was kept as a whole."""
    sketches: Mapping[str, Tensor] = field(default_factory=dict)
    """Of the whole update, by parameter name, where only parts of it were kept."""


def reading_of(facts: PublicFacts) -> Reading:
    """Return how the batches of a step with these facts are read as texts."""
    special, after = facts.vocabulary.special, facts.vocabulary.ends_with
    pad = special.get("pad")
    return Reading(task=facts.task, pad=pad, pad_ends_texts=pad is not None and pad in (special.get("eos"), *after))


def root_mean_square(update: Mapping[str, Tensor]) -> float:
    """Return the root mean square of all entries of an update, in its units.

    0 where it has none.
    """
    entries = sum(tensor.numel() for tensor in update.values())
    norms = (float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in update.values())
    return math.hypot(*norms) / math.sqrt(max(1, entries))


def check_finite(update: Mapping[str, Tensor]) -> None:
    """Refuse an update with NaN or infinity.

    Raises:
        NonFiniteUpdateError: names how many parameters are affected and the first of them.
    """
    bad = [name for name, tensor in update.items() if not _is_finite(tensor)]
    if bad:
        raise NonFiniteUpdateError(
            f"the update is not finite in {len(bad)} of {len(update)} parameters, first {bad[0]!r}: "
            "the step overflowed or training diverged, so there is nothing to audit"
        )


def _is_finite(tensor: Tensor) -> bool:
    """Return whether no entry is NaN or infinite.

    `isfinite` would make a copy of the tensor; NaN is its own minimum.
    """
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


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


def tensors_of(truth: Truth) -> dict[str, Tensor]:
    """Return the tensors of a batch by the names that the file `truth.safetensors` gives them."""
    tensors: dict[str, Tensor] = {}
    for index, batch in enumerate(truth.micro_batches):
        for part in ("inputs", "rng", "kept_back", "pulls"):
            values = getattr(batch, part)
            tensors |= {f"{index}/{part}/{name}": value.contiguous() for name, value in values.items()}
        tensors |= {f"{index}/options/{name}": _scalar(value) for name, value in batch.options.items()}
        if batch.num_items is not None:
            tensors[f"{index}/num_items"] = batch.num_items
        if batch.again:
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
        kept_back=_below("kept_back/", mine),
        pulls=_below("pulls/", mine),
        again="again" in mine,
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
        schema = str(parse_json(content)["schema"])
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
        manifest = Manifest.model_validate_json(content.removeprefix(b"\xef\xbb\xbf"), strict=True)
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
        inside = not index.numel() or (0 <= int(index.min()) and int(index.max()) < len(table))
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


def dropout_rates(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, float]:
    """Return module name -> rate for every dropout module whose rate is above 0."""
    kinds = nn.modules.dropout._DropoutNd
    return {name: float(m.p) for name, m in modules if isinstance(m, kinds) and m.p > 0}
