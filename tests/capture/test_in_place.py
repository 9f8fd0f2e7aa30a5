"""A step is verified by a repetition in place, and training does not notice."""

from __future__ import annotations

import copy
import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from leakaudit.audit.stamp import stamp_of
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.in_place import check as in_place
from leakaudit.capture.in_place.repetition import Repetition
from leakaudit.capture.recording import copies, in_place_check
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.registry import attacks
from leakaudit.results.files import load_results
from leakaudit.results.schema import Verification, VerificationStatus
from leakaudit.storage.snapshots import read_manifest
from tests.support import stacks, tiny
from tests.support.in_place_cases import Training, said_to_be_plain, without_audit
from tests.support.stacks import Batch
from tests.support.tiny_trainer import audit_config, kept, stamp, without_side_process

_chance: Any = numpy.random
"""Its global generator, which layers that drop themselves draw from."""

VERIFIED, SCALED, MISMATCH = VerificationStatus.VERIFIED, VerificationStatus.SCALED, VerificationStatus.MISMATCH


def stamps(found: dict[int, Snapshot]) -> list[Verification]:
    """Return the stamps that were given in place; every step must have one."""
    assert found
    checked = [snapshot.checked for snapshot in found.values()]
    assert all(one is not None for one in checked), [s.provenance.not_in_place for s in found.values()]
    return [one for one in checked if one is not None]


def assert_to_the_bit(found: dict[int, Snapshot]) -> None:
    """Every step was repeated without the slightest difference."""
    for one in stamps(found):
        assert (one.status, one.relative_error, one.where) == (VERIFIED, 0.0, "in place"), one


# ---------------------------------------------------------------------- what a rebuilt model does not repeat


def _left_padded() -> list[Batch]:
    batches = stacks.texts(count=3)
    for batch in batches:
        for name in batch:
            batch[name] = batch[name].flip(1)
    assert any(not bool(batch["attention_mask"][:, 0].all()) for batch in batches)
    return batches


