"""`schedule: inline` under a wrapped `forward`: training is the same to the bit."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.audit.inline import undisturbed
from leakaudit.audit.live_copy import copier, prove_separate
from leakaudit.capture.context import OFF_SWITCH
from leakaudit.client.truth import MicroBatch
from leakaudit.config.audit import PluginSpec
from leakaudit.errors import ModelError
from leakaudit.models.recipe import ModelRecipe
from leakaudit.results.files import load_results
from leakaudit.results.schema import AttemptStatus, VerificationStatus
from tests.support import matrix, stacks, tiny
from tests.support.stacks import STACKS, Case
from tests.support.tiny_trainer import audit_config

Wrap = Callable[[nn.Module], None]


def closure(module: nn.Module) -> None:
    """Log each call; the function holds the live module's bound method."""
    plain = module.forward
    calls: list[int] = []

    @functools.wraps(plain)
    def logged(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        return plain(*args, **kwargs)

    module.forward = logged


def partial(module: nn.Module) -> None:
    """Wrap with `functools.partial` around a function with the live bound method."""

    def timed(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    module.forward = functools.partial(timed, module.forward)


def bound(module: nn.Module) -> None:
    """Bind a function to the module, as TRL does, that holds the earlier bound method."""
    plain = module.forward

    def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    module.forward = types.MethodType(patched, module)


def head(model: Any) -> None:
    """Patch the head only, as TRL does to compute it in float32."""
    closure(model.classifier)


def every_module(model: nn.Module) -> None:
    """Wrap the forward of every part."""
    for module in model.modules():
        closure(module)


def hooks(model: nn.Module) -> None:
    """Hooks that hold the live model and a lock."""
    lock = threading.Lock()

    def look(*_: Any) -> None:
        assert model.training is not lock.locked()

    model.register_forward_hook(look)
    next(model.children()).register_forward_pre_hook(look)


def weight_norm(model: Any) -> None:
    """Norm and direction by parametrization."""
    torch.nn.utils.parametrizations.weight_norm(model.classifier)


def spectral_norm(model: Any) -> None:
    """The older one: a hook of torch computes the weight."""
    torch.nn.utils.spectral_norm(model.classifier)


def parametrized(model: Any) -> None:
    """A parametrization of the user's own."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    torch.nn.utils.parametrize.register_parametrization(model.classifier, "weight", Doubled())


WRAPS = (closure, partial, bound, head, every_module, hooks, weight_norm, spectral_norm, parametrized)


@dataclass
class Seen:
    """What training left, and the parameters before each forward pass."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    flags: list[list[bool]] = field(default_factory=list)
    random: Tensor | None = None


@contextlib.contextmanager
def inline(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the stacks train with attacks in the training process."""
    attacks = (PluginSpec(name="embedding-rows"), PluginSpec(name="idlg"))
    config = functools.partial(audit_config, schedule="inline", attacks=attacks, controls=3)
    patch.setattr(stacks, "audit_config", lambda folder, **more: config(folder))
    patch.setattr(stacks, "without_side_process", contextlib.nullcontext)
    patch.setattr(stacks, "kept", lambda audit: {})
    yield


def repeated() -> bool:
    """Return whether a repetition calls this; it restores what it changes."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith("repetition.py"):
        frame = frame.f_back
    return frame is not None


def trained(folder: Path, stack: str, make: Callable[[], nn.Module], wrap: Wrap) -> Seen:
    """Train in a stack and look at every parameter before each forward pass."""
    seen = Seen()
    torch.manual_seed(0)
    model = make()
    wrap(model)

    def look(module: nn.Module, *rest: Any) -> None:
        if repeated():
            return
        seen.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        seen.flags.append([*(p.requires_grad for p in model.parameters()), *(m.training for m in model.modules())])

    inner: Any = model.bert if hasattr(model, "bert") else model
    inner.register_forward_pre_hook(look)
    STACKS[stack](folder, Case(model=lambda: model, batches=stacks.classes(count=3)))
    seen.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen.random = torch.get_rng_state()
    return seen


def same(one: Seen, other: Seen) -> None:
    """Compare two trainings bit by bit."""
    for name, weight in other.weights.items():
        assert torch.equal(one.weights[name], weight), name
    assert one.flags == other.flags
    assert len(one.gradients) == len(other.gradients)
    for mine, wanted in zip(one.gradients, other.gradients, strict=True):
        for name, gradient in wanted.items():
            found = mine[name]
            assert (found is None) == (gradient is None), f"{name}: a gradient appeared or went between two steps"
            assert found is None or torch.equal(found, gradient), name  # type: ignore[arg-type]
    assert one.random is not None and other.random is not None and torch.equal(one.random, other.random)


def both(folder: Path, stack: str, make: Callable[[], nn.Module], wrap: Wrap, patch: pytest.MonkeyPatch) -> None:
    """Train without and with the audit, and compare."""
    with inline(patch):
        patch.setenv(OFF_SWITCH, "1")
        alone = trained(folder / "alone", stack, make, wrap)
        patch.delenv(OFF_SWITCH)
        audited = trained(folder, stack, make, wrap)
    same(audited, alone)


def all_ran(folder: Path) -> None:
    """Every step that was kept is verified, and every attack ran on it."""
    results = load_results(folder / "audit")
    assert len(results.steps) >= 2
    assert {step.verification.status for step in results.steps} == {VerificationStatus.VERIFIED}
    assert {attempt.status for attempt in results.attempts} == {AttemptStatus.RAN}


def dropped() -> nn.Module:
    return tiny.bert(dropout=0.1, num_hidden_layers=1)


@pytest.mark.parametrize("stack", STACKS)
def test_every_adapter_trains_alike_under_a_wrapped_forward(
    stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy's `forward` must not add gradients to the live model."""
    both(tmp_path, stack, dropped, closure, monkeypatch)
    all_ran(tmp_path)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_loop_trains_alike_under_whatever_stands_around_the_model(
    wrap: Wrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrapped modules, hooks with closures, parametrizations and computed weights."""
    both(tmp_path, "plain torch", dropped, wrap, monkeypatch)
    if wrap not in (weight_norm, spectral_norm, parametrized):
        all_ran(tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks for a deprecated attribute of transformers
@pytest.mark.parametrize("wrap", [closure, every_module])
def test_adapters_train_alike_under_a_wrapped_forward(
    wrap: Wrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA, the frozen base included."""
    both(tmp_path, "plain torch", matrix.lora, wrap, monkeypatch)


# ----------------------------------------------------------------------------------------------------------- the proof


class Holder(nn.Module):
    """A model whose activation is a function that holds the live model."""

    def __init__(self, *, held: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(100, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.classify: Callable[[Tensor], Tensor] = (lambda states: self.head(states)) if held else self._classify

    def _classify(self, states: Tensor) -> Tensor:
        return self.head(states)  # type: ignore[no-any-return]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **rest: Any) -> Any:
        logits = self.classify(self.norm(self.words(input_ids).mean(1)))
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}


BATCH = MicroBatch(inputs={"input_ids": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([0, 1])})


def state(model: nn.Module) -> list[Any]:
    """Return everything of a model that an attack could disturb."""
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [(t._version, t.grad is None, t.requires_grad, t.detach().clone().tolist()) for t in tensors],
        model.training,
    ]


def refused(live: nn.Module, match: str, change: Callable[[nn.Module], None] = lambda copy: None) -> None:
    """Hold that a copy is refused, and that the trial left the live model alone."""
    made = copier(live)(ModelRecipe(class_name="Mine"), {})
    change(made)
    before = state(live)
    with pytest.raises(ModelError, match=match):
        prove_separate(made, live, BATCH, training=True)
    assert state(live) == before


def test_a_copy_that_computes_with_live_weights_is_refused_before_anything_is_computed() -> None:
    """The function holds the live module, or only reads one of its tensors."""
    refused(Holder(held=True), "takes a tensor of the live model")
    live = Holder()
    frozen, norm = live.words.weight.requires_grad_(False), live.norm

    def peek(copy: Any, wanted: Any) -> None:
        copy.classify = lambda states: copy.head(states) + wanted.mean()

    refused(live, "takes a tensor of the live model", lambda copy: peek(copy, frozen))
    refused(live, "takes a tensor of the live model", lambda copy: peek(copy, norm.running_mean))


def test_a_copy_that_shares_memory_or_depends_on_nothing_of_its_own_is_refused() -> None:
    """Weights that are views of live ones, and a third model in its place."""
    live = Holder()

    def share(copy: Any) -> None:
        copy.head.weight = nn.Parameter(live.head.weight.detach())

    refused(live, "shares memory with the live model", share)
    third = Holder()
    refused(live, "nothing that it computes depends", lambda copy: setattr(copy, "forward", third.forward))
    refused(live, "a trial on the copy failed", lambda copy: setattr(copy, "classify", None))


def test_a_right_copy_passes_and_its_running_statistics_are_put_back() -> None:
    """Which a forward pass in training mode changes."""
    live = Holder()
    made = copier(live)(ModelRecipe(class_name="Mine"), {})
    before, mine = state(live), [b.clone() for b in made.buffers()]
    prove_separate(made, live, BATCH, training=True)
    assert state(live) == before and not made.training
    assert all(torch.equal(one, other) for one, other in zip(made.buffers(), mine, strict=True))


def test_a_refused_copy_ends_the_audit_with_a_message_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A part that calls the live head by a function of its own."""

    def hold(model: Any) -> None:
        live = model.classifier
        plain = model.bert.pooler.activation
        model.bert.pooler.activation = Through(lambda states: live(plain(states))[..., :1] * 0 + plain(states))

    both(tmp_path, "plain torch", dropped, hold, monkeypatch)
    said = [line for record in caplog.records if "ModelReached" in (line := record.getMessage())]
    assert len(said) == 1 and "is not separate from the model that is trained" in said[0] and "rebuilt_by" in said[0]
    assert not (tmp_path / "audit" / "report.html").exists()


class Through(nn.Module):
    """Calls a function."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, states: Tensor) -> Tensor:
        return self.call(states)


def test_whatever_an_attack_does_to_the_live_model_is_undone() -> None:
    """Gradients are the same tensors; None stays None; modes, flags and default dtype."""
    live = Holder().train()
    live.words.weight.grad = torch.ones(100, 8)
    before, tensor = state(live), live.words.weight.grad

    def disturb() -> None:
        assert all(p.grad is None for p in live.parameters())
        live.head(torch.ones(1, 8)).sum().backward()
        live.words(torch.tensor([1])).sum().backward()
        live.eval()
        live.head.weight.requires_grad_(False)
        torch.set_default_dtype(torch.float64)
        raise ValueError("trouble")

    with pytest.raises(ValueError, match="trouble"), undisturbed(live):
        disturb()
    assert state(live) == before and live.words.weight.grad is tensor and bool((tensor == 1).all())
    assert live.head.weight.grad is None and torch.get_default_dtype() is torch.float32
