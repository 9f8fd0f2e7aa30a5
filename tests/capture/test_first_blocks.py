"""Of a large step, what attacks on the first blocks read is computed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.audit.stamp import PARTS_VERIFIED, stamp_of
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.observing import forward_hooks
from leakaudit.capture.recording import recorder_setup
from leakaudit.client.first_blocks_step import FirstBlocksStep
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch
from leakaudit.models.first_blocks import BOUNDARY, first_parts
from leakaudit.models.recipe import ModelRecipe
from leakaudit.results.schema import Verification, VerificationStatus
from leakaudit.storage.snapshots import read_snapshot
from tests.support import tiny
from tests.support.deep import MODELS

SENTENCES = ("the old dog chased a small blue fish near the river", "a small dog near the old river")
FLOAT32 = 1e-5
BF16 = 3e-2

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_setup, "KEEP_ALL_BYTES", 0)


def of_model(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def with_embeddings(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Compute a loss that also reads the hidden states before the first block."""
    made = model(**batch, output_hidden_states=True)
    loss: Tensor = made.loss + 0.1 * made.hidden_states[0].pow(2).mean() + 0.1 * made.hidden_states[1].pow(2).mean()
    return loss


def in_bfloat16(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return of_model(model, batch)


def twice(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Compute two passes over one batch in one backward pass, as R-Drop does."""
    return of_model(model, batch) + 0.5 * of_model(model, batch)


def train(folder: Path | None, model: nn.Module, loss_of: Loss = of_model, clip: float = 0.0) -> list[Tensor]:
    """Train one step of two micro-batches; return the weights after it."""
    model.train()
    encoder = isinstance(model, tiny.hf.BertForSequenceClassification)
    tokenizer = tiny.bert_tokenizer() if encoder else tiny.gpt2_tokenizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"out_dir": folder, "every_n_steps": 9, "schedule": "deferred", "at_end": "leave", "attacks": ["span"]}
    audit = None if folder is None else watch(model, optimizer, tokenizer=tokenizer, config=settings)
    if audit is not None:
        audit.__enter__()
    torch.manual_seed(3)
    for sentence in SENTENCES:
        words = dict(tokenizer([sentence], return_tensors="pt"))
        batch = {**words, "labels": torch.tensor([1]) if encoder else words["input_ids"]}
        (loss_of(model, batch) / len(SENTENCES)).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    if audit is not None:
        audit.__exit__(None, None, None)
    return [p.detach().clone() for p in model.parameters()]


def kept(folder: Path) -> Snapshot:
    (path,) = (folder / "spool").glob("*.ready")
    return read_snapshot(path)


def judged(found: Snapshot) -> Verification:
    return stamp_of(found, ClientStep.of(found))


def with_passes(found: Snapshot, change: Callable[[int, MicroBatch], MicroBatch]) -> Snapshot:
    """Return a snapshot whose micro-batches are changed."""
    batches = tuple(change(number, batch) for number, batch in enumerate(found.truth.micro_batches))
    return replace(found, truth=replace(found.truth, micro_batches=batches))


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_the_first_blocks_are_verified_and_training_is_the_same(
    tmp_path: Path, kind: str, reentrant: bool | None
) -> None:
    """With dropout, accumulation, and both kinds of gradient checkpointing."""

    def model() -> nn.Module:
        made: Any = MODELS[kind]()
        if reentrant is not None:
            made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return made  # type: ignore[no-any-return]

    ours, plain = train(tmp_path, model()), train(None, model())
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    found = kept(tmp_path)
    stamp = judged(found)
    assert (stamp.status, stamp.note) == (VerificationStatus.VERIFIED, PARTS_VERIFIED)
    assert stamp.relative_error is not None and stamp.relative_error < FLOAT32
    parts = first_parts(model(), ModelRecipe.of(model()))
    assert parts is not None
    step = FirstBlocksStep(**vars(ClientStep.of(found)), kept=frozenset(found.observation.update))
    compared = set(step.update())
    blocks = parts.boundary[0].rpartition(".")[0]
    inside = {name for name in parts.updates if name.startswith(blocks)}
    assert inside <= compared <= set(found.observation.update)
    assert {name.removeprefix(f"{blocks}.").partition(".")[0] for name in inside} == {"0", "1"}
    assert parts.rows is None or parts.rows in compared, "the word embedding's rows are compared"


@pytest.mark.parametrize("kind", MODELS)
def test_a_wrong_batch_is_a_mismatch(tmp_path: Path, kind: str) -> None:
    """One other word, in one of two micro-batches."""
    train(tmp_path, MODELS[kind]())

    def other_word(number: int, batch: MicroBatch) -> MicroBatch:
        ids = batch.inputs["input_ids"].clone()
        ids[0, 3] = ids[0, 5]
        return replace(batch, inputs={**batch.inputs, "input_ids": ids}) if number else batch

    assert judged(with_passes(kept(tmp_path), other_word)).status is VerificationStatus.MISMATCH


def test_a_step_whose_boundary_is_not_recorded_everywhere_is_unverifiable(tmp_path: Path) -> None:
    """In no pass, as in earlier snapshots, or in one of two passes."""
    train(tmp_path, MODELS["gpt2"]())
    for passes in ({0, 1}, {1}):

        def without(number: int, batch: MicroBatch, gone: set[int] = passes) -> MicroBatch:
            left = {path: g for path, g in batch.output_gradients.items() if not path.startswith(BOUNDARY)}
            return replace(batch, output_gradients=left) if number in gone else batch

        stamp = judged(with_passes(kept(tmp_path), without))
        assert stamp.status is VerificationStatus.UNVERIFIABLE and "`keep: all`" in stamp.note


def test_too_large_gradients_at_the_boundary_leave_the_step_unverifiable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is kept all the same, without them."""
    monkeypatch.setattr(forward_hooks, "MOST_BYTES", 100)
    monkeypatch.setattr(forward_hooks, "MOST_BYTES_BESIDE_LOSS", 0)
    train(tmp_path, MODELS["gpt2"]())
    stamp = judged(kept(tmp_path))
    assert stamp.status is VerificationStatus.UNVERIFIABLE and "sketch" in stamp.note


def _patch(block: Any) -> None:
    """Let a block compute something else than its class."""
    forward = block.forward
    block.forward = lambda *args, **kwargs: 1.5 * forward(*args, **kwargs)


def test_a_patched_first_block_is_not_verified(tmp_path: Path) -> None:
    """The rebuilt block computes something else."""
    model = MODELS["llama"]()
    _patch(model.model.layers[0])
    train(tmp_path, model)
    stamp = judged(kept(tmp_path))
    assert stamp.status is VerificationStatus.UNVERIFIABLE
    assert "model.layers.0" in stamp.note and PARTS_VERIFIED not in stamp.note


def test_a_patched_later_block_does_not_matter(tmp_path: Path) -> None:
    """Its part is in the recorded gradients."""
    model = MODELS["llama"]()
    _patch(model.model.layers[3])
    train(tmp_path, model)
    assert judged(kept(tmp_path)).status is VerificationStatus.VERIFIED


@pytest.mark.parametrize("kind", MODELS)
def test_a_loss_of_the_loop_that_reads_early_hidden_states_is_verified(tmp_path: Path, kind: str) -> None:
    """What such a loss sends to the embeddings comes through no boundary."""
    train(tmp_path, MODELS[kind](), with_embeddings)
    assert judged(kept(tmp_path)).status is VerificationStatus.VERIFIED


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_in_mixed_precision_is_verified(tmp_path: Path, kind: str) -> None:
    """The replay runs under the autocast of the client."""
    train(tmp_path, MODELS[kind](), in_bfloat16)
    stamp = judged(kept(tmp_path))
    assert stamp.status is VerificationStatus.VERIFIED and (stamp.relative_error or 0.0) < BF16


@pytest.mark.parametrize(("reentrant", "status"), [(False, "verified"), (True, "unverifiable")])
def test_two_passes_of_one_backward_pass_are_told_apart_or_not_judged(
    tmp_path: Path, reentrant: bool, status: str
) -> None:
    """A reentrant checkpoint does not say which pass it computes again."""
    model = MODELS["gpt2"]()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    train(tmp_path, model, twice)
    assert judged(kept(tmp_path)).status == status


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gradient_behind_a_checkpoint_counts_once_for_the_backward_pass_around_it(reentrant: bool) -> None:
    """A reentrant checkpoint runs backward passes of its own."""

    def recorded(model: Any) -> forward_hooks.ForwardPass:
        passes: list[forward_hooks.ForwardPass] = []
        raised: list[Exception] = []
        hooks = forward_hooks.ForwardHooks(model, passes.append, lambda _seen, _number: None, raised.append)
        hooks.watch_inside({"boundary/attention": model.transformer.h[1].attn})
        hooks.open()
        ids = torch.tensor([[3, 4, 5, 6]])
        model.train()
        torch.manual_seed(0)
        model(input_ids=ids, labels=ids).loss.backward()
        hooks.close()
        assert not raised
        return passes[0]

    checkpointed = MODELS["gpt2"]()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours, plain = recorded(checkpointed), recorded(MODELS["gpt2"]())
    assert len(ours.backwards) == len(plain.backwards) == 1
    assert torch.allclose(ours.output_gradients["boundary/attention"], plain.output_gradients["boundary/attention"])


def test_a_clipped_step_is_verified_up_to_the_factor_of_clipping(tmp_path: Path) -> None:
    """The norm of the whole update is not known."""
    train(tmp_path, MODELS["bert"](), clip=0.01)
    stamp = judged(kept(tmp_path))
    assert stamp.status is VerificationStatus.SCALED and stamp.scale is not None and stamp.scale < 1
    assert stamp.note.startswith(PARTS_VERIFIED)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch.compile
def test_nothing_is_hooked_in_a_compiled_model(tmp_path: Path) -> None:
    """A hook would be compiled into it."""
    model = MODELS["llama"]()
    model.model.layers[1].compile(backend="eager")
    train(tmp_path, model)
    found = kept(tmp_path)
    assert not any(path.startswith(BOUNDARY) for batch in found.truth.micro_batches for path in batch.output_gradients)
    assert judged(found).status is VerificationStatus.UNVERIFIABLE
