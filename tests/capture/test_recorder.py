"""The recorder copies what the optimizer gets, and disturbs nothing."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.capture.observing.optimizers import base_optimizer
from leakaudit.capture.recording import copies
from leakaudit.capture.recording.kept_step import KeptStep
from leakaudit.capture.recording.recorder import Recorder
from leakaudit.client.batches import public_facts
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.snapshot import Manifest, Provenance
from leakaudit.errors import SnapshotError
from leakaudit.models.recipe import ModelRecipe
from tests.support import tiny

IDS = torch.tensor([[2, 6, 9, 7, 3]])


def manifest(model: nn.Module, step: int = 0) -> Manifest:
    """Return a manifest of the tiny BERT."""
    facts = public_facts(model, tiny.bert_tokenizer(), task="classification", training=True)
    return Manifest(
        model=ModelRecipe.of(model),
        facts=facts,
        recipe=StepRecipe(),
        provenance=Provenance(framework="loop", step=step),
    )


class Loop:
    """A plain training loop on the tiny BERT, with a recorder that keeps its copies."""

    def __init__(self, make: Callable[..., Any] = torch.optim.SGD, write: Any = None, **options: Any) -> None:
        self.model = tiny.bert().train()
        self.manifest = manifest(self.model)
        self.optimizer = make(self.model.parameters(), lr=0.1, **options)
        self.written: list[KeptStep] = []
        self.recorder = Recorder(self.model, self.optimizer, write or self.written.append)
        self.recorder.install()

    def forward(self, ids: Tensor = IDS) -> Any:
        inputs = {"input_ids": ids, "labels": torch.zeros(len(ids), dtype=torch.long)}
        return self.model(**inputs).loss

    def update(self) -> dict[str, Tensor]:
        return {n: p.grad.detach().clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def step(self, number: int = 0) -> dict[str, Tensor]:
        """Make one recorded step; return the gradient that the optimizer got."""
        self.recorder.start(number, self.manifest)
        self.optimizer.zero_grad()
        self.forward().backward()
        update = self.update()
        self.optimizer.step()
        return update

    def wait(self) -> list[KeptStep]:
        while self.recorder.writing():
            self.recorder.written(10)
        return self.written


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def same(one: Any, two: Any) -> bool:
    """Return whether two updates are equal bit by bit."""
    return set(one) == set(two) and all(torch.equal(dense(one[name]), dense(two[name])) for name in two)


def test_the_update_is_what_the_optimizer_got_and_the_weights_are_those_before() -> None:
    """Bit by bit, with the batch and the random state of its forward pass."""
    loop = Loop()
    weights = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    state = torch.get_rng_state()
    update = loop.step(7)
    kept = loop.wait()[0]
    assert kept.step == 7
    assert same(kept.update, update)
    assert all(torch.equal(kept.weights[name], weights[name]) for name in weights)
    assert torch.equal(kept.truth.micro_batches[0].rng["cpu"], state)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_closure_is_run_before_the_copy_is_made() -> None:
    """Before its closure, such an optimizer holds the previous step's gradients."""
    for keyword in (True, False):
        loop = Loop()
        loop.step(0)
        loop.wait()
        seen: dict[str, Tensor] = {}

        def closure(loop: Loop = loop, seen: dict[str, Tensor] = seen) -> Any:
            loop.optimizer.zero_grad()
            loss = loop.forward(torch.tensor([[2, 11, 12, 13, 14, 3]]))
            loss.backward()
            seen.update(loop.update())
            return loss

        loop.recorder.start(1, loop.manifest)
        loss = loop.optimizer.step(closure=closure) if keyword else loop.optimizer.step(closure)
        assert isinstance(loss, Tensor)
        kept = loop.wait()[1]
        assert same(kept.update, seen)
        assert kept.truth.micro_batches[0].inputs["input_ids"].shape == (1, 6)


def test_a_closure_that_is_run_again_and_again_is_recorded_at_its_first_run() -> None:
    """L-BFGS evaluates the loss several times, the first time at the old weights."""
    loop = Loop(torch.optim.LBFGS, max_iter=4)
    runs: list[dict[str, Tensor]] = []

    def closure() -> Any:
        loop.optimizer.zero_grad()
        loss = loop.model(input_ids=IDS, labels=torch.zeros(1, dtype=torch.long)).loss
        loss.backward()
        runs.append(loop.update())
        return loss

    loop.recorder.start(0, loop.manifest)
    loop.optimizer.step(closure)
    assert len(runs) > 1
    assert len(loop.wait()) == 1
    assert same(loop.written[0].update, runs[0])


