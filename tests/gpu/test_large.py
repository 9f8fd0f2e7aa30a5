"""What a kept step of a large decoder costs on a GPU, and what is read from it."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from leakaudit.audit.stamp import stamp_of
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.recording import recorder_setup
from leakaudit.client.step import ClientStep
from leakaudit.results.schema import VerificationStatus
from leakaudit.storage.disk_use import size_of
from tests.benchmarks.capture import LARGE
from tests.gpu.families import CPU, moved, timed
from tests.gpu.record import DEVICE, MEASURED, SEED
from tests.support import tiny
from tests.support.tiny_trainer import audit_config, kept, without_side_process

pytestmark = pytest.mark.gpu

SMALL = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512,
    "vocab_size": 4000,
}  # fmt: skip
"""Shape on a CPU, where the test is only tried out."""

BATCH, TOKENS, STEPS, EVERY = 4, 24, 9, 4
"""Texts of a step, tokens of a text, steps of the training, and of how many one is kept."""

MOST_S = 25.0
"""Budget of the attack on one device, in seconds. Our choice: the test fits the time of all tests."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_a_large_decoder_is_kept_in_part_verified_and_read(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step that is kept holds the first blocks only, and every text comes back."""
    if DEVICE == "cpu":
        monkeypatch.setattr(recorder_setup, "KEEP_ALL_BYTES", 0)
    torch.manual_seed(SEED)
    shape = SMALL if DEVICE == "cpu" else LARGE
    kind = getattr(torch, dtype)
    with torch.device(DEVICE):
        model: Any = tiny.hf.LlamaForCausalLM(tiny.hf.LlamaConfig(**shape)).to(kind).train()
    ids = torch.randint(100, shape["vocab_size"], (BATCH, TOKENS), device=DEVICE)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    config = audit_config(tmp_path, every_n_steps=EVERY, max_snapshots=STEPS)
    times: dict[bool, list[float]] = {True: [], False: []}
    watched = watch(model, optimizer, tokenizer=tiny.gpt2_tokenizer(), config=config)
    with without_side_process(), watched:
        for step in range(STEPS):
            _wait()
            start = time.perf_counter()
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            _wait()
            if step:  # the first one loads kernels
                times[step % EVERY == 0].append(time.perf_counter() - start)
    snapshots = kept(watched)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    each = max(size_of(path) for path in (tmp_path / "audit" / "taken").iterdir())
    parameters = sum(p.numel() for p in model.parameters())
    del model, optimizer
    snapshot = snapshots[max(snapshots)]
    there = moved(snapshot, torch.device(DEVICE))
    stamp = stamp_of(there, ClientStep.of(there))
    assert stamp.status is VerificationStatus.VERIFIED, stamp.note
    seconds, found, memory = [], [], 0.0
    for place in (torch.device(DEVICE), CPU):
        done = timed("span", {}, snapshot, place, MOST_S)
        seconds.append(done.seconds)
        memory = max(memory, done.gigabytes)
        texts = {tuple(sequence.token_ids) for sequence in done.guess.sequences or ()}
        # A decoder's last token is only predicted, so nothing that is kept depends on it.
        found.append(sum(bool({text, text[:-1]} & texts) for text in snapshot.truth.sequences()))
    MEASURED.notes.append(
        f"A decoder of {parameters / 1e9:.2f} B parameters in {dtype}, all trained, B = {BATCH}, T = {TOKENS}, `keep: auto`, "
        f"{len(snapshots)} kept steps: a step takes {1e3 * median(times[False]):.0f} ms and a kept one "
        f"{1e3 * median(times[True]):.0f} ms (medians); the largest snapshot has {each / 1e6:.0f} MB, {each / whole:.1%} of the weights; "
        f"verified on the GPU (relative error {stamp.relative_error or 0.0:.0e}); `span` in {seconds[0]:.1f} s on the GPU with at most "
        f"{memory:.1f} GB, in {seconds[1]:.1f} s on one core (budget {MOST_S:.0f} s), texts found but for the last token {found[0]} / {found[1]} of {BATCH}."
    )
    assert dtype != "float32" or found[0] == BATCH


def _wait() -> None:
    if DEVICE != "cpu":
        torch.cuda.synchronize()
