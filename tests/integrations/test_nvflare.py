"""The NVFlare filter blocks what leaks and what cannot be judged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.callbacks.rounds import finish
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.worker.shared_process import SharedSideProcess
from leakaudit.storage.snapshots import read_snapshot
from tests.support import tiny
from tests.support.mini_trainer import config

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "nvflare_audited.py"


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start no side process, and leave no audit open."""
    pytest.importorskip("nvflare")
    monkeypatch.setattr(SharedSideProcess, "ensure", lambda self: False)
    yield
    finish()


class Client:
    """What a filter asks of NVFlare's context."""

    def get_identity_name(self) -> str:
        return "site-1"


def trained(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train one audited round; return the weights before and after it."""
    model, tokenizer = tiny.bert(), tiny.bert_tokenizer()
    before = {n: w.clone() for n, w in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = config(folder, unit="round", every_n_steps=1, out_dir=folder / "site-1")
    with watch(model, optimizer, tokenizer=tokenizer, config=audit):
        batch = tokenizer(["the old dog chased a cat ."], return_tensors="pt")
        model(**batch, labels=torch.tensor([1])).loss.backward()
        optimizer.step()
    return before, {n: w.clone() for n, w in model.state_dict().items()}


def blocked(folder: Path, kind: str, data: Any) -> str:
    """Send a DXO through the filter; return why it is blocked."""
    from nvflare.apis.dxo import DXO
    from nvflare.apis.filter import ContentBlockedException
    from nvflare.apis.shareable import Shareable

    from leakaudit.integrations.nvflare import LeakAuditFilter

    shareable = Shareable(data) if kind == "none" else DXO(kind, data=data).to_shareable()
    with pytest.raises(ContentBlockedException) as caught:
        LeakAuditFilter(str(folder), timeout_s=5).process(shareable, Client())
    return str(caught.value)


def test_without_a_round_nothing_passes(tmp_path: Path) -> None:
    """A client without a callback."""
    assert "No round of this process is open" in blocked(tmp_path, "WEIGHTS", {"w": torch.ones(2)})


def test_a_result_that_is_no_dxo_is_blocked(tmp_path: Path) -> None:
    """The base class would let it pass."""
    assert "it is no DXO" in blocked(tmp_path, "none", {"w": 1})


def test_another_kind_of_content_is_blocked(tmp_path: Path) -> None:
    """Only weights, their differences and metrics are judged."""
    trained(tmp_path)
    assert "it holds 'STATISTICS'" in blocked(tmp_path, "STATISTICS", {"loss": 1.0})


def test_tensors_that_the_audit_does_not_know_are_blocked(tmp_path: Path) -> None:
    """A round is not judged by a part of what is sent."""
    _, after = trained(tmp_path)
    assert (
        "1 of its" in (said := blocked(tmp_path, "WEIGHTS", {**after, "hidden": torch.ones(3)})) and "'hidden'" in said
    )


def test_a_round_that_nobody_attacks_is_blocked(tmp_path: Path) -> None:
    """No side process runs: there is no answer, and no answer is a block."""
    _, after = trained(tmp_path)
    assert "ERROR" in blocked(tmp_path, "WEIGHTS", {n: w.numpy() for n, w in after.items()})


def test_differences_are_read_like_weights(tmp_path: Path) -> None:
    """NVFlare's clients may send what they changed instead of weights."""
    before, after = trained(tmp_path)
    blocked(tmp_path, "WEIGHT_DIFF", {n: (after[n] - before[n]).numpy() for n in after})
    snapshot = read_snapshot(next((tmp_path / "site-1" / "spool").glob("0*")))
    assert snapshot.sent is not None
    for name, update in snapshot.observation.update.items():
        torch.testing.assert_close(snapshot.sent.update[name], update)


@pytest.mark.parametrize("where", [(), ("--external",)], ids=["in-process", "external"])
def test_the_simulator_blocks_a_leak_and_what_cannot_be_judged_and_lets_noise_through(
    tmp_path: Path, where: tuple[str, ...]
) -> None:
    """The three clients and two rounds of the example, in one process and in two."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *where, "--out", str(tmp_path / "audits")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert "the transmission is blocked: FAIL" in said, said[-3000:]
    assert "the transmission is blocked: ERROR: No round of this process is open" in said
    assert all(f"leakaudit: round {number} may be sent" in said for number in range(2))
    assert "Ignore the result from site-1" in said and "Ignore the result from site-3" in said
    assert "Ignore the result from site-2" not in said
