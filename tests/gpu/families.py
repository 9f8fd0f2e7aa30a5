"""Small models of several families, trained with an audit on a device."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.audit.attempt import readable
from leakaudit.audit.verification import verify
from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.models.lora import add_lora
from leakaudit.plugins import Reconstruction
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attacks
from leakaudit.results.schema import Verification, VerificationStatus
from tests.gpu.record import MEASURED, SEED, FamilyRow
from tests.support import tiny
from tests.support.tiny_trainer import audit_config, kept, without_side_process

CPU = torch.device("cpu")
TEXTS = (
    "the old dog chased a cat .",
    "one horse ate .",
    "never liked a fish .",
    "always a horse on the road .",
    "the new blue house under a big tree .",
    "three red fish near a river !",
)
"""Short texts: two of them have fewer tokens than the hidden size, so that `span` can find both."""

BUDGET_S = 10.0
"""Most seconds of an attack. Our choice: float32 steps take it less than one; with rounded updates `span` may search for a minute."""

READ_TEXTS = {"span", "rare-rows"}
"""Attacks that read whole texts; each may find every text."""

WORDS = len(tiny.VOCABULARY)
SPECIAL = {"pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 3}


@dataclass(frozen=True)
class Family:
    """A kind of model, and what is expected of attacks on it."""

    model: Callable[[], nn.Module]
    """Makes it on the CPU, in training mode, without dropout, with the same weights every time."""
    tokenizer: Callable[[], Any] = tiny.gpt2_tokenizer
    classes: int = 0
    """C; 0 for a language model."""
    attacks: tuple[str, ...] = ("span",)
    """Those whose guesses are compared on both devices."""


def bert(dropout: float = 0.0) -> nn.Module:
    return tiny.wide_bert(dropout).train()


def gpt2() -> nn.Module:
    return _seeded(lambda: tiny.hf.GPT2LMHeadModel(_gpt2_config()))


def _gpt2_config() -> Any:
    return tiny.hf.GPT2Config(
        vocab_size=WORDS,
        n_embd=tiny.WIDE,
        n_layer=2,
        n_head=2,
        n_positions=tiny.POSITIONS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
        **SPECIAL,
    )


def llama() -> nn.Module:
    config = tiny.hf.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=tiny.WIDE,
        intermediate_size=2 * tiny.WIDE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tiny.POSITIONS,
        initializer_range=0.2,
        **SPECIAL,
    )
    return _seeded(lambda: tiny.hf.LlamaForCausalLM(config))


def lora() -> nn.Module:
    """Return a Llama whose adapters were trained a little; only they are trained."""

    def adapted() -> nn.Module:
        model = llama()
        add_lora(model, 16, ("q_proj", "k_proj", "v_proj", "o_proj"))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in name)
            if ".lora_B." in name:
                nn.init.normal_(parameter, std=0.02)
        return model

    return _seeded(adapted)


def t5() -> nn.Module:
    config = tiny.hf.T5Config(
        vocab_size=WORDS,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=3,
        decoder_start_token_id=0,
    )
    return _seeded(lambda: tiny.hf.T5ForConditionalGeneration(config))


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft reads a name that transformers will remove
        torch.manual_seed(SEED)
        return make().train()


FAMILIES: Mapping[str, Family] = {
    "BERT, classes": Family(bert, tiny.bert_tokenizer, classes=3, attacks=("span", "rare-rows", "llg")),
    "GPT-2": Family(gpt2),
    "Llama": Family(llama, attacks=("span", "embedding-rows")),
    "Llama, LoRA": Family(lora),
    "T5": Family(t5, attacks=()),
}
"""Name -> family. No attack applies to a T5 with one table of words."""

PRECISIONS = ("float32", "tf32", "bf16")


# ---------------------------------------------------------------------- training


@dataclass(frozen=True)
class Trained:
    """What one training left, on the CPU."""

    given: list[dict[str, Tensor]]
    """What the optimizer got in each step, by parameter name."""
    end: dict[str, Tensor]
    """Weights and states of generators."""
    snapshots: dict[int, Snapshot]
    """By step; empty without an audit."""


def batches(family: Family, steps: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches of two texts; the pairs and classes change from step to step."""
    tokenizer = family.tokenizer()
    for step in range(steps):
        pair = [TEXTS[step % len(TEXTS)], TEXTS[(step + 1 + step // len(TEXTS) % (len(TEXTS) - 1)) % len(TEXTS)]]
        found = dict(tokenizer(pair, padding=True, return_tensors="pt"))
        if family.classes:
            found["labels"] = torch.tensor([step % family.classes, (step + 1) % family.classes])
        else:
            found.pop("token_type_ids", None)
            found["labels"] = found["input_ids"].masked_fill(found["attention_mask"] == 0, -100)
        yield found


def train(family: Family, precision: str, device: str, steps: int, folder: Path | None) -> Trained:
    """Train with plain SGD; with a folder every step is audited and kept."""
    torch.manual_seed(SEED)
    model = family.model().to(device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    kind = torch.device(device).type
    given: list[dict[str, Tensor]] = []
    config = None if folder is None else audit_config(folder, max_snapshots=steps)
    audit = None if config is None else watch(model, optimizer, tokenizer=family.tokenizer(), config=config)
    with without_side_process(), products(precision), audit or contextlib.nullcontext():
        for batch in batches(family, steps):
            inputs = {name: value.to(device) for name, value in batch.items()}
            with torch.autocast(kind, torch.bfloat16, enabled=precision == "bf16"):
                loss = model(**inputs).loss
            loss.backward()
            given.append({n: p.grad.detach().cpu().clone() for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    end = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    end["generator of the CPU"] = torch.get_rng_state()
    if kind == "cuda":
        end["generator of the GPU"] = torch.cuda.get_rng_state(device)
    return Trained(given, end, {} if audit is None else kept(audit))


@contextlib.contextmanager
def products(precision: str) -> Iterator[None]:
    """Let products of float32 matrices use TF32 within the block, or not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---------------------------------------------------------------------- comparison


def off(trained: Trained) -> list[str]:
    """Return the steps and parameters whose kept update is not what the optimizer got."""
    found = []
    for step, given in enumerate(trained.given):
        if step not in trained.snapshots:
            found.append(f"step {step} was not kept")
            continue
        update = trained.snapshots[step].observation.update
        names = set(given) ^ set(update)
        names |= {n for n in set(given) & set(update) if not torch.equal(update[n].to(given[n].dtype), given[n])}
        found += [f"step {step}: {name}" for name in sorted(names)]
    return found


def stamped(snapshot: Snapshot, device: torch.device) -> Verification:
    """Compute a step again on a device, as a side process there does."""
    snapshot = moved(snapshot, device)
    return verify(ClientStep.of(snapshot), snapshot.observation.update)


def moved(snapshot: Snapshot, device: torch.device) -> Snapshot:
    """Return a snapshot on a device; the model is moved in place."""
    return replace(snapshot, observation=snapshot.observation.to(device), truth=snapshot.truth.to(device))


@dataclass(frozen=True)
class Guess:
    """What one attack guessed of one step."""

    texts: frozenset[tuple[int, ...]]
    """True texts among its guesses."""
    words: tuple[int, ...]
    """True words among those that it guessed."""
    wrong: int
    """Number of other words that it guessed."""
    counts: tuple[int, ...] | None
    seconds: float


def attacked(name: str, snapshot: Snapshot, device: torch.device) -> Guess:
    """Attack a step on a device.

    Raises:
        AssertionError: the attack does not apply.
    """
    seen = moved(snapshot, device).observation
    attack = attacks.create(name, {})
    read, fits = readable(attack, seen)
    assert fits, fits.reason
    start = time.perf_counter()
    found = attack(read, torch.Generator().manual_seed(SEED), Budget(BUDGET_S))
    guesses = {tuple(guess.token_ids) for guess in found.sequences or ()}
    texts = snapshot.truth.sequences()
    # An attack that proves its sentences complete names no further words, and rounding decides whether it can.
    words = {*(found.tokens or ()), *(word for text in found.sequences or () for word in text.token_ids)}
    true = words & {word for text in texts for word in text}
    return Guess(
        frozenset(text for text in texts if text in guesses),
        tuple(sorted(true)),
        len(words - true),
        found.label_counts,
        time.perf_counter() - start,
    )


@dataclass(frozen=True)
class Timed:
    """An attack on a whole device, or on one core of a CPU."""

    guess: Reconstruction
    seconds: float
    gigabytes: float
    """Most memory on the GPU, in units of 10^9 bytes; 0 on a CPU."""


def timed(
    name: str,
    options: Mapping[str, Any],
    snapshot: Snapshot,
    device: torch.device,
    budget_s: float,
    warm_s: float = 0.0,
) -> Timed:
    """Attack a step on a GPU or on one core, and measure it.

    Args:
        name: of the attack.
        options: of the attack.
        snapshot: the step.
        device: the GPU or the CPU.
        budget_s: most seconds of the attack.
        warm_s: seconds of an attempt before it on a GPU, which loads kernels.

    Raises:
        AssertionError: the attack does not apply.
    """
    seen = moved(snapshot, device).observation
    attack = attacks.create(name, dict(options))
    read, fits = readable(attack, seen)
    assert fits, fits.reason
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        if warm_s:
            attack(read, torch.Generator().manual_seed(SEED), Budget(warm_s))
        torch.cuda.reset_peak_memory_stats()
    try:
        start = time.perf_counter()
        guess = attack(read, torch.Generator().manual_seed(SEED), Budget(budget_s))
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    finally:
        torch.set_num_threads(threads)
    memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return Timed(guess, seconds, memory)


def measured(name: str, precision: str, trained: Trained, device: str, attacked_steps: list[int]) -> FamilyRow:
    """Verify every kept step and attack some, on a device and on the CPU.

    Raises:
        AssertionError: a step is not verified on the device, or not on the CPU though it computes as the device does, or is a mismatch;
            or attacks on a float32 step find different things.
    """
    family, places = FAMILIES[name], (torch.device(device), CPU)
    stamps = [[stamped(snapshot, place) for snapshot in trained.snapshots.values()] for place in places]
    guesses = [
        [attacked(attack, trained.snapshots[step], place) for step in attacked_steps for attack in family.attacks]
        for place in places
    ]
    verified = [sum(stamp.status is VerificationStatus.VERIFIED for stamp in row) for row in stamps]
    texts = len(READ_TEXTS & set(family.attacks)) * sum(
        len(trained.snapshots[step].truth.sequences()) for step in attacked_steps
    )
    found = [sum(len(guess.texts) for guess in row) for row in guesses]
    notes = sorted({stamp.note for row in stamps for stamp in row if stamp.status is not VerificationStatus.VERIFIED})
    wanted = [
        len(trained.snapshots),
        verified[1] if precision == "tf32" else len(trained.snapshots),
    ]  # a CPU has no TF32
    mismatched = any(stamp.status is VerificationStatus.MISMATCH for row in stamps for stamp in row)
    assert verified == wanted and not mismatched, f"{name}, {precision}: verified {verified}: {'; '.join(notes)}"
    if precision == "float32":
        both = [[(guess.texts, guess.words, guess.counts) for guess in row] for row in guesses]
        assert both[0] == both[1], (
            f"{name}: {found} of {texts} texts on {device} and on the CPU, or other words or labels: {_unlike(guesses)}"
        )
        wrong = [sum(guess.wrong for guess in row) for row in guesses]
        if wrong[0] != wrong[1]:
            MEASURED.notes.append(f"{name}, {precision}: {wrong[0]} wrong words on the GPU, {wrong[1]} on the CPU.")
        assert found[1] or not texts, f"{name}: no text on the CPU, so the comparison says nothing"
    return FamilyRow(
        family=name,
        precision=precision,
        n=len(trained.snapshots),
        verified=(verified[0], verified[1]),
        error=_pair(max(stamp.relative_error or 0.0 for stamp in row) for row in stamps),
        texts=texts,
        found=(found[0], found[1]),
        seconds=_pair(median([guess.seconds for guess in row] or [0.0]) for row in guesses),
    )


def _unlike(guesses: list[list[Guess]]) -> str:
    """Return how many true words of each guess were found on one device only."""
    pairs = [(set(one.words), set(two.words)) for one, two in zip(*guesses, strict=True)]
    return ", ".join(
        f"{len(one - two)} words on the device only, {len(two - one)} on the CPU only" for one, two in pairs
    )


def _pair(numbers: Iterator[float]) -> tuple[float, float]:
    one, two = numbers
    return one, two