def _attention(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = tiny.gpt2_lm()
        model.set_attn_implementation(name)  # type: ignore[operator]
        return model

    return make


def _other_dropout() -> nn.Module:
    model = tiny.bert(dropout=0.1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.dropout = nn.Dropout(0.5)
    return model


def _other_activation() -> nn.Module:
    model: Any = tiny.bert(dropout=0.1)
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.Tanh()
    return said_to_be_plain(model)


def _distilled(model: nn.Module, batch: Batch) -> None:
    found = model(**batch)
    teacher = torch.linspace(-1, 1, found.logits.numel()).view_as(found.logits)
    (found.loss + 0.5 * functional.mse_loss(found.logits, teacher)).backward()


def _entropy(model: nn.Module, batch: Batch) -> None:
    found = model(**batch)
    entropy = -(functional.softmax(found.logits, -1) * functional.log_softmax(found.logits, -1)).sum(-1).mean()
    (found.loss - 0.1 * entropy).backward()


def _r_drop(model: nn.Module, batch: Batch) -> None:
    one, two = model(**batch), model(**batch)
    apart = functional.kl_div(
        functional.log_softmax(one.logits, -1), functional.softmax(two.logits, -1), reduction="batchmean"
    )
    ((one.loss + two.loss) / 2 + apart).backward()


def _adversarial(model: nn.Module, batch: Batch) -> None:
    """FGM: move the word embeddings along their gradient, and add the loss there."""
    table: nn.Parameter = model.get_input_embeddings().weight  # type: ignore[operator]
    model(**batch).loss.backward()
    before = table.data.clone()
    assert table.grad is not None
    table.data.add_(table.grad / table.grad.norm())
    model(**batch).loss.backward()
    table.data = before


def _under_autocast(model: nn.Module, batch: Batch) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()


def _two_backwards(model: nn.Module, batch: Batch) -> None:
    found = model(**batch)
    found.loss.backward(retain_graph=True)
    (0.3 * found.logits.square().mean()).backward()


def _batch_normed() -> nn.Module:
    model: Any = tiny.bert(dropout=0.1)
    model.bert.pooler.activation = nn.Sequential(nn.BatchNorm1d(tiny.HIDDEN, affine=False), nn.Tanh())
    return said_to_be_plain(model, normed=True)


class _Counting(nn.Module):
    """Depends on how often it was called, in four ways."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
        self.level = torch.ones(())
        self.seen: list[int] = []

    def forward(self, states: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1  # type: ignore[operator, assignment]
        self.level.mul_(1.01)
        self.seen.append(self.calls)
        return torch.tanh(states * (1 + 0.1 * self.calls + 0.1 * self.count + self.level))  # type: ignore[operator]


def _stateful() -> nn.Module:
    model: Any = tiny.bert()
    model.bert.pooler.activation = _Counting()
    return said_to_be_plain(model, counting=True)


class _Lucky(nn.Module):
    """Leaves itself out by chance, with the generators of Python and numpy."""

    def forward(self, states: Tensor) -> Tensor:
        return states if random.random() < 0.5 else torch.tanh(states * float(_chance.rand()))


def _dropping_layers() -> nn.Module:
    model: Any = tiny.bert()
    model.bert.pooler.activation = _Lucky()
    return said_to_be_plain(model)


def _checkpointed(reentrant: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: Any = tiny.bert(dropout=0.1)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model  # type: ignore[no-any-return]

    return make


def _bfloat16() -> nn.Module:
    return tiny.bert(dropout=0.1).to(torch.bfloat16)


def _hooked() -> nn.Module:
    model = tiny.bert(dropout=0.1)
    table: nn.Parameter = model.get_input_embeddings().weight  # type: ignore[operator]
    table.register_hook(lambda gradient: gradient * 0.5)
    return model


def _saliency(model: nn.Module, batch: Batch) -> None:
    loss = model(**batch).loss
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    loss.backward()


def _some_inputs(model: nn.Module, batch: Batch) -> None:
    loss = model(**batch).loss
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    loss.backward(inputs=list(model.parameters()))


def _by_hand(model: nn.Module, batch: Batch) -> None:
    parameters = list(model.parameters())
    found = torch.autograd.grad(model(**batch).loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


def _other_kernel(model: nn.Module, batch: Batch) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = model(**batch).loss
    loss.backward()


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _cast(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


_TEXTS: dict[str, Any] = {"tokenizer": tiny.gpt2_tokenizer}

KINDS = {
    "plain": Training(),
    "weights in bfloat16": Training(model=_bfloat16),
    "autocast": Training(_under_autocast),
    "left padding, sdpa": Training(model=_attention("sdpa"), batches=_left_padded(), **_TEXTS),
    "left padding, sdpa, bfloat16": Training(
        model=lambda: _attention("sdpa")().to(torch.bfloat16), batches=_left_padded(), **_TEXTS
    ),
    "another attention kernel": Training(_other_kernel, _attention("sdpa"), _left_padded(), **_TEXTS),
    "dropout changed on modules": Training(model=_other_dropout),
    "activation replaced": Training(model=_other_activation),
    "distillation": Training(_distilled),
    "distillation, bfloat16": Training(_distilled, _bfloat16),
    "entropy bonus": Training(_entropy),
    "R-Drop with labels inside": Training(_r_drop),
    "adversarial training (FGM)": Training(_adversarial),
    "two backward passes of one forward pass": Training(_two_backwards, _bfloat16),
    "batch norm": Training(model=_batch_normed),
    "counters": Training(model=_stateful),
    "chance of Python and numpy": Training(model=_dropping_layers),
    "checkpoints, reentrant": Training(model=_checkpointed(True)),
    "checkpoints, not reentrant": Training(model=_checkpointed(False)),
    "hook on a parameter": Training(model=_hooked),
    "saliency before the loss": Training(_saliency),
    "gradients of some inputs": Training(_some_inputs),
    "gradients set by hand": Training(_by_hand),
    "gradients in other tensors": Training(after=_cast),
    "clipping": Training(after=_clip, options={"max_grad_norm": 0.01}),
}


@pytest.mark.filterwarnings("ignore:.*enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_repeated_to_the_bit_and_training_does_not_notice(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is `verified` with an error of 0; training ends as without an audit."""
    with without_audit(monkeypatch):
        random.seed(0)
        _chance.seed(0)
        _, wanted = KINDS[kind].run(tmp_path / "off")
    random.seed(0)
    _chance.seed(0)
    found, left = KINDS[kind].run(tmp_path / "on")
    assert len(found) == 3
    assert_to_the_bit(found)
    assert left.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(left[name], wanted[name])] == []


def test_a_wrong_batch_is_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One word of the kept batch is replaced: the same loop does not give that update."""
    real = Repetition.update

    def with_another_word(self: Repetition, names: Any) -> dict[str, Tensor]:
        call = self.passes[0].call
        assert call is not None
        ids = call.kwargs["input_ids"].tensor
        ids[0, 2] = (ids[0, 2] + 1) % len(tiny.VOCABULARY)
        found = real(self, names)
        ids[0, 2] = (ids[0, 2] - 1) % len(tiny.VOCABULARY)
        return found

    for kind in ("plain", "weights in bfloat16", "autocast"):
        with monkeypatch.context() as patch:
            patch.setattr(Repetition, "update", with_another_word)
            found, _ = KINDS[kind].run(tmp_path / kind)
        assert {one.status for one in stamps(found)} == {MISMATCH}, kind


def test_a_step_that_a_rebuilt_model_would_refuse_is_verified(tmp_path: Path) -> None:
    """The rebuilt model has another activation."""
    found, _ = KINDS["activation replaced"].run(tmp_path)
    assert stamp(found[0]).status is MISMATCH
    assert found[0].checked is not None and found[0].checked.status is VERIFIED


@pytest.mark.parametrize(
    ("kind", "status"), [("activation replaced", VerificationStatus.UNVERIFIABLE), ("batch norm", VERIFIED)]
)
def test_a_step_is_no_evidence_where_attacks_are_given_another_model(
    kind: str, status: VerificationStatus, tmp_path: Path
) -> None:
    """A user's function makes the attacked model, perhaps with another activation."""
    found, _ = KINDS[kind].run(tmp_path)
    snapshot = found[0]
    client = ClientStep(snapshot.observation.model, snapshot.truth, snapshot.recipe, snapshot.observation.facts)
    seen = stamp_of(snapshot, client)
    assert seen.status is status
    assert status is VERIFIED or "another model than the client's" in seen.note


def _louder_attention() -> nn.Module:
    model: Any = tiny.bert(dropout=0.1)
    attention = model.bert.encoder.layer[0].attention.self
    plain = attention.forward
    attention.forward = lambda *args, **kwargs: (3 * plain(*args, **kwargs)[0] + 1, None)
    return model  # type: ignore[no-any-return]


def _shifted_words() -> nn.Module:
    model: Any = tiny.bert(dropout=0.1)
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: 2 * output + 0.5)
    return model  # type: ignore[no-any-return]


