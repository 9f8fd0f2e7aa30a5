"""Models on a base of few bits are audited like others.

The matrix of a layer is read from its outputs.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.audit.stamp import stamp_of
from leakaudit.capture.fitness import Fit
from leakaudit.client.step import ClientStep
from leakaudit.errors import ModelError
from leakaudit.models import quantised_layers as quantised_module
from leakaudit.models.quantised_layers import QuantisedLayer, quantised_layers
from leakaudit.models.recipe import ModelRecipe
from leakaudit.results.schema import VerificationStatus
from tests.capture.test_adapters import _run
from tests.capture.test_rebuilt import llama, with_lora
from tests.support import tiny
from tests.support.quantised import FourBits, InBuffers, OwnKernel, RoundsInputs, quantised
from tests.support.tiny_trainer import kept, stamp

peft: Any = pytest.importorskip("peft")

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers of these tests count as those of an installed package."""
    found = quantised_module.installed_packages() | {"tests"}
    monkeypatch.setattr(quantised_module, "installed_packages", lambda: found)


def _lora(model: Any, **more: Any) -> Any:
    return with_lora(model, peft.LoraConfig(r=2, **{"target_modules": ["q_proj", "v_proj"], **more}))


def _some_trained(model: Any) -> Any:
    """Train norms and embeddings on a frozen base, without adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.is_floating_point() and ("norm" in name.lower() or "embed" in name))
    return model


def _without_a(model: Any) -> Any:
    """Freeze every A, as FFA-LoRA does."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            parameter.requires_grad_(False)
    return model


