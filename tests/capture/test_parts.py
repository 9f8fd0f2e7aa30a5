"""Of a large step, what attacks read is kept, with a sketch of the update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.audit.worker import run_worker
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.recording import recorder_setup
from leakaudit.capture.recording.sketch import distance
from leakaudit.client.snapshot import BASE, OBSERVED, Snapshot
from leakaudit.errors import SnapshotDamagedError
from leakaudit.models.first_blocks import first_parts
from leakaudit.models.recipe import ModelRecipe
from leakaudit.results.files import load_results
from leakaudit.results.schema import AttemptStatus, Score, VerificationStatus
from leakaudit.storage.snapshot_files import read_tensors, write_tensors
from leakaudit.storage.snapshots import read_snapshot
from tests.support import tiny
from tests.support.deep import MODELS, gpt2, llama
from tests.support.snapshots import edit_manifest

SENTENCE = "the old dog chased a small blue fish near the river"


def train(
    folder: Path | None, kind: str, **config: Any
) -> tuple[nn.Module, list[dict[str, Tensor]], dict[str, Tensor]]:
    """Train two steps; return the model, its gradients and its first weights."""
    model = MODELS[kind]().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    tokenizer = tiny.bert_tokenizer() if kind == "bert" else tiny.gpt2_tokenizer()
    words = tokenizer([SENTENCE], return_tensors="pt")
    labels = torch.tensor([1]) if kind == "bert" else words["input_ids"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {
        "out_dir": folder, "every_n_steps": 9, "schedule": "deferred", "at_end": "leave", "keep_snapshots": True,
        "attacks": ["embedding-rows", "span", "idlg", "dlg"], "controls": 1, "attack_recovered_steps": True,
    }  # fmt: skip
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients = []
    audit = None if folder is None else watch(model, optimizer, tokenizer=tokenizer, config=settings | config)
    if audit is not None:
        audit.__enter__()
    for _ in range(2):
        model(input_ids=words["input_ids"], attention_mask=words["attention_mask"], labels=labels).loss.backward()
        gradients.append({n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    if audit is not None:
        audit.__exit__(None, None, None)
    return model, gradients, before


def snapshot(folder: Path) -> tuple[Path, Snapshot]:
    (path,) = [p for p in (folder / "spool").iterdir() if p.suffix in (".ready", ".kept")]
    return path, read_snapshot(path)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_setup, "KEEP_ALL_BYTES", 0)


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_kept_is_exact_and_training_is_the_same(tmp_path: Path, kind: str) -> None:
    """Update, rows and weights to the bit; the sketch identifies the whole update."""
    model, (own, other), before = train(tmp_path / "audit", kind)
    plain, *_ = train(None, kind)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    path, found = snapshot(tmp_path / "audit")
    parts = found.parts
    assert parts is not None and parts.parameters == sum(p.numel() for p in model.parameters())
    update = found.observation.update
    assert update and set(update) | set(parts.not_kept) == set(own) and not set(update) & set(parts.not_kept)
    assert all(torch.equal(update[name], own[name]) for name in update)
    rebuilt = dict(found.observation.model.named_parameters())
    files = [read_tensors(path / name) for name in (OBSERVED, BASE) if (path / name).exists()]
    stored = {key.removeprefix("weights/") for file in files for key in file if key.startswith("weights/")}
    assert all(torch.equal(rebuilt[name], before[name]) for name in stored if name in rebuilt)
    assert sum(rebuilt[name].numel() for name in stored if name in rebuilt) < 0.6 * parts.parameters
    assert distance(found.sketches, own)[0] < 1e-6
    assert distance(found.sketches, other)[0] > 0.1


@pytest.mark.parametrize("kind", MODELS)
def test_the_results_say_what_was_not_kept_and_span_reads_what_was(tmp_path: Path, kind: str) -> None:
    """Attacks that read everything do not apply, and are named as not tested."""
    train(tmp_path / "audit", kind)
    assert run_worker(tmp_path / "audit" / "spool", once=True) == 0
    results = load_results(tmp_path / "audit" / "results.json")
    status = {attempt.attack: attempt for attempt in results.attempts}
    for name in ("idlg", "dlg"):
        assert status[name].status is AttemptStatus.NOT_APPLICABLE and "`keep: all`" in status[name].reason
        assert any(entry.what.startswith(f"{name}, on 1 step") for entry in results.coverage.not_tested)
        assert not status[name].scores
    assert status["span"].status is AttemptStatus.RAN
    assert results.subject.parameters == sum(p.numel() for p in MODELS[kind]().parameters())
    verdict = json.loads((tmp_path / "audit" / "verdict.json").read_text())
    assert verdict["verdict"] != "PASS"
    words = len(SENTENCE.split())
    recall = status["span"].scores["token_recall"]
    assert isinstance(recall, Score)
    # The last word of a decoder's text is no input of anything that is learnt from: only the head's update tells it.
    assert recall.value == pytest.approx(1.0 if kind == "bert" else (words - 1) / words)
    assert results.steps[0].verification.status is VerificationStatus.VERIFIED
    assert results.steps[0].words_not_kept == (kind != "bert"), "a text that cannot come back whole is no evidence"


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_token_table_is_written_once_and_then_the_rows_that_changed(tmp_path: Path, decay: float) -> None:
    """Lossless under weight decay as well, which moves every row of the table."""
    model = llama().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=decay)
    tokenizer, before = tiny.gpt2_tokenizer(), []
    settings = {"out_dir": tmp_path / "audit", "every_n_steps": 2, "schedule": "deferred", "at_end": "leave"}
    with watch(model, optimizer, tokenizer=tokenizer, config=settings) as audit:
        for _ in range(4):
            before.append(model.model.embed_tokens.weight.detach().clone())
            ids = tokenizer([SENTENCE], return_tensors="pt")["input_ids"]
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert audit._run is not None and audit._run.recorder.written()
    first, second = sorted((tmp_path / "audit" / "spool").glob("*.ready"))
    for path, weight in ((first, before[0]), (second, before[2])):
        rebuilt = read_snapshot(path).observation.model
        assert torch.equal(rebuilt.get_parameter("model.embed_tokens.weight"), weight)
    name = "weights/model.embed_tokens.weight"
    assert name not in read_tensors(first / OBSERVED) and name in read_tensors(first / BASE)
    assert (name in read_tensors(second / OBSERVED)) == (decay > 0)


def test_all_is_kept_where_asked_for_or_where_no_attack_reads_less(tmp_path: Path) -> None:
    """`keep: all`, and a battery that needs every parameter."""
    for name, more in (("asked", {"keep": "all"}), ("needed", {"attacks": ["idlg"]})):
        _, gradients, _ = train(tmp_path / name, "bert", **more)
        _, found = snapshot(tmp_path / name)
        assert found.parts is None and found.observation.whole
        assert set(found.observation.update) == set(gradients[0])


def test_a_model_that_cannot_be_cut_is_kept_whole() -> None:
    """Two blocks are no more than what is kept; a tied head moves every row."""
    small = tiny.bert()
    assert first_parts(small, ModelRecipe.of(small)) is None
    parts = first_parts(gpt2(), ModelRecipe.of(gpt2()))
    assert parts is not None and parts.rows is None


def test_rows_that_do_not_fit_their_table_are_refused(tmp_path: Path) -> None:
    """A row beyond the table would be written somewhere else."""
    train(tmp_path / "audit", "llama")
    path, _ = snapshot(tmp_path / "audit")
    tensors = read_tensors(path / OBSERVED)
    key, rows = "row_index/model.embed_tokens.weight", "row_values/model.embed_tokens.weight"
    assert key in tensors
    for index in (torch.tensor([10**6]), torch.tensor([-1]), torch.tensor([0.0])):
        (path / OBSERVED).unlink()
        changed = tensors | {key: index, rows: torch.ones(1, 96)}
        name, digest = write_tensors(path / OBSERVED, changed)
        edit_manifest(path, lambda raw: raw["digests"].update({name: digest}))  # noqa: B023 - called at once
        with pytest.raises(SnapshotDamagedError, match="do not fit the table"):
            read_snapshot(path)