def _looked_at() -> nn.Module:
    model: Any = tiny.bert(dropout=0.1)
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: None)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "status"),
    [
        (_louder_attention, VerificationStatus.UNVERIFIABLE),
        (_shifted_words, VerificationStatus.UNVERIFIABLE),
        (_looked_at, VERIFIED),
    ],
)
def test_a_step_is_no_evidence_where_a_part_of_the_model_was_patched_to_compute_something_else(
    model: Callable[[], nn.Module], status: VerificationStatus, tmp_path: Path
) -> None:
    """Attacks get the class's model, and may miss what the client's own reveals."""
    found, _ = Training(model=model).run(tmp_path)
    assert_to_the_bit(found)
    snapshot = found[0]
    client = ClientStep(snapshot.observation.model, snapshot.truth, snapshot.recipe, snapshot.observation.facts)
    seen = stamp_of(snapshot, client)
    assert seen.status is status
    assert status is VERIFIED or "without the hooks and functions on its parts" in seen.note


def test_the_battery_takes_the_stamp_and_does_not_compute_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report says where the step was checked, and what that took."""
    monkeypatch.setattr("leakaudit.audit.stamp.verify", lambda *a: pytest.fail("computed again"))
    config = {"schedule": "inline", "attacks": ("idlg",), "controls": 0}
    model = tiny.bert(dropout=0.1).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path, **config))
    with audit:
        for batch in stacks.classes(count=2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert audit.folder is not None
    results = load_results(audit.folder / "results.json")
    assert [(step.verification.status, step.verification.where) for step in results.steps] == [
        (VERIFIED, "in place")
    ] * 2
    assert 0 < results.overhead.check_s < results.overhead.blocked_s


def test_a_check_on_the_rebuilt_model_can_be_asked_for(tmp_path: Path) -> None:
    """`check: rebuilt` costs training nothing."""
    found, _ = dataclasses.replace(Training(), config={"check": "rebuilt"}).run(tmp_path)
    assert [snapshot.checked for snapshot in found.values()] == [None] * 3
    assert all(snapshot.provenance.check_seconds == 0 for snapshot in found.values())


def test_the_cost_is_counted(tmp_path: Path) -> None:
    """In the snapshot."""
    found, _ = Training().run(tmp_path)
    assert all(snapshot.provenance.check_seconds > 0 for snapshot in found.values())


def test_a_step_whose_gradients_are_large_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another set of gradients could exhaust the memory: the side process checks it."""
    with without_audit(monkeypatch):
        _, wanted = Training().run(tmp_path / "off")
    monkeypatch.setattr(copies, "POOL_BYTES", 1_000)
    found, left = Training().run(tmp_path / "on")
    assert [snapshot.checked for snapshot in found.values()] == [None] * 3
    assert all("a repetition would need as much again" in one.provenance.not_in_place for one in found.values())
    assert all(torch.equal(left[name], wanted[name]) for name in wanted)


