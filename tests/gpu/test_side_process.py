"""A side process that computes on a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from leakaudit.audit.audit import Audit
from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import watch
from leakaudit.config.audit import PluginSpec
from leakaudit.results.files import load_results
from leakaudit.results.schema import AttemptStatus, VerificationStatus
from tests.benchmarks.capture import setup
from tests.gpu.record import DEVICE, MEASURED
from tests.support import tiny
from tests.support.tiny_trainer import audit_config, kept, make_trainer, without_side_process

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("asked", [DEVICE, "auto"])
def test_a_run_of_the_callback_is_attacked_on_the_device(asked: str, tmp_path: Path) -> None:
    """The results name it, the steps are verified, and texts are found."""
    pytest.importorskip("accelerate")  # the Trainer needs it
    if asked == "auto" and DEVICE != "cpu" and shutil.which("nvidia-smi") is None:
        pytest.skip("`auto` asks nvidia-smi for free memory, and there is none")
    config = audit_config(tmp_path, device=asked, wait_at_end_s=80.0)
    audit = LeakAuditCallback(config)
    trainer = make_trainer(tmp_path, audit, model=tiny.wide_bert(), use_cpu=DEVICE == "cpu", learning_rate=1e-3)
    audit.attach(trainer)
    trainer.train()
    log = tmp_path / "audit" / "worker.log"
    assert (tmp_path / "audit" / "results.json").is_file(), log.read_text() if log.is_file() else "no side process"
    results = load_results(tmp_path / "audit" / "results.json")
    assert results.run.environment["device"].startswith(DEVICE), results.run.environment
    assert {step.verification.status for step in results.steps} == {VerificationStatus.VERIFIED}
    spans = [attempt for attempt in results.attempts if attempt.attack == "span"]
    assert {attempt.status for attempt in spans} == {AttemptStatus.RAN}, log.read_text()
    assert any(attempt.events for attempt in spans)
    assert all((attempt.gpu_s > 0.0) is (DEVICE != "cpu") for attempt in spans)
    MEASURED.notes.append(
        f"Side process, `device: {asked}`: {len(results.steps)} steps verified and attacked on {results.run.environment['device']}."
    )


def test_a_full_gpu_leaves_the_audit_to_the_cpu(tmp_path: Path) -> None:
    """Nothing is lost: the step is verified and attacked there."""
    if DEVICE == "cpu":
        pytest.skip("a CPU has no limit of its own; tests/audit/test_audit.py tries the way back with a made-up GPU")
    model, optimizer, batch, tokenizer = setup("22M", DEVICE)
    model.eval()  # the CPU cannot repeat the dropout of a GPU
    watched = watch(model, optimizer, tokenizer=tokenizer, config=audit_config(tmp_path))
    with without_side_process(), watched:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    (snapshot,) = kept(watched).values()
    del model, optimizer, watched
    config = audit_config(tmp_path, attacks=(PluginSpec(name="llg"),), controls=0)
    audit = Audit(tmp_path / "apart", config, tokenizer, device=torch.device(DEVICE))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        audit.step(snapshot)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    results = audit.finish()
    assert results.run.environment["device"].startswith("cpu")
    assert results.steps[0].verification.status is VerificationStatus.VERIFIED
    assert {attempt.status for attempt in results.attempts} == {AttemptStatus.RAN}
