"""How much faster attacks are on a GPU than on one core.

The model is an encoder of 22 million parameters.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leakaudit.callbacks.torch_loop import watch
from tests.benchmarks.capture import SHAPES
from tests.gpu.families import CPU, timed
from tests.gpu.record import DEVICE, MEASURED, SEED
from tests.support import tiny
from tests.support.tiny_trainer import audit_config, kept, without_side_process

pytestmark = pytest.mark.gpu

TOKENS, BATCH = 16, 4
WORDS = 30522
"""Vocabulary of BERT."""

TIMED = {
    "span": {},
    "rare-rows": {},
    "llg": {},
    "embedding-rows": {},
    "lamp-cos": {"preset": "fast", "steps": 20, "restarts": 1, "n_init": 2},
}
"""Attack -> options. The search of `lamp-cos` is cut to a number of steps, so that both devices do the same work."""

MOST_S = 30.0
"""Budget of an attack on one device, in seconds. Our choice: three attacks on two devices fit the time of all tests."""


@pytest.mark.parametrize("attack", TIMED)
def test_an_attack_finds_the_same_on_a_gpu_and_on_one_core(attack: str, tmp_path: Path) -> None:
    """Seconds and memory are printed; a search that is cut may find less."""
    torch.manual_seed(SEED)
    config = tiny.hf.BertConfig(num_labels=4, vocab_size=WORDS, **SHAPES["22M"])
    model = tiny.hf.BertForSequenceClassification(config).to(DEVICE).eval()
    ids = torch.randint(1000, WORDS, (BATCH, TOKENS), device=DEVICE)  # (B, T)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    with without_side_process(), watched:
        labels = torch.arange(BATCH, device=DEVICE) % 4
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss.backward()
        optimizer.step()
    (snapshot,) = kept(watched).values()
    seconds, found, memory = [], [], 0.0
    for place in (torch.device(DEVICE), CPU):
        done = timed(attack, TIMED[attack], snapshot, place, MOST_S, warm_s=5.0)
        seconds.append(done.seconds)
        memory = max(memory, done.gigabytes)
        texts = {tuple(sequence.token_ids) for sequence in done.guess.sequences or ()}
        right = sum(text in texts for text in snapshot.truth.sequences())
        found.append((right, tuple(sorted(done.guess.tokens or ()))))
    assert attack == "lamp-cos" or found[0] == found[1]
    times = (
        "cut by its budget" if max(seconds) > MOST_S - 1 else f"{seconds[1] / max(seconds[0], 1e-6):.0f} times as fast"
    )
    MEASURED.notes.append(
        f"`{attack}` on an encoder of 22 M parameters, B = {BATCH}, T = {TOKENS}, n = 1: {seconds[0]:.2f} s on the GPU, {seconds[1]:.2f} s on one "
        f"core ({times}); texts found {found[0][0]} / {found[1][0]} of {BATCH}; at most {memory:.2f} GB on the GPU."
    )
