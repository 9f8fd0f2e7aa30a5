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
        return found.to("cpu")  # type: ignore[no-any-return]

    return make


def eight(layer: nn.Linear) -> nn.Module:
    """Return the 8-bit layer of an ordinary one."""
    shape = (layer.in_features, layer.out_features)
    found = bnb.nn.Linear8bitLt(*shape, bias=layer.bias is not None, has_fp16_weights=False, threshold=6.0)
    found.load_state_dict(layer.state_dict())
    return found.to("cpu")  # type: ignore[no-any-return]


def lora(model: Any, **more: Any) -> Any:
    return with_lora(model, peft.LoraConfig(r=2, **{"target_modules": ["q_proj", "v_proj"], **more}))


def prepared() -> Any:
    model = quantised(llama().to(BF16), four(BF16))
    model.is_loaded_in_4bit = True
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


CLIENTS: dict[str, Callable[[], Any]] = {
    "nf4": lambda: lora(quantised(llama(), four(FLOAT32))),
    "nf4, bfloat16 inside": lambda: lora(quantised(llama(), four(BF16))),
    "nf4, all in bfloat16": lambda: lora(quantised(llama().to(BF16), four(BF16))),
    "fp4, double": lambda: lora(quantised(llama(), four(FLOAT32, "fp4", compress_statistics=True))),
    "nf4 in bfloat16 storage": lambda: lora(quantised(llama().to(BF16), four(BF16, quant_storage=BF16))),
    "nf4, prepared": lambda: lora(prepared()),
    "nf4, DoRA": lambda: lora(quantised(llama(), four(FLOAT32)), use_dora=True),
    "nf4, all linear": lambda: lora(quantised(llama(), four(FLOAT32)), target_modules="all-linear"),
    "nf4, saved": lambda: lora(quantised(llama(), four(FLOAT32)), modules_to_save=["embed_tokens", "lm_head"]),
    "int8": lambda: lora(quantised(llama(), eight)),
    "int8 in bfloat16": lambda: lora(quantised(llama().to(BF16), eight)),
}


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
