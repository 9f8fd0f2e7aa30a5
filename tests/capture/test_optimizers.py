"""The kept update is what moved the weights; otherwise the step is refused.

Every configuration is trained twice from one seed. The run without an audit notes weights and gradients by itself; the run with one
must keep the same, and end with the same weights and random state to the bit.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.recording import copies
from leakaudit.client.snapshot import Snapshot
from leakaudit.config.audit import PluginSpec
from leakaudit.results.schema import VerificationStatus
from tests.support import stacks, tiny
from tests.support.own_optimizers import (
    Averaged,
    EightBits,
    LatelyPrivate,
    Lion,
    OwnSam,
    Plain,
    Private,
    PrivateChild,
    Sam,
    Scratch,
    Several,
    Wrapper,
    climb,
    muon_and_adamw,
)
from tests.support.tiny_trainer import (
    Probe,
    audit_config,
    distance,
    kept,
    make_trainer,
    stamp,
    train,
    without_side_process,
)

VERIFIED, MISMATCH = VerificationStatus.VERIFIED, VerificationStatus.MISMATCH
STEPS = 4


def named(model: nn.Module, of: Callable[[Any], Tensor | None]) -> dict[str, Tensor]:
    """Return copies of what there is of every parameter."""
    found = ((name, of(p)) for name, p in model.named_parameters())
    return {name: one.detach().clone() for name, one in found if one is not None}


@dataclass
class Note:
    """What one training notes by itself, a step an entry."""

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    updates: list[dict[str, Tensor]] = field(default_factory=list)

    def received(self, model: nn.Module) -> None:
        """Note the weights that the client received."""
        self.weights.append(named(model, lambda p: p))

    def sent(self, model: nn.Module) -> None:
        """Note the gradients that are about to move the weights."""
        self.updates.append(named(model, lambda p: p.grad))


Step = Callable[[nn.Module, Any, stacks.Batch, Note], None]


def usual(model: nn.Module, optimizer: Any, batch: stacks.Batch, note: Note) -> None:
    """Make a step as most loops do."""
    note.received(model)
    model(**batch).loss.backward()
    note.sent(model)
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        one.step()
    model.zero_grad()


def sam_closure(model: nn.Module, optimizer: Any, batch: stacks.Batch, note: Note) -> None:
    """Make a step of SAM with a closure; compute what it sends on a copy of the model."""
    note.received(model)
    model(**batch).loss.backward()
    note.updates.append(_at_the_worst(model, batch))

    def closure() -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()


def sam_two_steps(model: nn.Module, optimizer: Any, batch: stacks.Batch, note: Note) -> None:
    """Make the same step in two calls."""
    note.received(model)
    model(**batch).loss.backward()
    note.updates.append(_at_the_worst(model, batch))
    optimizer.first_step()
    model(**batch).loss.backward()
    optimizer.second_step()


def _at_the_worst(model: nn.Module, batch: stacks.Batch) -> dict[str, Tensor]:
    """Return the gradient at SAM's perturbed weights, without changing anything."""
    other = copy.deepcopy(model)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.grad = None if mine.grad is None else mine.grad.clone()
    climb(torch.optim.SGD([{"params": list(other.parameters()), "rho": 0.5}], lr=0.1))
    other.zero_grad()
    with torch.random.fork_rng():
        other(**batch).loss.backward()
    return named(other, lambda p: p.grad)


@dataclass
class Ran:
    """What a training left."""

    weights: dict[str, Tensor]
    random: Tensor
    note: Note
    kept: dict[int, Snapshot]


