"""Clients on a base that bitsandbytes quantised; its CPU kernels are enough."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.results.schema import VerificationStatus
from tests.capture.test_adapters import _run
from tests.capture.test_rebuilt import llama, with_lora
from tests.support.quantised import quantised
from tests.support.tiny_trainer import kept, stamp

bnb: Any = pytest.importorskip("bitsandbytes")
peft: Any = pytest.importorskip("peft")
pytestmark = pytest.mark.integrations

BF16, FLOAT32 = torch.bfloat16, torch.float32


def clients(device: str = "cpu") -> dict[str, Callable[[], Any]]:
    """Return name -> what makes a client whose base was quantised on a device."""

    def four(compute: torch.dtype, kind: str = "nf4", **more: Any) -> Callable[[nn.Linear], nn.Module]:
        """Return what makes a 4-bit layer of an ordinary one."""

        def make(layer: nn.Linear) -> nn.Module:
            found = bnb.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                compute_dtype=compute,
                quant_type=kind,
                **more,
            )
            found.load_state_dict(layer.state_dict())
            return found.to(device)  # type: ignore[no-any-return]

        return make

    def eight(layer: nn.Linear) -> nn.Module:
        """Return the 8-bit layer of an ordinary one."""
        shape = (layer.in_features, layer.out_features)
        found = bnb.nn.Linear8bitLt(*shape, bias=layer.bias is not None, has_fp16_weights=False, threshold=6.0)
        found.load_state_dict(layer.state_dict())
        return found.to(device)  # type: ignore[no-any-return]

    def lora(model: Any, make: Any, **more: Any) -> Any:
        base = quantised(model, make).to(device)
        return with_lora(base, peft.LoraConfig(r=2, **{"target_modules": ["q_proj", "v_proj"], **more})).to(device)

    def prepared() -> Any:
        model = quantised(llama().to(BF16), four(BF16)).to(device)
        model.is_loaded_in_4bit = True
        found = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        return with_lora(found, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).to(device)

    saved = ["embed_tokens", "lm_head"]
    return {
        "nf4": lambda: lora(llama(), four(FLOAT32)),
        "nf4, bfloat16 inside": lambda: lora(llama(), four(BF16)),
        "nf4, all in bfloat16": lambda: lora(llama().to(BF16), four(BF16)),
        "fp4, double": lambda: lora(llama(), four(FLOAT32, "fp4", compress_statistics=True)),
        "nf4 in bfloat16 storage": lambda: lora(llama().to(BF16), four(BF16, quant_storage=BF16)),
        "nf4, prepared": prepared,
        "nf4, DoRA": lambda: lora(llama(), four(FLOAT32), use_dora=True),
        "nf4, all linear": lambda: lora(llama(), four(FLOAT32), target_modules="all-linear"),
        "nf4, saved": lambda: lora(llama(), four(FLOAT32), modules_to_save=saved),
        "int8": lambda: lora(llama(), eight),
        "int8 in bfloat16": lambda: lora(llama().to(BF16), eight),
    }


CLIENTS = clients()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_on_a_quantised_base_is_verified_and_trains_as_without_the_audit(client: str, tmp_path: Path) -> None:
    """Weights are compared to the bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, audited = CLIENTS[client]().train(), CLIENTS[client]().train()
        found = kept(_run(audited, tmp_path))
        _run(plain, None)
    mine = dict(plain.named_parameters())
    assert all(torch.equal(as_bytes(mine[name]), as_bytes(p)) for name, p in audited.named_parameters())
    assert len(found) == 2
    for snapshot in found.values():
        stamped = stamp(snapshot)
        assert stamped.status is VerificationStatus.VERIFIED and stamped.relative_error == 0.0
