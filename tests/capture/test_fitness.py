"""Unusual parameters are handled or refused before the first step.

They are unused, empty, of integers or without values; a refusal names the parameter.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from leakaudit.audit.worker import run_worker
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.fitness import parameters_without_values
from leakaudit.results.files import load_results
from leakaudit.results.schema import VerificationStatus
from tests.support import stacks, tiny
from tests.support.tiny_trainer import audit_config, kept, stamp, without_side_process

TOKENIZER = tiny.bert_tokenizer()
VALUES = torch.arange(6.0).reshape(2, 3)


def _add(model: Any, value: torch.Tensor, *, trained: bool = True) -> None:
    model.bert.register_parameter("extra", nn.Parameter(value, requires_grad=trained))


def _train(folder: Path, change: Callable[[Any], None], schedule: str = "deferred") -> None:
    model = tiny.bert().train()
    change(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    config = {
        "out_dir": str(folder / "audit"),
        "schedule": schedule,
        "at_end": "leave",
        "attacks": ["embedding-rows", "llg"],
        "controls": 1,
    }
    with watch(model, optimizer, tokenizer=TOKENIZER, config=config):
        model(
            **TOKENIZER(["the old dog chased a cat ."], return_tensors="pt"), labels=torch.tensor([0])
        ).loss.backward()
        optimizer.step()


HARMLESS: dict[str, Callable[[Any], None]] = {
    "unused": lambda model: _add(model, VALUES),
    "unused and frozen": lambda model: _add(model, VALUES, trained=False),
    "empty": lambda model: _add(model, torch.empty(0, 3)),
    "integers": lambda model: _add(model, torch.arange(4), trained=False),
    "truth values": lambda model: _add(model, torch.ones(4, dtype=torch.bool), trained=False),
}


@pytest.mark.parametrize("schedule", ["deferred", "inline"])
@pytest.mark.parametrize("kind", HARMLESS)
def test_a_parameter_that_transmits_nothing_costs_no_result(
    kind: str, schedule: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The step is kept and attacked; another process verifies it as well.

    If another process makes the model, the user is told before step 0 what is left out.
    """
    _train(tmp_path, HARMLESS[kind], schedule)
    if schedule == "deferred":
        said = capfd.readouterr().err
        assert said.index("1 tensor that BertForSequenceClassification of transformers does not have") < said.index(
            "kept step 0"
        )
        assert "'bert.extra'" in said
        assert run_worker(tmp_path / "audit" / "spool") == 0
    results = load_results(tmp_path / "audit")
    inline = schedule == "inline"  # only torch's own layers compute there
    wanted = VerificationStatus.UNVERIFIABLE if inline else VerificationStatus.VERIFIED
    assert [step.verification.status for step in results.steps] == [wanted]
    assert {attempt.status.value for attempt in results.attempts} <= {"ran", *(["not_applicable"] if inline else [])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: _add(model, torch.empty(2, 3, device="meta")), "'bert.extra' is on the device `meta`"),
        (lambda model: _add(model, torch.empty(2, 3, device="meta"), trained=False), "'bert.extra' is on the device"),
        (lambda model: _add(model, torch.ones(3, dtype=torch.complex64)), "'bert.extra' is of type torch.complex64"),
        (
            lambda model: setattr(model.bert.embeddings, "token_type_embeddings", nn.Embedding(5, tiny.HIDDEN)),
            "'bert.embeddings.token_type_embeddings.weight' of shape (2, 32); this model has it of shape (5, 32)",
        ),
        (lambda model: setattr(model, "classifier", nn.Linear(tiny.HIDDEN, 2, bias=False)), "does not have it"),
    ],
    ids=["meta", "frozen on meta", "complex", "another shape", "one too few"],
)
def test_a_model_that_cannot_be_audited_is_refused_by_name_before_the_first_step(
    change: Callable[[Any], None], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is kept, and training continues.

    The message names the tensor and says what to do.
    """
    _train(tmp_path, change)
    assert message in caplog.text and caplog.text.count("is off for this run") == 1
    assert not (tmp_path / "audit" / "spool").exists()


def test_a_step_in_whose_update_a_foreign_parameter_has_a_part_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The side process would make a model without it, and compute another update."""

    def change(model: Any) -> None:
        _add(model, torch.ones(1))
        forward = model.bert.embeddings.forward
        model.bert.embeddings.forward = lambda *a, **k: forward(*a, **k) * model.bert.extra

    _train(tmp_path, change)
    assert "step 0 was not kept: the update of 'bert.extra' is not zero" in caplog.text and "rebuilt_by" in caplog.text


def test_looking_for_foreign_tensors_draws_no_random_number() -> None:
    """Training must not notice."""
    from leakaudit.capture.fitness import Fit
    from leakaudit.models.recipe import ModelRecipe

    for model in (tiny.bert(), tiny.gpt2_lm(), tiny.gpt2_classifier()):
        before = torch.get_rng_state()
        assert Fit.of(model, ModelRecipe.of(model)).foreign == frozenset()
        assert torch.equal(torch.get_rng_state(), before)


def test_models_that_other_threads_make_meanwhile_keep_their_values() -> None:
    """Parameters lose their values in the thread that looks at the model only."""
    made: list[bool] = []
    with parameters_without_values():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2).weight.is_meta))
        thread.start()
        thread.join()
        assert nn.Linear(2, 2).weight.is_meta
    assert made == [False]


def _delete(model: Any) -> None:
    del model.bert.encoder.layer[1]


def _append(model: Any) -> None:
    model.bert.encoder.layer.append(copy.deepcopy(model.bert.encoder.layer[0]))


def _tie(model: Any) -> None:
    model.bert.encoder.layer[1].output.dense.weight = model.bert.encoder.layer[0].output.dense.weight


def _prune(model: Any) -> None:
    prune.l1_unstructured(model.bert.pooler.dense, "weight", 0.5)


@pytest.mark.parametrize(
    ("change", "counts"),
    [(_delete, "16 went and 0"), (_append, "0 went and 16"), (_tie, "1 went and 0"), (_prune, "1 went and 1")],
)
def test_a_step_of_a_model_that_was_changed_during_training_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Any], None], counts: str
) -> None:
    """The steps before the change are verified.

    The results count the others as not kept and say why.
    """
    model: Any = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = audit_config(tmp_path)
    with without_side_process(), watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config) as audit:
        for number, batch in enumerate(stacks.classes()):
            if number == 2:
                change(model)
                optimizer.param_groups[0]["params"] = list(model.parameters())
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert audit._run is not None and audit._run.recorder.written()
    assert {step: stamp(one).status.value for step, one in kept(audit).items()} == {0: "verified", 1: "verified"}
    assert f"{counts} came" in caplog.text