def run(
    folder: Path, make: Callable[[nn.Module], Any], step: Step, *, audit: bool, watched: Any = None, **config: Any
) -> Ran:
    """Train with or without an audit, from one seed.

    Args:
        folder: for the audit.
        make: makes what the loop steps, of the model.
        step: makes one step.
        audit: whether to audit.
        watched: picks what `watch` is given out of what the loop steps; None for all of it.
        config: further entries of the configuration.
    """
    torch.manual_seed(0)
    model = tiny.bert(dropout=0.1).train()
    optimizer = make(model)
    note, found = Note(), {}
    batches = stacks.classes(count=STEPS)
    given = optimizer if watched is None else watched(optimizer)
    if audit:
        watching = watch(
            model, given, tokenizer=tiny.bert_tokenizer(), config=audit_config(folder, max_snapshots=50, **config)
        )
        with without_side_process(), watching:
            for batch in batches:
                step(model, optimizer, batch, note)
        if watching.folder is not None and (watching.folder / "spool").exists():
            found = kept(watching)
    else:
        for batch in batches:
            step(model, optimizer, batch, note)
    return Ran(named(model, lambda p: p), torch.get_rng_state(), note, found)


def both(folder: Path, make: Any, step: Any = usual, **options: Any) -> Ran:
    """Train twice; return the audited run with what the other one noted."""
    alone, audited = (run(folder, make, step, audit=audit, **options) for audit in (False, True))
    assert all(torch.equal(alone.weights[name], audited.weights[name]) for name in alone.weights)
    assert torch.equal(alone.random, audited.random)
    return Ran(audited.weights, audited.random, alone.note, audited.kept)


def assert_right(ran: Ran, steps: list[int], *, verified: bool = True) -> None:
    """Hold what was kept against what the training without an audit noted, bit by bit."""
    assert list(ran.kept) == steps
    for step, snapshot in ran.kept.items():
        update, weights = ran.note.updates[step], ran.note.weights[step]
        assert set(snapshot.observation.update) == set(update)
        assert all(torch.equal(snapshot.observation.update[name], update[name]) for name in update)
        state = snapshot.observation.model.state_dict()
        assert all(torch.equal(state[name], weights[name]) for name in weights)
        found = stamp(snapshot)
        assert found.status is VERIFIED if verified else found.status is MISMATCH, found


EVERY = list(range(STEPS))
SGD = torch.optim.SGD


# ---------------------------------------------------------------------- right


RIGHT: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1),
    "sgd, nesterov, foreach": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True, weight_decay=0.01),
    "sgd, nesterov, one by one": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "sgd, fused": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adamw, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "adamw, foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "adam, maximize": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, maximize=True, foreach=True),
    "adafactor of transformers": lambda m: transformers.Adafactor(m.parameters(), lr=1e-3, relative_step=False),
    "own, plain": lambda m: Plain(m.parameters()),
    "own, decay added in place": lambda m: Plain(m.parameters(), decay=0.1),
    "own, divided in place": lambda m: Scratch(m.parameters()),
    "own, divided in place and decayed": lambda m: Scratch(m.parameters(), decay=0.05),
    "own, averaged iterates": lambda m: Averaged(m.parameters()),
    "lion": lambda m: Lion(m.parameters()),
    "moments of 8 bits": lambda m: EightBits(m.parameters()),
    "muon and adamw": lambda m: muon_and_adamw(m.parameters()),
    "muon and adamw in one": lambda m: Several(m.parameters()),
    "a wrapper of a wrapper": lambda m: Wrapper(Wrapper(SGD(m.parameters(), lr=0.1))),
    "three in a list": lambda m: [SGD(part, lr=0.1) for p in [list(m.parameters())] for part in (p[2:], p[:1], p[1:2])],
}  # fmt: skip


@pytest.mark.parametrize("kind", RIGHT)
def test_the_update_is_what_moves_the_weights(tmp_path: Path, kind: str) -> None:
    """Of torch, of others that only add weight decay, and of several as one."""
    assert_right(both(tmp_path, RIGHT[kind]), EVERY)


def test_groups_that_are_added_in_training_are_in_the_update(tmp_path: Path) -> None:
    """The body is unfrozen after two steps."""

    def make(model: Any) -> Any:
        model.bert.requires_grad_(False)
        return SGD(model.classifier.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, batch: stacks.Batch, note: Note) -> None:
        usual(model, optimizer, batch, note)
        if len(note.weights) == 2:
            optimizer.add_param_group({"params": list(model.bert.parameters())})
            model.bert.requires_grad_(True)

    ran = both(tmp_path, make, step)
    assert_right(ran, EVERY)
    assert [len(s.observation.update) for s in ran.kept.values()] == [2, 2, 41, 41]


