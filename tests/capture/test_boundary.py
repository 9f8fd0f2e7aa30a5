"""No defect of this package changes what a training leaves.

Every function of ours that a training reaches raises in its turn, at its first call and once more in each later step. Marked
`integrations`: the same from the third call on, and what adapters share once more under each framework.
"""

from __future__ import annotations

import functools
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.boundary import Ending, around, entry, from_signal_handler, suppress
from leakaudit.capture.context import OFF_SWITCH
from leakaudit.config.audit import AuditConfig, PluginSpec
from tests.support import tiny
from tests.support.sabotage import CANARY, Sabotage, SabotageError, name_of, reached
from tests.support.tiny_trainer import make_trainer

BETWEEN = {
    "capture/boundary.py::around.<locals>.observed",
    "callbacks/hf_trainer.py::_noting.<locals>.observed",
    "capture/boundary.py::suppress.__exit__",
    "capture/boundary.py::Hook.__call__",
}
"""Our one frame around a function of the user's: if it could be skipped, so could what the user wants to be called. And the frame that
lets pass what the user's signal handlers raise. And the frame that leaves a hook out of a graph that may not break: a guard around it would
break the graph."""

STEPS = 3
TOKENIZER = tiny.bert_tokenizer()
BATCHES = [
    TOKENIZER([text], return_tensors="pt") | {"labels": torch.tensor([number % 2])}
    for number, text in enumerate(("the old dog chased a cat .", "a small bird saw it .", "one horse ate ."))
]
ARRAYS = [(torch.arange(8.0).reshape(1, 8) + number, torch.tensor([number])) for number in range(STEPS)]
LEAVE: Mapping[str, Any] = {"schedule": "deferred", "at_end": "leave"}


class UserError(Exception):
    """What the user's own code raises."""


@dataclass(frozen=True)
class Trained:
    """What a training leaves."""

    weights: dict[str, Tensor]
    random: Tensor
    error: BaseException | None = None

    def same(self, other: Trained) -> bool:
        """Return whether two trainings left the same, bit by bit."""
        weights = all(torch.equal(self.weights[name], other.weights[name]) for name in other.weights)
        return weights and torch.equal(self.random, other.random) and self.error is other.error


@dataclass(frozen=True)
class Loop:
    """A plain training loop of three steps."""

    config: Mapping[str, Any] = field(default_factory=lambda: LEAVE)
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., Any] = torch.optim.SGD
    model: Callable[[], nn.Module] = lambda: tiny.bert(dropout=0.1, num_hidden_layers=1).train()
    batches: list[Any] = field(default_factory=lambda: BATCHES)
    error: BaseException | None = None
    """What the user's code raises in the last step."""
    everywhere: bool = False
    """Whether functions outside of callbacks/ and capture/ raise, too."""

    def train(self, folder: Path, again: Callable[[], None] = lambda: None) -> Trained:
        """Train with an audit; `again` is called in every step."""
        attacks = (PluginSpec(name="idlg"),)
        given = {"out_dir": folder, "every_n_steps": 1, "controls": 0, "attacks": attacks, **self.config}
        torch.manual_seed(0)
        model = self.model()
        optimizer = self.optimizer(model.parameters(), lr=0.1)
        tokenizer = None if "num_labels" in self.options else TOKENIZER
        audit = watch(model, optimizer, tokenizer=tokenizer, config=given, **self.options)
        error = None
        try:
            with audit:
                for number, batch in enumerate(self.batches):
                    again()
                    audit.batch(batch if isinstance(batch, Mapping) else {"labels": batch[1]})
                    self._step(model, optimizer, batch)
                    if self.error is not None and number == STEPS - 1:
                        raise self.error
        except UserError as mine:
            error = mine
        return Trained({name: p.detach().clone() for name, p in model.named_parameters()}, torch.get_rng_state(), error)

    def _step(self, model: nn.Module, optimizer: Any, batch: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            if isinstance(batch, Mapping):
                loss = model(**batch).loss
            else:
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss  # type: ignore[no-any-return]

        if self.optimizer is torch.optim.LBFGS:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _compiled() -> nn.Module:
    model = tiny.bert(dropout=0.1).train()
    model.compile(backend="eager")
    return model


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))


LOOPS = {
    "deferred": Loop(),
    "everywhere": Loop(everywhere=True),
    "beside": Loop({"wait_at_end_s": 0.0}),
    "broken off": Loop({"at_end": "leave"}, error=UserError("mine")),
    "closures": Loop(optimizer=torch.optim.LBFGS),
    "compiled": Loop(model=_compiled),
    "its own share": Loop(options={"observe": "local"}),
    "differences": Loop(options={"observe": "delta"}),
    "arrays, inline": Loop({"schedule": "inline"}, {"num_labels": 3}, model=_net, batches=ARRAYS),
}
_done: set[tuple[int, CodeType]] = set()
"""Calls and functions that raised at them already in an earlier loop."""
_tried: set[tuple[str, CodeType]] = set()
"""The same for adapters."""


