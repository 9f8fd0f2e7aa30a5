"""Every attack on models of every floating-point type."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.algorithms.precision import in_single_precision
from leakaudit.attacks.lamp_cos import LampCos
from leakaudit.audit.active_server import WidePooler, on_active_server
from leakaudit.client.batches import make_batch
from leakaudit.client.facts import Granted
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.errors import AnatomyError
from leakaudit.models.array_classifier import save_auxiliary
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attacks
from tests.support import tiny

TEXT = "the old dog chased a cat."
SHORT = "birds saw the river"

DTYPES = (torch.float16, torch.bfloat16, torch.float64)


def _facts(dtype: torch.dtype) -> dict[str, Any]:
    """Return what the callbacks declare about a model's precision."""
    return {"dtype": str(dtype).removeprefix("torch.")}


def _step(dtype: torch.dtype, texts: list[str], labels: list[int], model: Any = None) -> ClientStep:
    victim = (model or tiny.bert(num_labels=3, initializer_range=0.1)).to(dtype)
    return tiny.client_step(victim, tiny.bert_tokenizer(), texts, labels, batch_size_bound=len(texts), **_facts(dtype))


def _one(dtype: torch.dtype) -> ClientStep:
    return _step(dtype, [TEXT], [1])


def _two(dtype: torch.dtype) -> ClientStep:
    return _step(dtype, [TEXT, SHORT], [1, 2])


def _wide(dtype: torch.dtype) -> ClientStep:
    return _step(dtype, [TEXT], [1], tiny.wide_bert())


def _decoder(dtype: torch.dtype) -> ClientStep:
    victim = tiny.gpt2_classifier().to(dtype)
    return tiny.client_step(victim, tiny.gpt2_tokenizer(), [TEXT], [1], batch_size_bound=1, **_facts(dtype))


def _language(dtype: torch.dtype) -> ClientStep:
    return tiny.client_step(tiny.gpt2_lm().to(dtype), tiny.gpt2_tokenizer(), [TEXT], task="causal-lm", **_facts(dtype))


def _untied(dtype: torch.dtype) -> ClientStep:
    victim = tiny.gpt2_lm(tied=False).to(dtype)
    return tiny.client_step(victim, tiny.gpt2_tokenizer(), [TEXT], task="causal-lm", **_facts(dtype))


def _active(dtype: torch.dtype) -> ClientStep:
    return on_active_server(_one(dtype), WidePooler(width=2000, dimension=24))


STEPS: tuple[Callable[[torch.dtype], ClientStep], ...] = (_two, _wide, _decoder, _language, _untied)


@pytest.fixture
def auxiliary(tmp_path: Path) -> Path:
    """Return labelled texts for the attacks that are granted some."""
    batch = make_batch(tiny.bert_tokenizer(), [TEXT, SHORT, "a fish"], [0, 1, 2], "classification", tiny.POSITIONS)
    inputs = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
    save_auxiliary(tmp_path / "auxiliary", inputs, batch.inputs["labels"])
    return tmp_path / "auxiliary"


def _ticking(checks: int) -> Budget:
    """Return a budget that is spent after so many looks at the clock."""
    ticks = count()
    return Budget(checks, clock=lambda: float(next(ticks)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "kind"), list(attacks))
def test_no_attack_fails_on_a_model_of_any_precision(name: str, kind: Any, dtype: torch.dtype, auxiliary: Path) -> None:
    """It returns a guess, or says in a sentence why it does not apply."""
    attack = kind(auxiliary=auxiliary) if "auxiliary" in kind.__dataclass_fields__ else kind()
    applied = 0
    refusals: list[str] = []
    for make in (*STEPS, _active):
        if applied and make is _active:  # the slowest one is for the attack that needs it
            continue
        seen = make(dtype).observe()
        verdict = attack.applies(seen)
        if not verdict:
            assert verdict.reason
            continue
        try:
            guess = attack(seen, torch.Generator().manual_seed(0), _ticking(10))
        except AnatomyError as error:  # what an audit reports as not applicable
            refusals.append(str(error))
            continue
        applied += 1
        assert guess.stop in ("done", "converged", "budget")
        assert {parameter.dtype for parameter in seen.model.parameters()} == {dtype}
    assert all(refusals)
    assert applied, f"{name} applied to nothing at {dtype}, so this test says nothing of it"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sentence_comes_back_from_a_model_of_any_precision(dtype: torch.dtype) -> None:
    """Candidates' gradients are those of the model's own weights."""
    seen = _step(dtype, [SHORT], [1]).observe().granting(Granted(labels=(1,), lengths=(7,)))
    guess = LampCos(steps=150, n_init=10, n_permutations=0, length_weight=0.01)(
        seen, torch.Generator().manual_seed(0), Budget(600)
    )
    expected = tuple(tiny.bert_tokenizer()(SHORT)["input_ids"])
    assert [each.token_ids for each in guess.sequences or ()] == [expected]


def test_a_model_in_single_precision_is_taken_as_it_is() -> None:
    """Others are copied; their weights are the same numbers, and the original stays."""
    single, double = (_one(dtype).observe() for dtype in (torch.float32, torch.float64))
    assert in_single_precision(single) is single
    copied = in_single_precision(double)
    assert {parameter.dtype for parameter in copied.model.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in double.model.parameters()} == {torch.float64}
    for (name, one), (other_name, other) in zip(
        single.model.named_parameters(), copied.model.named_parameters(), strict=True
    ):
        assert name == other_name and torch.equal(one, other)


def test_tied_weights_stay_tied_in_single_precision() -> None:
    """A language model's head is its word embedding, before and after."""
    copied: Any = in_single_precision(_language(torch.float16).observe()).model
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight


def _observations() -> list[Observation]:
    return [make(torch.float32).observe() for make in (*STEPS, _active)]


def test_the_steps_of_this_file_differ_in_what_attacks_find() -> None:
    """One or two texts, a decoder, a language model, an active server."""
    seen = _observations()
    assert len({each.facts.task for each in seen}) == 2
    assert [each.facts.server is not None for each in seen] == [False] * 5 + [True]