def test_a_factor_that_nobody_told_is_found_in_bfloat16_as_well(tmp_path: Path) -> None:
    """A scaled gradient in bfloat16 is rounded again; the factor is found."""

    found, _ = Training(model=_bfloat16, after=_clip).run(tmp_path)
    for one in stamps(found):
        assert one.status is SCALED
        assert "clipped to a norm of 0.01" in one.note


# ---------------------------------------------------------------------- nothing is left changed


def _everything(model: nn.Module, optimizer: Any) -> list[Any]:
    """Return all that a repetition could leave changed, as bits and identities."""
    states = [(module, dict(vars(module))) for module in model.modules()]
    found: list[Any] = []
    for name, parameter in model.named_parameters():
        found += [name, id(parameter), parameter.data_ptr(), parameter._version, parameter.detach().clone()]
        found += [id(parameter.grad), parameter.requires_grad]
        found += [] if parameter.grad is None else [parameter.grad.clone(), parameter.grad._version]
        found += [len(parameter._backward_hooks or ()), len(parameter._post_accumulate_grad_hooks or ())]
    for module, state in states:
        found += [module.training, *(id(value) for value in state.values())]
        found += [value.clone() for value in state.values() if isinstance(value, Tensor)]
        found += [list(value) for value in state.values() if isinstance(value, list)]
        found += [v if v is None else (id(v), v._version, v.clone()) for v in module._buffers.values()]
        found += [len(value) for key, value in state.items() if "hooks" in key and value is not None]
    found += [torch.get_rng_state(), random.getstate(), *(torch.as_tensor(x) for x in _chance.get_state()[1:])]
    found += [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()]
    found += [torch.get_num_threads(), torch.backends.cuda.flash_sdp_enabled(), torch.is_inference_mode_enabled()]
    return [*found, len(optimizer.state)]


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(_equal, one, two))
    return bool(one == two)