def _in_training(code: CodeType) -> bool:
    return name_of(code).startswith(("callbacks/", "capture/", "audit/inline.py"))


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # a generator of ours that raises when it is dropped
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.integrations] if loop.everywhere else []) for kind, loop in LOOPS.items()],
)
@pytest.mark.parametrize("first", [1, pytest.param(3, marks=pytest.mark.integrations)])
def test_no_function_of_ours_can_stop_a_loop(
    first: int,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Weights and random state are the same to the bit.

    The user's own exception is unchanged, and no log has the message of an exception.
    """
    loop = LOOPS[kind]
    with monkeypatch.context() as off:
        off.setenv(OFF_SWITCH, "1")
        wanted = loop.train(tmp_path / "off")
    found = reached(lambda again: loop.train(tmp_path / "reached", again))
    ours = [code for code in found if (loop.everywhere or _in_training(code)) and name_of(code) not in BETWEEN]
    assert len(ours) > (150 if loop.everywhere else 20), "the trap sees what training reaches"
    targets = [code for code in ours if (first, code) not in _done]
    _done.update((first, target) for target in targets)
    wrong = list(_wrong(targets, loop.train, wanted, tmp_path, caplog, first))
    assert not wrong, "\n".join(wrong)
    assert CANARY not in capfd.readouterr().err


def _wrong(
    targets: list[CodeType],
    train: Callable[[Path, Callable[[], None]], Trained],
    wanted: Trained,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    first: int = 1,
) -> Iterator[str]:
    """Let each function raise in its turn; yield what is wrong then.

    It raises at its first call or a later one.
    """
    for number, target in enumerate(targets):
        caplog.clear()
        sabotage = Sabotage(target, first)
        where = f"{name_of(target)} at call {first}"
        try:
            with sabotage.at_work():
                left = train(folder / str(number), sabotage.again)
        except SabotageError:
            yield f"{where} stopped training"
            continue
        if not left.same(wanted):
            yield f"{where} changed what training leaves"
        if CANARY in caplog.text:
            yield f"{where}: the message of an exception was logged"
        warned = [r for r in caplog.records if "is off for this run" in r.message or "stops recording" in r.message]
        if len(warned) > 2:  # once by the recorder, once by the run
            yield f"{where} was said {len(warned)} times"


def test_a_defect_is_said_once_with_its_type_and_place_and_what_it_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for the recorder's part, one for the run's."""
    for name, says in (
        (
            "capture/recording/current_step.py::CurrentStep._copy",
            " after a SabotageError at sabotage.py",
        ),
        ("capture/run.py::AuditRun.decide", "is off for this run: SabotageError at sabotage.py"),
    ):
        found = reached(lambda again, name=name: LOOPS["deferred"].train(tmp_path / f"found {name[-4:]}", again))  # type: ignore[misc]
        sabotage = Sabotage(next(code for code in found if name_of(code) == name))
        caplog.clear()
        with sabotage.at_work():
            LOOPS["deferred"].train(tmp_path / f"raised {name[-4:]}", sabotage.again)
        said = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(said) == 1 and says in said[0] and "training continues" in said[0]


# ---------------------------------------------------------------------- frameworks


def _trainer(folder: Path, again: Callable[[], None] = lambda: None, *, error: BaseException | None = None) -> Trained:
    class Collator:
        def __call__(self, rows: list[Any]) -> Any:
            again()
            if error is not None and self.calls == STEPS - 1:
                raise error
            self.calls += 1
            return TOKENIZER.pad(rows, return_tensors="pt")

        calls = 0

    config = AuditConfig(out_dir=folder / "audit", every_n_steps=1, attacks=(PluginSpec(name="idlg"),), **LEAVE)
    audit = LeakAuditCallback(config)
    model = tiny.bert(dropout=0.1)
    torch.manual_seed(0)
    trainer = make_trainer(
        folder, audit, model=model, collator=Collator(), max_steps=STEPS, save_strategy="steps", save_steps=2
    )
    audit.attach(trainer)
    caught = None
    try:
        trainer.train()
    except UserError as mine:
        caught = mine
    return Trained({n: p.detach().clone() for n, p in model.named_parameters()}, torch.get_rng_state(), caught)


def _lightning(
    folder: Path, again: Callable[[], None] = lambda: None, *, error: BaseException | None = None
) -> Trained:
    import lightning

    from leakaudit.callbacks.lightning_trainer import LeakAuditCallback as LightningCallback

    model = tiny.bert(dropout=0.1)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, batch: Any, number: int) -> Any:
            again()
            if error is not None and number == STEPS - 1:
                raise error
            return self.inner(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    config = AuditConfig(out_dir=folder / "audit", every_n_steps=1, attacks=(PluginSpec(name="idlg"),), **LEAVE)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        callbacks=[LightningCallback(config, tokenizer=TOKENIZER)],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = torch.utils.data.DataLoader(BATCHES, batch_size=None)  # type: ignore[arg-type]
    torch.manual_seed(0)
    caught = None
    try:
        trainer.fit(Module().train(), loader)
    except UserError as mine:
        caught = mine
    return Trained({n: p.detach().clone() for n, p in model.named_parameters()}, torch.get_rng_state(), caught)


@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("train", "file"), [(_trainer, "hf_trainer.py"), (_lightning, "lightning_trainer.py")])
@pytest.mark.parametrize("error", [None, UserError("mine")])
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.integrations)])
def test_no_function_of_an_adapter_can_stop_its_framework(
    train: Callable[..., Trained],
    file: str,
    shared: bool,
    error: UserError | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the user's code raises arrives unchanged.

    A checkpoint is written in between. The loops above try what all adapters have in common.
    """
    with monkeypatch.context() as off:
        off.setenv(OFF_SWITCH, "1")
        wanted = train(tmp_path / "off", error=error)
    assert wanted.error is error
    found = reached(lambda again: train(tmp_path / "reached", again, error=error))
    homes = ("capture/boundary.py", "capture/adapter.py::Adapter") if shared else (f"callbacks/{file}",)
    targets = [
        c for c in found if name_of(c).startswith(homes) and name_of(c) not in BETWEEN and (file, c) not in _tried
    ]
    _tried.update((file, target) for target in targets)
    assert targets
    again = lambda folder, again: train(folder, again, error=error)
    wrong = list(_wrong(targets, again, wanted, tmp_path, caplog))
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------------- the mechanism


class Owner:
    """An object with entries that notes what went wrong in them."""

    def __init__(self) -> None:
        self.failed: list[Exception] = []

    def _fail(self, error: Exception) -> None:
        self.failed.append(error)
        raise error  # the guard itself breaks

    @entry
    def work(self, error: BaseException | None) -> str | None:
        if error is not None:
            raise error
        return "done"


def test_an_entry_keeps_exceptions_in_and_lets_ctrl_c_out() -> None:
    """Even where its owner cannot take the exception."""
    owner, problem = Owner(), ValueError()
    assert owner.work(None) == "done"
    assert owner.work(problem) is None and owner.failed == [problem]
    for out in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(out)) as found:
            owner.work(out)
        assert found.value is out


def test_what_the_users_function_raises_and_returns_goes_through_unchanged() -> None:
    """Around it, and at its end."""
    owner, mine = Owner(), UserError("mine")
    told: list[BaseException] = []

    def call(error: BaseException | None) -> str:
        if error is not None:
            raise error
        return "theirs"

    both = Ending(told.append)(around(call, owner.work, lambda outputs: owner.work(ValueError())))
    assert both(None) == "theirs" and len(owner.failed) == 1 and told == []
    with pytest.raises(UserError) as found:
        both(mine)
    assert found.value is mine and told == [mine]


# ---------------------------------------------------------------------- signals


class Preempted(OSError):
    """What a user's handler raises, of a kind that our code suppresses elsewhere."""


def _preempt(*args: Any) -> None:
    raise Preempted


class Handler:
    """A handler that `getsignal` does not know any more when it raises."""

    def __call__(self, number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        _preempt()

    def composed(self, number: int, frame: Any) -> None:
        self(number, frame)


HANDLERS: dict[str, Callable[..., None]] = {
    "a function of any arguments": _preempt,
    "an object": Handler(),
    "a method that calls another handler": Handler().composed,
    "a partial function": functools.partial(lambda name, number, frame: _preempt(), "train"),
    "a lambda with a keyword": lambda number, frame=None, *, more=1: _preempt(),
}


class Interrupted:
    """An object whose entry a signal interrupts."""

    def __init__(self, inner: Callable[[], object]) -> None:
        self.inner = inner
        self.failed: list[Exception] = []

    def _fail(self, error: Exception) -> None:
        self.failed.append(error)

    @entry
    def work(self) -> None:
        self.inner()


@pytest.fixture
def restored() -> Iterator[None]:
    """Put the handler of SIGUSR1 back."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def _send(*_: object) -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
def test_what_a_signal_handler_raises_inside_an_entry_reaches_the_loop(handler: Callable[..., None]) -> None:
    """The entry's owner hears nothing of it, and neither does a narrower guard inside."""
    for inner in (_send, suppress(OSError)(_send), lambda: list(map(_send, "a"))):
        signal.signal(signal.SIGUSR1, handler)
        interrupted = Interrupted(inner)
        with pytest.raises(Preempted):
            interrupted.work()
        assert interrupted.failed == []


@pytest.mark.usefixtures("restored")
def test_an_exception_beside_a_signal_handler_stays_a_defect() -> None:
    """A handler that returns changes nothing; nor do arguments like a handler's."""
    signal.signal(signal.SIGUSR1, lambda number, frame: None)

    def defect(number: int, frame: Any) -> None:
        _send()
        raise ValueError(number)

    for frame in (None, 3, sys._getframe()):
        one = Interrupted(lambda frame=frame: defect(10, frame))  # type: ignore[misc]
        one.work()
        assert [type(error) for error in one.failed] == [ValueError]
    assert not from_signal_handler(None)