def test_row_9_the_scale_of_a_grad_scaler_is_taken_out_for_fused_optimizers() -> None:
    """They unscale inside their step, after our hook."""
    loop = Loop(torch.optim.AdamW, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop.recorder.start(0, loop.manifest)
    loss = loop.forward()
    scaler.scale(loss).backward()
    scaled = loop.update()
    scaler.step(loop.optimizer)
    kept = loop.wait()[0]
    assert all(torch.allclose(dense(kept.update[name]), scaled[name] / 1024.0) for name in scaled)


def test_row_10_a_step_that_the_scaler_skips_leaves_no_batch_behind() -> None:
    """The adapter disarms at the end of the step; the next one has its own batch only."""
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step, bad in ((0, True), (1, False)):
        loop.recorder.start(step, loop.manifest)
        loop.optimizer.zero_grad()
        scaler.scale(loop.forward()).backward()
        if bad:
            next(loop.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(loop.optimizer)
        scaler.update()
        loop.recorder.cancel()
    kept = loop.wait()
    assert [k.step for k in kept] == [1]
    assert len(kept[0].truth.micro_batches) == 1


def test_row_4_what_happens_after_the_hook_does_not_reach_the_copy() -> None:
    """Weights, gradients and the batch are overwritten before the writer runs."""
    gate = threading.Event()
    written: list[KeptStep] = []

    def slow(kept: KeptStep) -> None:
        gate.wait(10)
        written.append(kept)

    loop = Loop(write=slow)
    ids = IDS.clone()
    loop.recorder.start(0, loop.manifest)
    loop.forward(ids).backward()
    update = loop.update()
    loop.optimizer.step()
    ids.zero_()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.fill_(7.0)
            parameter.grad = torch.full_like(parameter, 7.0)
    gate.set()
    loop.wait()
    assert same(written[0].update, update)
    assert torch.equal(written[0].truth.micro_batches[0].inputs["input_ids"], IDS)
    assert not any(bool((value == 7.0).all()) for value in written[0].weights.values())


def test_a_step_is_dropped_while_the_last_one_is_still_written() -> None:
    """Its buffers are in use; training does not wait for the disk."""
    gate = threading.Event()
    written: list[int] = []

    def slow(kept: KeptStep) -> None:
        gate.wait(10)
        written.append(kept.step)

    loop = Loop(write=slow)
    loop.step(0)
    assert loop.recorder.writing()
    loop.step(1)
    gate.set()
    loop.wait()
    assert written == [0]
    assert loop.recorder.counters.kept == 1


def test_buffers_are_there_before_the_first_step() -> None:
    """The first copy goes into memory that was touched already, as every later one."""
    loop = Loop()
    before = {name: buffer.data_ptr() for name, buffer in loop.recorder.buffers.tensors.items()}
    loop.step()
    loop.wait()
    after = {name: buffer.data_ptr() for name, buffer in loop.recorder.buffers.tensors.items()}
    assert before and before.items() <= after.items()
    added = {loop.model.get_parameter(name.removeprefix("u/")) for name in after.keys() - before.keys()}
    assert added <= {m.weight for m in loop.model.modules() if isinstance(m, nn.Embedding)}, "whose rows are few"


def test_buffers_are_reused_from_step_to_step() -> None:
    """Fresh memory would cost several times as much."""
    loop = Loop()
    loop.step(0)
    first = {name: value.data_ptr() for name, value in loop.wait()[0].update.items() if not value.is_sparse}
    loop.step(1)
    again = {name: value.data_ptr() for name, value in loop.wait()[1].update.items() if not value.is_sparse}
    assert again == first and len(first) > 10


@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_that_the_optimizer_does_not_move_are_frozen_or_the_step_is_not_kept(
    frozen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Another optimizer may move such a parameter, unless `requires_grad` is off."""
    model = tiny.bert().train()
    head = [p for name, p in model.named_parameters() if name.startswith("classifier")]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or name.startswith("classifier"))
    optimizer = torch.optim.SGD(head, lr=0.1)
    written: list[KeptStep] = []
    recorder = Recorder(model, optimizer, written.append)
    recorder.install()
    recorder.start(0, manifest(model))
    inputs = {"input_ids": IDS, "labels": torch.tensor([1])}
    model(**inputs).loss.backward()
    optimizer.step()
    recorder.remove()
    if frozen:
        assert set(written[0].update) == {"classifier.weight", "classifier.bias"}
    else:
        assert not written and recorder.counters.failed == 1
        assert (
            "the model has 39 parameters (first 'bert.embeddings.word_embeddings.weight') that have a gradient"
            in caplog.text
        )
        assert "give the audit all optimizers, `watch(model, [a, b])`" in caplog.text


def test_sparse_gradients_are_kept_with_the_rows_of_the_words() -> None:
    """`nn.Embedding(sparse=True)` gives a sparse gradient."""
    loop = Loop()
    loop.model.get_input_embeddings().sparse = True  # type: ignore[operator]
    loop.step()
    kept = loop.wait()[0]
    rows = dense(kept.update[tiny.word_table(loop.model)]).norm(dim=1)  # (V,)
    assert set(rows.nonzero().flatten().tolist()) == set(IDS[0].tolist())


@pytest.mark.parametrize(
    ("inputs", "drop_gradients", "message"),
    [
        ({"input_ids": torch.zeros(0, 5, dtype=torch.long)}, False, "its batch was empty"),
        ({"labels": torch.zeros(1)}, False, "has no `input_ids`"),
        ({"input_ids": IDS}, True, "held no gradient when it stepped"),
    ],
)
def test_a_step_that_nothing_can_be_said_about_counts_as_failed(
    inputs: dict[str, Tensor], drop_gradients: bool, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names what is missing; the recorder continues with the next step."""
    loop = Loop()
    forward = loop.model.forward
    loop.model.forward = lambda **given: forward(input_ids=IDS, labels=torch.tensor([1]))  # whatever it is called with
    for step in range(2):
        loop.recorder.start(step, loop.manifest)
        loop.model(**inputs).loss.backward()
        if drop_gradients:
            loop.optimizer.zero_grad()
        loop.optimizer.step()
        loop.wait()
    assert loop.recorder.counters.failed == 2
    assert not loop.written and not loop.recorder.disabled
    assert caplog.text.count(message) == 1
    loop.step(2)
    assert [kept.step for kept in loop.wait()] == [2]


def test_a_writer_that_fails_for_a_known_reason_is_tried_again() -> None:
    """A full disk may have room at the next step."""
    answers = [SnapshotError("no space"), None]

    def write(kept: KeptStep) -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    loop = Loop(write=write)
    loop.step(0)
    loop.wait()
    loop.step(1)
    loop.wait()
    assert (loop.recorder.counters.failed, loop.recorder.counters.kept) == (1, 1)


def test_anything_unforeseen_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """One warning with the type; its message might quote the batch."""

    def write(kept: KeptStep) -> None:
        raise ValueError("the old dog")

    loop = Loop(write=write)
    for step in range(3):
        loop.step(step)
        loop.wait()
    assert loop.recorder.disabled
    assert caplog.text.count(" after a ValueError") == 1
    assert "dog" not in caplog.text


def test_a_copy_that_fails_does_not_reach_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, say: the step is made all the same."""
    loop = Loop()

    def fail(*args: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(loop.recorder.buffers, "into_buffer", fail)
    before = next(loop.model.parameters()).detach().clone()
    loop.step()
    assert loop.recorder.disabled
    assert not torch.equal(next(loop.model.parameters()).detach(), before)


def test_hooks_are_set_once_and_taken_off() -> None:
    """However often `install` is called."""
    loop = Loop()
    loop.recorder.install()
    assert len(loop.optimizer._optimizer_step_pre_hooks) == 1
    loop.recorder.remove()
    loop.recorder.remove()
    assert not loop.optimizer._optimizer_step_pre_hooks and not loop.optimizer._optimizer_step_post_hooks


def test_the_time_of_the_training_thread_is_counted() -> None:
    """Copying counts, writing does not."""
    loop = Loop()
    loop.step()
    assert 0.0 < loop.recorder.counters.blocked_s < 5.0
    assert loop.wait()[0].copy_seconds <= loop.recorder.counters.blocked_s


@pytest.mark.parametrize("name", ["original_optimizer", "optimizer", "_optimizer"])
def test_wrappers_are_looked_through(name: str) -> None:
    """Also where they delegate every attribute to what they wrap."""

    class Wrapper:
        def __init__(self, inner: Any) -> None:
            setattr(self, name, inner)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(vars(self)[name], attribute)

    inner = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert base_optimizer(Wrapper(Wrapper(inner))) is inner
    assert base_optimizer(inner) is inner


def test_a_disk_that_is_stuck_does_not_hold_up_the_end_of_training(caplog: pytest.LogCaptureFixture) -> None:
    """Training waits for the writer for a limited time, and may end before it."""
    stuck = threading.Event()
    loop = Loop(write=lambda kept: stuck.wait(20))
    loop.step()
    start = time.monotonic()
    loop.recorder.remove(patience_s=0.1)
    assert time.monotonic() - start < 5.0
    assert "the last kept step is still not on the disk after 0.1 s" in caplog.text
    assert loop.recorder.writer.thread is not None and loop.recorder.writer.thread.daemon
    stuck.set()


def test_a_loop_that_calls_another_object_than_it_was_said_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    """An update whose batch was not seen is not kept."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    written: list[KeptStep] = []
    recorder = Recorder(model, optimizer, written.append, called=nn.Sequential(model))
    recorder.install()
    recorder.start(0, manifest(model))
    model(input_ids=IDS, labels=torch.tensor([1])).loss.backward()
    optimizer.step()
    recorder.remove()
    assert not written and recorder.counters.failed == 1
    assert "give the audit the object that the training loop calls" in caplog.text


def test_the_model_is_walked_once_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its `state_dict`, which costs as much again, not at all."""
    loop = Loop()
    walks: list[str] = []
    names, state = loop.model.named_parameters, loop.model.state_dict

    def to_the_end(*args: Any, **kwargs: Any) -> Any:
        yield from names(*args, **kwargs)
        walks.append("names")  # looking at the first parameter only is no walk

    def whole_state(*args: Any, **kwargs: Any) -> Any:
        walks.append("state")
        return state(*args, **kwargs)

    monkeypatch.setattr(loop.model, "named_parameters", to_the_end)
    monkeypatch.setattr(loop.model, "state_dict", whole_state)
    loop.recorder.start(0, loop.manifest)
    loop.forward().backward()
    loop.optimizer.step()
    assert walks == ["names"]
    loop.wait()


def test_a_step_that_is_too_large_for_the_pool_is_written_while_the_optimizer_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is written directly from the model, and is the same to the bit."""
    runs = []
    for limit in (copies.POOL_BYTES, 0):
        monkeypatch.setattr(copies, "POOL_BYTES", limit)
        written: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

        def write(kept: KeptStep, written: Any = written) -> None:
            written.append(
                ({n: dense(g).clone() for n, g in kept.update.items()}, {n: w.clone() for n, w in kept.weights.items()})
            )

        loop = Loop(torch.optim.AdamW, write)
        for number in range(3):
            loop.step(number)
            while loop.recorder.writing():
                loop.recorder.written()
        runs.append((written, dict(loop.model.named_parameters()), loop.recorder.buffers.tensors))
    (pooled, one, buffers), (direct, two, none) = runs
    assert buffers and not none
    assert same(one, two)
    assert len(pooled) == len(direct) == 3
    assert all(same(a[part], b[part]) for a, b in zip(pooled, direct, strict=True) for part in (0, 1))


def test_a_model_can_be_copied_and_saved_while_a_step_is_recorded() -> None:
    """Averaged weights are made by `deepcopy`; the hooks of a copy record nothing."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    written: list[KeptStep] = []
    recorder = Recorder(model, optimizer, written.append, called=model)
    recorder.install()
    recorder.start(0, manifest(model))
    inputs = {"input_ids": IDS, "labels": torch.tensor([1])}
    model(**inputs).loss.backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(**inputs).loss.backward()
    optimizer.step()
    recorder.remove()
    assert len(written[0].truth.micro_batches) == 1 and not recorder.disabled


def test_a_step_that_ends_before_all_its_optimizers_stepped_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """As a trainer does that says when a step ends."""
    model = tiny.bert().train()
    optimizers = [torch.optim.SGD(model.classifier.parameters(), lr=0.1), torch.optim.Adam(model.bert.parameters())]  # type: ignore[union-attr]
    written: list[KeptStep] = []
    recorder = Recorder(model, optimizers, written.append, called=model)
    recorder.install()
    recorder.start(0, manifest(model))
    model(input_ids=IDS, labels=torch.tensor([1])).loss.backward()
    optimizers[0].step()
    recorder.cancel()
    recorder.remove()
    assert not written and recorder.counters.failed == 1
    assert "the step ended before Adam had stepped" in caplog.text