def test_sam_keeps_the_weights_that_the_client_received(tmp_path: Path) -> None:
    """With a closure and in two steps: a note says that it cannot be repeated."""
    for step in (sam_closure, sam_two_steps):
        ran = both(tmp_path / step.__name__, lambda model: Sam(model.parameters()), step)
        _assert_nearly_right(ran, EVERY)
        assert all(
            "forward passes saw other weights than those that are kept (SAM, FGM)" in s.recipe.note
            for s in ran.kept.values()
        )


def test_sam_that_moves_the_weights_itself_is_kept_from_the_second_due_step_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights differ from those of the first pass, which is seen too late."""
    ran = both(tmp_path, lambda model: OwnSam(model.parameters()), sam_closure)
    assert (
        "step 0 was not kept: the weights of 41 of 41 parameters changed between its first forward pass" in caplog.text
    )
    _assert_nearly_right(ran, EVERY[1:])


def _assert_nearly_right(ran: Ran, steps: list[int]) -> None:
    """Weights to the bit; the update as far as two passes agree under dropout."""
    assert list(ran.kept) == steps
    for step, snapshot in ran.kept.items():
        state = snapshot.observation.model.state_dict()
        assert all(torch.equal(state[name], weight) for name, weight in ran.note.weights[step].items())
        assert distance(snapshot.observation.update, ran.note.updates[step]) < 1e-5


# ---------------------------------------------------------------------- not kept, by name


WRONG: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "noise in place": (lambda m: Private(m.parameters()), "Private changes the gradients of 41 of 41 parameters inside its step"),
    "noise in place by .data": (lambda m: Private(m.parameters(), way="data"), "Private changes the gradients of"),
    "gradients replaced": (lambda m: Private(m.parameters(), way="replaced"), "Private changes the gradients of"),
    "noise out of place": (lambda m: Private(m.parameters(), way="out"), "Private keeps no state and does not move the weights along"),
    "noise, then emptied": (lambda m: Private(m.parameters(), way="emptied"), "Private keeps no state and does not move the weights along"),
    "momentum of noise": (lambda m: Private(m.parameters(), way="out", momentum=True), "Private draws random numbers in its step"),
    "noise in a child of SGD": (lambda m: PrivateChild(m.parameters(), lr=0.1), "PrivateChild changes the gradients of"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_noise_inside_a_step_is_not_kept_as_the_gradient_before_it(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The message names the optimizer's class; a nested `step` is no step."""
    SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # from here on torch calls the hooks of a child of SGD twice
    make, message = WRONG[kind]
    ran = both(tmp_path, make)
    assert not ran.kept
    assert message in caplog.text and caplog.text.count("was not kept") == 1
    assert "before the optimizer steps, where the audit sees it" in caplog.text


@pytest.mark.parametrize("way", ["in place", "data", "replaced"])
def test_declared_noise_inside_a_step_is_kept_and_recognised(tmp_path: Path, way: str) -> None:
    """The gradients after the step are the update; the stamp states the noise."""
    declared = PluginSpec(name="gaussian-noise", options={"sigma": 0.01})
    sent = []

    def step(model: nn.Module, optimizer: Any, batch: stacks.Batch, note: Note) -> None:
        note.received(model)
        model(**batch).loss.backward()
        optimizer.step()
        note.sent(model)
        sent.append(note)
        model.zero_grad()

    ran = both(tmp_path, lambda m: Private(m.parameters(), way=way), step, shipped_defense=declared)
    assert list(ran.kept) == EVERY
    for number, snapshot in ran.kept.items():
        update = ran.note.updates[number]
        assert all(torch.equal(snapshot.observation.update[name], update[name]) for name in update)
        found = stamp(snapshot)
        assert found.status is VerificationStatus.NOISED and found.sigma == pytest.approx(0.01, rel=0.1)