CALLED_AGAIN = "LEAKAUDIT_TEST_CALLED_AGAIN"
"""Says that a step is repeated. Whatever the model itself keeps is put back before that."""


class _FailsWhenCalledAgain(nn.Module):
    """Raises in a pass of the repetition, after it has changed things."""

    def __init__(self, inner: nn.Module, fails: str) -> None:
        super().__init__()
        self.inner, self.fails = inner, fails

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.inner(states) + torch.rand(())
        again = CALLED_AGAIN in os.environ
        if again and self.fails == "forward":
            raise MemoryError
        if again and self.fails == "backward":
            found.register_hook(self._fail)
        return found

    def _fail(self, gradient: Tensor) -> None:
        raise ValueError("mine")


@pytest.mark.parametrize("fails", ["nowhere", "forward", "backward", "comparison"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.*enable` is deprecated:FutureWarning")
def test_nothing_is_left_changed_whatever_happens(
    fails: str, reentrant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, gradients, buffers, counters, hooks, modes and generators, to the bit."""
    model: Any = _checkpointed(True)() if reentrant else tiny.bert(dropout=0.1)
    odd = _FailsWhenCalledAgain(nn.Sequential(nn.BatchNorm1d(tiny.HIDDEN, affine=False), _Counting()), fails)
    model.bert.pooler.activation = odd
    said_to_be_plain(model)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fired: list[str] = []
    model.classifier.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("accumulated"))
    seen: dict[str, Any] = {}
    real = in_place.check

    def checked(*args: Any) -> Any:
        seen["before"] = _everything(model, optimizer)
        monkeypatch.setenv(CALLED_AGAIN, "1")
        if fails == "comparison":
            monkeypatch.setattr("leakaudit.capture.in_place.check.verify", lambda *a, **k: 1 / 0)
        try:
            return real(*args)
        finally:
            monkeypatch.delenv(CALLED_AGAIN)
            seen["after"] = _everything(model, optimizer)

    monkeypatch.setattr(in_place_check, "check", checked)
    batch = stacks.classes(count=1)[0]
    with (
        without_side_process(),
        watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path)) as audit,
    ):
        model(**batch).loss.backward()
        torch.rand(3), random.random(), _chance.rand()  # the generators are elsewhere than where the pass left them
        optimizer.step()
    before, after = seen["before"], seen["after"]
    assert len(before) == len(after)
    assert [pair for pair in zip(before, after, strict=True) if not _equal(*pair)] == []
    assert fired == ["accumulated"]
    assert audit.folder is not None
    (path,) = (audit.folder / "spool").glob("*.ready")
    snapshot = read_manifest(path)
    if fails == "nowhere":
        assert snapshot.checked is not None and snapshot.checked.relative_error == 0.0
    else:
        assert snapshot.checked is None
        assert "raised" in snapshot.provenance.not_in_place and "mine" not in snapshot.provenance.not_in_place


# ---------------------------------------------------------------------- what the forward hooks hold


def _direct(model: nn.Module, batch: Batch) -> None:
    model.forward(**batch).loss.backward()


def test_a_loop_that_calls_forward_itself_is_seen_from_the_second_step_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such calls reach no hook: only the first due step is lost, with a reason."""
    with without_audit(monkeypatch):
        _, wanted = Training(_direct).run(tmp_path / "off")
    found, left = Training(_direct).run(tmp_path / "on")
    assert list(found) == [1, 2]
    assert_to_the_bit(found)
    assert all(torch.equal(left[name], wanted[name]) for name in wanted)
    assert "if the loop calls `forward` itself" in caplog.text


def test_a_loop_that_calls_both_ways_is_seen_once_each(tmp_path: Path) -> None:
    """A call through the hooks reaches the watched `forward`, too, and is one pass."""

    def both(model: nn.Module, batch: Batch) -> None:
        if model.turn % 2 == 0:  # type: ignore[operator]
            model.forward(**batch).loss.backward()
        else:
            (model(**batch).loss / 2).backward()
            (model.forward(**batch).loss / 2).backward()
        model.turn += 1  # type: ignore[operator, assignment]

    def make() -> nn.Module:
        model: Any = tiny.bert()
        model.turn = 0
        return model  # type: ignore[no-any-return]

    found, _ = Training(both, make, stacks.classes(count=4)).run(tmp_path)
    assert [len(found[step].truth.micro_batches) for step in found] == [2, 1, 2]
    assert_to_the_bit(found)


def test_a_copy_made_in_a_recorded_step_calls_itself(tmp_path: Path) -> None:
    """Averaged weights, made with `deepcopy`, must not call the live model."""
    copies: list[Any] = []

    def copying(model: nn.Module, batch: Batch) -> None:
        copies.append(copy.deepcopy(model))
        _direct(model, batch)

    Training(copying).run(tmp_path)
    for number, one in enumerate(copies):
        assert one.forward.__self__ is one, f"copy {number}"


def test_the_same_texts_with_other_labels_are_other_examples(tmp_path: Path) -> None:
    """Two batches in one backward pass; with equal labels they would be one (R-Drop)."""

    def relabelled(model: nn.Module, batch: Batch) -> None:
        other = {**batch, "labels": 1 - batch["labels"]}
        (model(**batch).loss + model(**other).loss).backward()

    found, _ = Training(relabelled).run(tmp_path / "other")
    assert [snapshot.truth.labels() for snapshot in found.values()] == [[0, 1, 1, 0]] * 3
    assert_to_the_bit(found)
    found, _ = KINDS["R-Drop with labels inside"].run(tmp_path / "same")
    assert [snapshot.truth.labels() for snapshot in found.values()] == [[0, 1]] * 3


def test_the_divisor_is_the_losss_own_where_another_gradient_was_taken_before(tmp_path: Path) -> None:
    """A saliency map is no second loss; a wrong `loss_divisor` would weaken attacks."""
    found, _ = KINDS["saliency before the loss"].run(tmp_path)
    assert [snapshot.observation.facts.loss_divisor for snapshot in found.values()] == [1.0] * 3


def test_what_is_held_is_bounded_for_the_whole_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight micro-batches with an outer loss are too large: the step is refused."""

    def accumulated(model: nn.Module, batch: Batch) -> None:
        labels = batch.pop("labels")
        for _ in range(8):
            functional.cross_entropy(model(**batch).logits, labels).backward()

    logits = 2 * 2 * 4
    monkeypatch.setattr("leakaudit.capture.observing.forward_hooks.MOST_BYTES", 7 * logits)
    found, _ = Training(accumulated).run(tmp_path / "seven")
    assert found == {}
    assert "from outputs of more than" in caplog.text and "MB a step" in caplog.text
    monkeypatch.setattr("leakaudit.capture.observing.forward_hooks.MOST_BYTES", 8 * logits)
    found, _ = Training(accumulated).run(tmp_path / "eight")
    assert len(found) == 3


def test_what_arrives_at_large_outputs_is_held_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is on the CPU: a device full of activations has no room for it."""
    monkeypatch.setattr("leakaudit.capture.observing.forward_hooks.SMALL_BYTES", 0)
    held: list[Tensor] = []
    real = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args[:1] == ("cpu",) and kwargs.get("copy") and self.shape == (2, 2):
            held.append(self)
        return real(self, *args, **kwargs)

    def outside(model: nn.Module, batch: Batch) -> None:
        labels = batch.pop("labels")
        functional.cross_entropy(model(**batch).logits, labels).backward()

    monkeypatch.setattr(Tensor, "to", to)
    found, _ = Training(outside).run(tmp_path)
    assert len(held) >= len(found) == 3
    assert_to_the_bit(found)


def test_a_second_loss_on_large_outputs_is_found_out_and_held_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sums of large logits show that there is a second loss; one step is lost."""
    monkeypatch.setattr("leakaudit.capture.observing.forward_hooks.SMALL_BYTES", 4)
    found, _ = Training(_distilled).run(tmp_path / "mixed")
    assert list(found) == [1, 2]
    assert_to_the_bit(found)
    assert "computed from outputs of the model beside the loss that the model computes itself" in caplog.text
    found, _ = Training().run(tmp_path / "plain")
    assert list(found) == [0, 1, 2]
    assert all(set(batch.output_gradients) == {"loss"} for one in found.values() for batch in one.truth.micro_batches)


# ---------------------------------------------------------------------- whose loss it is


def _outside(model: nn.Module, batch: Batch) -> None:
    labels = batch.pop("labels")
    (3 * functional.cross_entropy(model(**batch).logits, labels)).backward()


def _weighed(model: nn.Module, batch: Batch) -> None:
    labels = batch.pop("labels")
    functional.multi_margin_loss(model(**batch).logits, labels).backward()


def _squares(model: nn.Module, batch: Batch) -> None:
    batch.pop("labels")
    model(**batch).logits.square().mean().backward()


def _patched() -> nn.Module:
    """The class computes one loss, and a replaced `forward` another one, as in TRL."""
    model: Any = tiny.bert()
    plain = model.forward

    def forward(**inputs: Any) -> Any:
        found = plain(**inputs)
        found.loss = found.logits.square().mean()
        return found

    model.forward = forward
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("training", "own"),
    [
        (Training(), True),
        (Training(_outside), True),
        (Training(_outside, _bfloat16), True),
        (Training(_under_autocast), True),
        (Training(_weighed), False),
        (Training(_distilled), False),
        (Training(model=_patched), False),
    ],
)
def test_it_is_public_whether_the_loss_is_the_models_own(training: Training, own: bool, tmp_path: Path) -> None:
    """The loop tells the labels of its own loss; up to a factor it is the model's own."""
    found, _ = training.run(tmp_path)
    assert_to_the_bit(found)
    assert {snapshot.observation.facts.own_loss for snapshot in found.values()} == {own}
    matching: Any = attacks.create("tag", {})
    applies = matching.applies(found[0].observation)
    assert bool(applies) is own
    assert own or "loss is not the one that the model computes itself" in applies.reason


def test_each_step_is_asked_whose_loss_it_is(tmp_path: Path) -> None:
    """Under the loop's own loss, matching the model's loss proves nothing."""
    losses = iter([_outside, _weighed, _outside])
    found, _ = Training(lambda model, batch: next(losses)(model, batch)).run(tmp_path)
    assert [snapshot.observation.facts.own_loss for snapshot in found.values()] == [True, False, True]


@pytest.mark.parametrize(
    ("losses", "own"), [((_outside, _outside), True), ((_outside, _squares), False), ((_squares, _outside), False)]
)
def test_each_pass_of_a_step_is_asked_whose_loss_it_is(losses: Any, own: bool, tmp_path: Path) -> None:
    """Two micro-batches of one step, each with a loss outside the model."""
    torch.manual_seed(0)
    model = tiny.bert(dropout=0.1).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    audit = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    with without_side_process(), audit:
        for batch, loss in zip(stacks.classes(count=2), losses, strict=True):
            audit.batch(batch)
            loss(model, dict(batch))
        optimizer.step()
    (snapshot,) = kept(audit).values()
    assert snapshot.observation.facts.own_loss is own


# ---------------------------------------------------------------------- what does not come through the model's outputs


class _Penalised:
    """A penalty on the weights' distance from zero, or from those of the first step."""

    def __init__(self, strength: float, anchored: bool) -> None:
        self.strength, self.anchored = strength, anchored
        self.anchor: dict[str, Tensor] = {}

    def __call__(self, model: nn.Module, batch: Batch) -> None:
        if not self.anchor:
            self.anchor = {n: p.detach().clone() * self.anchored for n, p in model.named_parameters()}
        penalty = sum(((p - self.anchor[n]) ** 2).sum() for n, p in model.named_parameters())
        (model(**batch).loss + self.strength * penalty).backward()


def _with_gradient_penalty(model: nn.Module, batch: Batch) -> None:
    table: nn.Parameter = model.get_input_embeddings().weight  # type: ignore[operator]
    loss = model(**batch).loss
    (gradient,) = torch.autograd.grad(loss, table, create_graph=True)
    (loss + gradient.norm()).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("step", "says"),
    [
        (_Penalised(0.01, anchored=False), "zero (an L2 penalty)"),
        (_Penalised(0.05, anchored=True), "those at the beginning of the run (FedProx, L2-SP)"),
        (_with_gradient_penalty, "a penalty on gradients"),
    ],
)
def test_a_penalty_is_named_and_its_step_is_attacked(step: Any, says: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The outputs do not show it: recovered text is proof, silence no evidence."""
    if isinstance(step, _Penalised):
        step.anchor = {}
    found, _ = Training(step, lambda: tiny.bert(dropout=0.1).to(dtype)).run(tmp_path)
    checked = stamps(found)
    if says.startswith("those"):  # at the first step there is no distance yet
        assert checked[0].status is VERIFIED
    for one in checked[1:]:
        assert one.status is VerificationStatus.UNVERIFIABLE, one
        assert says in one.note


def test_noise_that_nobody_declared_is_no_penalty(tmp_path: Path) -> None:
    """A mismatch, as before."""

    def noise(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(0.01 * torch.randn_like(parameter))

    found, _ = Training(after=noise).run(tmp_path)
    assert {one.status for one in stamps(found)} == {MISMATCH}


# ---------------------------------------------------------------------- where the rebuilt model checks


def test_a_rebuilt_model_attends_as_the_clients_did(tmp_path: Path) -> None:
    """Left padding gives other values under eager attention, which attacks need."""
    training = dataclasses.replace(KINDS["left padding, sdpa"], config={"check": "rebuilt"})
    found, _ = training.run(tmp_path)
    for snapshot in found.values():
        checked = stamp(snapshot)
        assert (checked.status, checked.where) == (VERIFIED, "rebuilt")
        assert checked.relative_error is not None and checked.relative_error < 1e-5
        assert snapshot.observation.model.config._attn_implementation == "eager"  # type: ignore[union-attr]


def test_a_call_that_cannot_be_repeated_is_checked_on_the_rebuilt_model(tmp_path: Path) -> None:
    """The call changes an argument, such as a cache; the reason is kept with the step."""

    def cached(model: nn.Module, batch: Batch) -> None:
        model(**batch, past_key_values=transformers.DynamicCache()).loss.backward()

    found, _ = Training(cached, _attention("sdpa"), _left_padded(), **_TEXTS).run(tmp_path)
    for snapshot in found.values():
        assert snapshot.checked is None
        assert (
            snapshot.provenance.not_in_place
            == "the model was called with a DynamicCache, which the call may have changed"
        )
        assert stamp(snapshot).status is VERIFIED


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_gradients_of_examples_are_left_to_the_rebuilt_model(tmp_path: Path) -> None:
    """Opacus keeps them on the parameters, and a repetition would add to them."""
    found = stacks.private_run(tmp_path, sigma=0.0)[0]
    assert found
    for snapshot in found.values():
        assert snapshot.checked is None
        assert snapshot.provenance.not_in_place
