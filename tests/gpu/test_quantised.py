"""Clients on a base that bitsandbytes quantised with its kernels for a GPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.results.schema import VerificationStatus
from tests.gpu.families import CPU, stamped
from tests.gpu.record import DEVICE, MEASURED
from tests.support.tiny_trainer import kept

pytestmark = pytest.mark.gpu


def test_steps_on_a_quantised_base_say_which_of_them_can_be_repeated(tmp_path: Path) -> None:
    """Steps on 4 bits are verified, and training stays the same.

    Layers of 8 bits round their inputs on a GPU.
    """
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    from tests.capture.test_adapters import _run
    from tests.integrations.test_bitsandbytes import as_bytes, clients

    said, unverified = [], []
    for name, make in clients(DEVICE).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            plain: Any = make().train()
            torch.manual_seed(0)
            audited: Any = make().train()
            snapshots = kept(_run(audited, tmp_path / name))
            _run(plain, None)
        mine = dict(plain.named_parameters())
        same = all(torch.equal(as_bytes(mine[n]), as_bytes(p)) for n, p in audited.named_parameters())
        assert same, f"{name}: the audit changed the training"
        assert len(snapshots) == 2, name
        stamps = [stamped(snapshot, torch.device(DEVICE)) for snapshot in snapshots.values()]
        stamps += [stamped(snapshot, CPU) for snapshot in snapshots.values()]
        worst = [max(stamp.relative_error or 0.0 for stamp in half) for half in (stamps[:2], stamps[2:])]
        words = [stamps[0].status.value, stamps[2].status.value]
        said.append(f"{name}: {words[0]} / {words[1]} ({worst[0]:.0e} / {worst[1]:.0e})")
        if "int8" not in name and words[0] != VerificationStatus.VERIFIED:
            unverified.append(f"{name}: {stamps[0].note}")
    MEASURED.notes.append(
        "Bases of bitsandbytes under LoRA, two steps each, stamp on the GPU / on the CPU (largest relative error): "
        + "; ".join(said)
        + "."
    )
    assert unverified == []