def halve(optimizer: Any, *_arguments: Any) -> None:
    """Halve the gradients, as a hook before a step."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


@pytest.mark.parametrize("order", ["before", "after", "everywhere", "in the middle"])
def test_hooks_of_others_are_seen_whenever_they_are_set(tmp_path: Path, order: str) -> None:
    """Set before the audit, after it, for all optimizers or between two steps."""
    handles = []

    def make(model: nn.Module) -> Any:
        optimizer = SGD(model.parameters(), lr=0.1)
        if order == "before":
            handles.append(optimizer.register_step_pre_hook(halve))
        if order == "everywhere":
            handles.append(register_optimizer_step_pre_hook(halve))
        return optimizer

    def step(model: nn.Module, optimizer: Any, batch: stacks.Batch, note: Note) -> None:
        number = len(note.weights)
        if (order == "after" and number == 0) or (order == "in the middle" and number == 2):
            handles.append(optimizer.register_step_pre_hook(halve))
        note.received(model)
        model(**batch).loss.backward()
        optimizer.step()
        note.sent(model)
        model.zero_grad()

    def trained(*, audit: bool) -> Ran:
        ran = run(tmp_path, make, step, audit=audit)
        while handles:
            handles.pop().remove()
        return ran

    ran, audited = trained(audit=False), trained(audit=True)
    assert all(torch.equal(ran.weights[name], audited.weights[name]) for name in ran.weights)
    assert list(audited.kept) == EVERY
    for number, snapshot in audited.kept.items():
        assert all(torch.equal(g, ran.note.updates[number][name]) for name, g in snapshot.observation.update.items())
        halved = order != "in the middle" or number >= 2
        found = stamp(snapshot)
        assert found.scale == pytest.approx(0.5 if halved else 1.0)


def test_a_hook_that_is_set_after_the_forward_pass_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its effect is seen after the step, also under an optimizer of torch."""

    def double(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(2.0)

    def step(model: nn.Module, optimizer: Any, batch: stacks.Batch, note: Note) -> None:
        note.received(model)
        model(**batch).loss.backward()
        if len(note.weights) == 1:
            optimizer.register_step_pre_hook(double)
        optimizer.step()
        note.sent(model)
        model.zero_grad()

    ran = both(tmp_path, lambda model: SGD(model.parameters(), lr=0.1), step)
    assert_sent(ran, EVERY[1:])
    assert "step 0 was not kept: a hook that was set after the audit's changed the gradients" in caplog.text


def assert_sent(ran: Ran, steps: list[int]) -> None:
    """Hold the kept updates against what was sent."""
    assert list(ran.kept) == steps
    for number, snapshot in ran.kept.items():
        assert all(torch.equal(g, ran.note.updates[number][name]) for name, g in snapshot.observation.update.items())


def test_a_hook_that_runs_the_model_is_not_disturbed(tmp_path: Path) -> None:
    """Our hook moves in torch's dictionary, but never during an iteration over it."""

    def make(model: nn.Module) -> Any:
        optimizer = SGD(model.parameters(), lr=0.1)
        batch = stacks.classes(count=1)[0]
        optimizer.register_step_pre_hook(lambda *given: model(**batch).loss.item() and None)
        return optimizer

    def step(model: nn.Module, optimizer: Any, batch: stacks.Batch, note: Note) -> None:
        if not note.weights:
            optimizer.register_step_pre_hook(lambda *given: None)
        usual(model, optimizer, batch, note)
        optimizer.register_step_pre_hook(lambda *given: None)

    assert_right(both(tmp_path, make, step), EVERY)


@pytest.mark.parametrize("kind", ["own, plain", "muon and adamw", "sgd", "noise in place"])
def test_a_step_too_large_for_a_copy_is_written_once_its_optimizers_are_known(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is written before the step; unknown optimizers are watched first."""
    monkeypatch.setattr(copies, "POOL_BYTES", 0)
    ran = both(tmp_path, WRONG[kind][0] if kind in WRONG else RIGHT[kind])
    assert_right(ran, {"sgd": EVERY, "noise in place": []}.get(kind, EVERY[1:]))
    assert ("must see one step of this optimizer to the end first" in caplog.text) is (kind != "sgd")


def test_a_step_that_turns_out_wrong_after_it_was_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its optimizer was plain before; the update on the disk is not what it sent."""
    monkeypatch.setattr(copies, "POOL_BYTES", 0)
    ran = both(tmp_path, lambda model: LatelyPrivate(model.parameters()))
    assert 2 not in ran.kept and max(ran.kept, default=0) <= 1
    assert "was written and removed again, because it is not what the client sends" in caplog.text


# ---------------------------------------------------------------------- several optimizers


def test_one_of_several_optimizers_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others' parameters are never called frozen; three messages say why."""
    ran = both(tmp_path, lambda model: muon_and_adamw(model.parameters()), watched=lambda optimizers: optimizers[0])
    assert not ran.kept
    found = "that have a gradient and are in no optimizer that the audit was given; give the audit all optimizers"
    assert found in caplog.text and "`requires_grad_(False)`" in caplog.text
    before, after = capsys.readouterr().err.split("no step was kept")
    assert "that require a gradient and are in no optimizer that the audit was given" in before
    assert found in after


def test_gradients_that_are_clipped_between_two_optimizers_are_those_that_are_kept(tmp_path: Path) -> None:
    """Each optimizer's part is what it was given."""

    def step(model: nn.Module, optimizers: Any, batch: stacks.Batch, note: Note) -> None:
        note.received(model)
        model(**batch).loss.backward()
        sent: dict[str, Tensor] = {}
        for one in optimizers:
            mine = [p for group in one.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(mine, 0.01)
            ids = {id(p) for p in mine}
            sent |= {
                name: g for name, g in named(model, lambda p: p.grad).items() if id(model.get_parameter(name)) in ids
            }
            one.step()
        note.updates.append(sent)
        model.zero_grad()

    assert_sent(both(tmp_path, lambda model: muon_and_adamw(model.parameters()), step), EVERY)


@pytest.mark.parametrize(("often", "steps"), [("the first", [0, 1]), ("the second", [0, 1])])
def test_a_step_of_several_is_the_one_in_which_all_step(tmp_path: Path, often: str, steps: list[int]) -> None:
    """One of them steps every other time; passes in between belong to another update."""
    complete: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def step(model: nn.Module, optimizers: Any, batch: stacks.Batch, note: Note) -> None:
        note.received(model)
        model(**batch).loss.backward()
        note.sent(model)
        whole = len(note.weights) % 2 == 0
        for number, one in enumerate(optimizers):
            if whole or number == (0 if often == "the first" else 1):
                one.step()
        if whole:
            complete.append((note.updates[-1], note.weights[-1]))
        model.zero_grad()

    ran = both(tmp_path, lambda model: muon_and_adamw(model.parameters()), step)
    assert list(ran.kept) == steps
    for (update, weights), snapshot in zip(complete, ran.kept.values(), strict=False):
        assert all(torch.equal(g, update[name]) for name, g in snapshot.observation.update.items())
        state = snapshot.observation.model.state_dict()
        assert all(torch.equal(state[name], weights[name]) for name in weights)
        assert len(snapshot.truth.micro_batches) == 1
        assert stamp(snapshot).status is VERIFIED


def test_gradients_that_one_optimizer_accumulates_while_another_steps_are_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They come from several sets of weights."""

    def step(model: nn.Module, optimizers: Any, batch: stacks.Batch, note: Note) -> None:
        note.received(model)
        model(**batch).loss.backward()
        for one in optimizers[: 1 + (len(note.weights) % 2 == 0)]:
            one.step()
            one.zero_grad()

    ran = both(tmp_path, lambda model: muon_and_adamw(model.parameters()), step)
    assert not ran.kept
    assert "one of its optimizers accumulates gradients over several steps of another one" in caplog.text


def test_optimizers_that_step_in_turn_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in adversarial games: no forward pass belongs to the steps of both."""

    def step(model: nn.Module, optimizers: Any, batch: stacks.Batch, note: Note) -> None:
        note.received(model)
        for one in optimizers * 3:
            model(**batch).loss.backward()
            one.step()
            model.zero_grad()

    ran = both(tmp_path, lambda model: muon_and_adamw(model.parameters()), step)
    assert not ran.kept
    assert "in 16 attempts a forward pass began before" in caplog.text
    assert "the audit needs all optimizers to step without a forward pass between them" in caplog.text


def test_optimizers_that_step_in_the_backward_pass_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not all gradients are there when they do."""

    def make(model: nn.Module) -> Any:
        optimizers = {p: SGD([p], lr=0.1) for p in model.parameters() if p.requires_grad}

        def move(p: Any) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in optimizers:
            p.register_post_accumulate_grad_hook(move)
        return list(optimizers.values())

    def step(model: nn.Module, optimizers: Any, batch: stacks.Batch, note: Note) -> None:
        model(**batch).loss.backward()

    ran = both(tmp_path, make, step)
    assert not ran.kept
    assert "its optimizer steps during the backward pass" in caplog.text


def test_several_optimizers_have_no_difference_of_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said before the first step."""
    model = tiny.bert().train()
    optimizers = [SGD(model.classifier.parameters(), lr=0.1), SGD(model.bert.parameters(), lr=0.1)]  # type: ignore[union-attr]
    with watch(model, optimizers, tokenizer=tiny.bert_tokenizer(), observe="delta", config=audit_config(tmp_path)):
        pass
    assert "`observe='delta'` is for one optimizer; 2 were given" in caplog.text


# ---------------------------------------------------------------------- weights that change on the way


def test_weights_that_are_swapped_and_put_back_change_nothing(tmp_path: Path) -> None:
    """Averaged weights are evaluated between backward pass and step; a note says so."""

    def step(model: nn.Module, optimizer: Any, batch: stacks.Batch, note: Note) -> None:
        note.received(model)
        model(**batch).loss.backward()
        note.sent(model)
        mine = named(model, lambda p: p)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
            model(**batch)
            for name, p in model.named_parameters():
                p.copy_(mine[name])
        optimizer.step()
        model.zero_grad()

    ran = both(tmp_path, lambda model: SGD(model.parameters(), lr=0.1), step)
    assert_right(ran, EVERY)
    assert all("weights were written to" in snapshot.recipe.note for snapshot in ran.kept.values())


def test_fgm_is_named_in_the_note(tmp_path: Path) -> None:
    """Its second pass sees other embeddings, so that it cannot be repeated."""

    def step(model: Any, optimizer: Any, batch: stacks.Batch, note: Note) -> None:
        note.received(model)
        model(**batch).loss.backward()
        table = model.get_input_embeddings().weight
        backup = table.data.clone()
        table.data.add_(table.grad / table.grad.norm())
        model(**batch).loss.backward()
        table.data = backup
        note.sent(model)
        optimizer.step()
        model.zero_grad()

    ran = both(tmp_path, lambda model: SGD(model.parameters(), lr=0.1), step)
    assert_right(ran, EVERY, verified=False)
    assert all("FGM" in snapshot.recipe.note for snapshot in ran.kept.values())


# ---------------------------------------------------------------------- frameworks


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # of Opacus
@pytest.mark.parametrize("knob", ["noise_multiplier", "max_grad_norm"])
def test_the_knobs_of_a_private_optimizer_are_those_of_its_step(tmp_path: Path, knob: str) -> None:
    """Schedulers of Opacus change them after each step; they are read at the next one."""
    wanted = [0.5, 1.0, 2.0]
    updates, weights = [], []
    for audit in (False, True):
        torch.manual_seed(0)
        model, optimizer = _private(knob, wanted[0])
        if audit:
            watching = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
        with without_side_process(), watching if audit else contextlib.nullcontext():
            for number, batch in enumerate(stacks.classes(size=4, count=3)):
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()
                weights.append(named(model, lambda p: p))
                if not audit:
                    updates.append({n.removeprefix("_module."): g for n, g in named(model, lambda p: p.grad).items()})
                if number + 1 < len(wanted):
                    setattr(optimizer, knob, wanted[number + 1])
    for one, two in zip(weights[:3], weights[3:], strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    found = kept(watching)
    assert list(found) == [0, 1, 2]
    for number, snapshot in found.items():
        assert snapshot.observation.facts.defenses[0].parameters[knob] == wanted[number]
        assert all(torch.equal(g, updates[number][name]) for name, g in snapshot.observation.update.items())
        expected = VERIFIED if knob == "max_grad_norm" else VerificationStatus.NOISED
        assert stamp(snapshot).status is expected


def _private(knob: str, first: float) -> tuple[Any, Any]:
    """Return a model and an optimizer of Opacus, with one setting at its first value."""
    from opacus import PrivacyEngine

    model: Any = tiny.bert().train()
    model.bert.embeddings.position_embeddings.weight.requires_grad_(False)
    knobs = {"noise_multiplier": 0.0, "max_grad_norm": 1e-3} | {knob: first}
    numbers: Any = list(range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private = PrivacyEngine().make_private(
            module=model, optimizer=SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
            data_loader=torch.utils.data.DataLoader(numbers, batch_size=4), poisson_sampling=False, **knobs,
        )  # fmt: skip
    return private[0], private[1]


def test_several_optimizers_of_manual_optimisation_are_one_update(tmp_path: Path) -> None:
    """Lightning: both move the model, and both parts are kept."""
    import lightning.pytorch as pl

    from leakaudit.callbacks.lightning_trainer import LeakAuditCallback

    note = Note()
    batches = stacks.classes(count=STEPS)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.bert(dropout=0.1).train()
            self.automatic_optimization = False

        def training_step(self, batch: stacks.Batch, index: int) -> None:
            for one in self.optimizers():  # type: ignore[union-attr]
                one.zero_grad()
            note.received(self.model)
            self.manual_backward(self.model(**batch).loss)
            note.sent(self.model)
            for one in self.optimizers():  # type: ignore[union-attr]
                one.step()

        def configure_optimizers(self) -> Any:
            return muon_and_adamw(self.parameters())

    left = []
    for audit in (False, True):
        torch.manual_seed(0)
        callback = LeakAuditCallback(
            audit_config(tmp_path / str(audit), max_snapshots=50), tokenizer=tiny.bert_tokenizer()
        )
        module = Module()
        with without_side_process(), stacks._quiet_lightning():
            trainer = pl.Trainer(
                max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, default_root_dir=tmp_path, callbacks=[callback] if audit else [],
            )  # fmt: skip
            trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=1, collate_fn=lambda rows: rows[0]))  # type: ignore[arg-type]
        left.append(named(module, lambda p: p))
    assert all(torch.equal(left[0][name], left[1][name]) for name in left[0])
    assert_right(Ran(left[0], torch.get_rng_state(), note, kept(callback)), EVERY)


def test_a_trainer_with_several_optimizers_in_one_keeps_the_whole_update(tmp_path: Path) -> None:
    """The Hugging Face Trainer gets one object; its base optimizers are found."""
    probe = Probe()
    left = []
    for audit in (False, True):
        torch.manual_seed(0)
        model = tiny.bert(dropout=0.1)
        options: Any = {"trainer_options": {"optimizers": (Several(model.parameters()), None)}, "model": model}
        if audit:
            found = train(tmp_path / "on", probe, **options)
        else:
            make_trainer(tmp_path / "off", **options).train()
        left.append(named(model, lambda p: p))
    assert all(torch.equal(left[0][name], left[1][name]) for name in left[0])
    assert list(found) == [0, 1, 2]
    for number, snapshot in found.items():
        assert all(torch.equal(g, probe.updates[number][name]) for name, g in snapshot.observation.update.items())
        assert stamp(snapshot).status is VERIFIED