CLIENTS: dict[str, Callable[[], Any]] = {
    "4 bits": lambda: _lora(quantised(llama(), FourBits)),
    "4 bits that multiply in bfloat16, in a float32 model": lambda: _lora(
        quantised(llama(), lambda layer: FourBits(layer, BF16))
    ),
    "4 bits in a bfloat16 model": lambda: _lora(quantised(llama().to(BF16), lambda layer: FourBits(layer, BF16))),
    "4 bits, with biases": lambda: with_lora(
        quantised(tiny.bert(), FourBits, ("classifier",)), peft.LoraConfig(r=2, target_modules=["query"])
    ),
    "all linear layers, rsLoRA": lambda: _lora(
        quantised(llama(), FourBits), target_modules="all-linear", use_rslora=True
    ),
    "embeddings and head saved": lambda: _lora(
        quantised(llama(), FourBits), modules_to_save=["embed_tokens", "lm_head"]
    ),
    "ranks by layer": lambda: _lora(
        quantised(llama(), FourBits), rank_pattern={"v_proj": 3}, alpha_pattern={"v_proj": 5}
    ),
    "only B is trained": lambda: _without_a(_lora(quantised(llama(), FourBits))),
    "packed numbers in buffers": lambda: _some_trained(quantised(llama(), InBuffers)),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_quantised_client_is_verified_on_the_matrices_that_it_had(client: str, tmp_path: Path) -> None:
    """It trains as without the audit, and no packed number is kept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, audited = CLIENTS[client]().train(), CLIENTS[client]().train()
    before = torch.get_rng_state()
    audit = _run(audited, tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    _run(plain, None)
    mine = plain.state_dict()
    assert all(torch.equal(mine[name], tensor) for name, tensor in audited.state_dict().items())
    found = kept(audit)
    assert len(found) == 2
    for snapshot in found.values():
        assert snapshot.model_recipe.computed_in
        types = {tensor.dtype for tensor in snapshot.observation.model.state_dict().values()}
        assert types.isdisjoint({torch.uint8, torch.int8})
        stamped = stamp(snapshot)
        assert stamped.status is VerificationStatus.VERIFIED and (stamped.relative_error or 0.0) < 1e-6


def test_the_matrices_are_written_once_and_made_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second snapshot makes none again."""
    made: list[tuple[int, int]] = []
    matrix = QuantisedLayer.matrix

    def counted(layer: QuantisedLayer) -> torch.Tensor:
        made.append(layer.shape)
        return matrix(layer)

    monkeypatch.setattr(QuantisedLayer, "matrix", counted)
    model = CLIENTS["4 bits"]().train()
    found = kept(_run(model, tmp_path))
    assert len(found) == 2 and len(made) == 14


def test_a_layer_that_rounds_its_inputs_is_named_and_never_called_verified(tmp_path: Path) -> None:
    """Attacks still get the step; its stamp says what is not repeated."""
    found = kept(_run(_lora(quantised(llama(), RoundsInputs)).train(), tmp_path))
    for snapshot in found.values():
        stamped = stamp(snapshot)
        assert stamped.status is VerificationStatus.UNVERIFIABLE
        assert (
            "round their inputs to 8 bits" in stamped.note
            and "'model.layers.0.self_attn.q_proj.base_layer'" in stamped.note
        )


def test_layers_with_a_kernel_of_their_own_are_verified_up_to_rounding(tmp_path: Path) -> None:
    """Their sums are rounded in another order than those of torch, on the same device."""
    make = quantised(llama(), lambda layer: OwnKernel(layer, BF16))
    for snapshot in kept(_run(_lora(make).train(), tmp_path)).values():
        stamped = stamp(snapshot)
        assert stamped.status is VerificationStatus.VERIFIED and 1e-4 < (stamped.relative_error or 0.0) < 3e-2
        assert "multiply in bfloat16 with kernels of their own" in (stamped.note or "")


@pytest.mark.parametrize("make", [FourBits, lambda layer: OwnKernel(layer, BF16)])
def test_another_batch_is_still_a_mismatch(tmp_path: Path, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Layers of another class explain no other update."""
    snapshot = kept(_run(_lora(quantised(llama(), make)).train(), tmp_path))[0]
    (batch,) = snapshot.truth.micro_batches
    ids = batch.inputs["input_ids"].flip(1).add(3)
    other = dataclasses.replace(batch, inputs={**batch.inputs, "input_ids": ids, "labels": ids}, output_gradients={})
    wrong = dataclasses.replace(snapshot, truth=dataclasses.replace(snapshot.truth, micro_batches=(other,)))
    stamped = stamp_of(wrong, ClientStep.of(wrong))
    assert stamped.status is VerificationStatus.MISMATCH


def test_packed_numbers_that_change_during_a_run_end_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step after the change is not kept, and the log names the layer."""
    model = CLIENTS["4 bits"]().train()
    layer: Any = next(layer for layer in model.modules() if isinstance(layer, FourBits))
    first = True

    def change(*_: Any) -> None:
        nonlocal first
        if not first:
            layer.weight.data += 1
        first = False

    model.register_forward_pre_hook(change)
    assert len(kept(_run(model, tmp_path))) == 1
    assert "the packed numbers of" in caplog.text and "changed during the run" in caplog.text


def _layers(model: Any, ordinary: Any) -> dict[str, QuantisedLayer]:
    return quantised_layers(model, ordinary)


@pytest.mark.parametrize("kind", [FourBits, InBuffers])
@pytest.mark.parametrize("bias", [True, False])
def test_the_matrix_of_a_layer_is_exact(kind: Any, bias: bool) -> None:
    """It is compared with what the library's own function returns."""
    made: Any = nn.Sequential(nn.Linear(10, 6, bias=bias))
    layer = kind(made[0])
    (found,) = _layers(nn.Sequential(layer), made).values()
    own = layer.dequantise() if kind is FourBits else layer.qweight.T.float() * layer.scales
    assert found.is_linear and found.dtype is torch.float32 and torch.equal(found.matrix(), own)


def test_a_wide_layer_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No input is larger than the limit."""
    monkeypatch.setattr("leakaudit.models.quantised_layers.ROWS", 4)
    made: Any = nn.Sequential(nn.Linear(10, 6))
    layer = FourBits(made[0])
    (found,) = _layers(nn.Sequential(layer), made).values()
    assert torch.equal(found.matrix(), layer.dequantise())


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_the_type_in_which_a_layer_multiplies_is_found(compute: torch.dtype, given: torch.dtype) -> None:
    """In a model of a coarser type, that type decides what its outputs hold."""
    made: Any = nn.Sequential(nn.Linear(64, 32).to(given), nn.LayerNorm(32).to(given))
    (found,) = _layers(nn.Sequential(FourBits(made[0], compute), made[1]), made).values()
    assert found.dtype is (compute if given is torch.float32 else torch.bfloat16)


def test_no_hook_runs_and_the_layer_stays_as_it_was() -> None:
    """A copy answers, without what users and accelerate put on the layer."""
    made: Any = nn.Sequential(nn.Linear(10, 6))
    layer = FourBits(made[0])

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError

    layer.register_forward_hook(fails)
    layer.register_forward_pre_hook(fails)
    layer.forward = fails  # type: ignore[assignment]
    before = copy.copy(vars(layer))
    (found,) = _layers(nn.Sequential(layer), made).values()
    found.matrix()
    assert vars(layer) == before and layer.bias is not None


class NoLayer(FourBits):
    """Packed numbers of something else."""

    def forward(self, x: Any) -> Any:
        return x.exp()


def test_a_layer_whose_matrix_cannot_be_read_is_refused_by_name() -> None:
    """Before the first step, with what to do."""
    model = quantised(llama(), NoLayer)
    with pytest.raises(ModelError, match=r"'model.layers.0.self_attn.q_proj' \(NoLayer\) .*bfloat16"):
        Fit.of(model, ModelRecipe.of(model))


class Inside(torch.Tensor):
    """A tensor that says bfloat16 and holds other numbers, as those of torchao."""

    @staticmethod
    def __new__(cls, shape: torch.Size) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, shape, dtype=torch.bfloat16)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return Inside(args[0].shape)


def test_a_tensor_that_packs_numbers_inside_is_refused_by_name() -> None:
    """It looks like an ordinary matrix, and no layer says what it is."""
    model = llama()
    layer: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
    layer.weight = nn.Parameter(Inside(layer.weight.shape), requires_grad=False)
    with pytest.raises(ModelError, match=r"q_proj.weight' is quantised inside a tensor of the kind Inside"):
        Fit.of(model, ModelRecipe.of(llama()))


def test_a_resized_layer_is_no_quantised_one() -> None:
    """Its matrix has ordinary numbers, and the check of shapes speaks."""
    made: Any = nn.Sequential(nn.Linear(10, 6))
    assert _layers(nn.Sequential(nn.Linear(10, 7).requires_grad_(False)), made) == {}


def test_a_layer_of_the_users_own_code_is_refused_and_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    calls: list[object] = []
    monkeypatch.setattr(FourBits, "forward", lambda *given: calls.append(given))
    recipe = ModelRecipe.of(llama())
    with pytest.raises(ModelError, match=r"of your own code, which does not run a second time"):
        Fit.of(quantised(llama(), FourBits), recipe)
    assert calls == []
